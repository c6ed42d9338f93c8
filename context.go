package hasp

import (
	"context"
	"sync/atomic"
	"time"
)

// leaseContext is the context of one or several leases. It is a child of Lock's context that also
// ends with the lease, at the lease's deadline at the latest.
type leaseContext struct {
	// Context is made by package context, so that children attach to it without a goroutine.
	context.Context

	lease *Lease // the innermost lease, for re-entry; nil if there is none
	held  holder // the Lease or the Leases with which the context ends; nil if there is none

	cancelOnly context.CancelCauseFunc // ends Context alone; see cancel
	parent     context.Context         // LockAll's context, if this is one it waits with; else nil

	// joint is the context of the Leases that the lease belongs to, or nil.
	joint atomic.Pointer[leaseContext]

	// The deadline of Lock's context, and whether it has one. They are read only once. Otherwise
	// each call of Deadline would climb the whole chain of the contexts of nested leases.
	deadline time.Time
	bounded  bool
}

// holder is a Lease or Leases. Err returns nil while it is held.
type holder interface{ Err() error }

// newLeaseContext returns a child of parent that ends with held. Its innermost lease is l.
func newLeaseContext(parent context.Context, l *Lease, held holder) *leaseContext {
	x := &leaseContext{lease: l, held: held}
	x.Context, x.cancelOnly = context.WithCancelCause(parent)
	x.deadline, x.bounded = parent.Deadline()
	return x
}

// cancel ends the context, and the joint context with it.
func (x *leaseContext) cancel(cause error) {
	x.cancelOnly(cause)
	if joint := x.joint.Load(); joint != nil {
		joint.cancelOnly(cause)
	}
}

// Err returns nil until the context ends. It reads the clock first.
func (x *leaseContext) Err() error {
	x.check()
	return x.Context.Err()
}

// Done returns a channel that is closed when the context ends. It reads the clock first.
func (x *leaseContext) Done() <-chan struct{} {
	x.check()
	return x.Context.Done()
}

// check ends the context if the lease has ended by the clock. It does not wait for the renewer,
// which may run late.
func (x *leaseContext) check() {
	if x.held == nil || x.Context.Err() != nil {
		return
	}
	if err := x.held.Err(); err != nil {
		x.cancel(err)
	}
}

// Deadline returns the deadline of Lock's context. The deadline of the lease itself moves with each
// renewal; Lease.Expires returns it.
func (x *leaseContext) Deadline() (time.Time, bool) { return x.deadline, x.bounded }

// leaseKey is the key under which a context returns its innermost leaseContext.
var leaseKey = new(int)

// Value returns x for leaseKey.
func (x *leaseContext) Value(key any) any {
	if key == any(leaseKey) {
		return x
	}
	return x.Context.Value(key)
}

// leaseContextOf returns the innermost leaseContext that ctx is derived from, or nil.
func leaseContextOf(ctx context.Context) *leaseContext {
	if ctx == nil {
		return nil
	}
	x, _ := ctx.Value(leaseKey).(*leaseContext)
	return x
}

// Held reports whether ctx is, or derives from, the context of a lease that holds key, such as the
// lease of a [Do] around the caller. A function that must run under the lock can call Held to check
// that. The lease may be of any Client; with WithSlots it has one slot of key.
func Held(ctx context.Context, key string) bool {
	x := leaseContextOf(ctx)
	if x == nil {
		return false
	}

	// Go from the innermost lease to the outermost one.
	for l := x.lease; l != nil; l = l.around {
		if l.key == key && l.Err() == nil {
			return true
		}
	}
	return false
}

// LeasesOf returns the lease of the innermost Lock that ctx is derived from. If ctx is derived from
// the context of [Leases], it returns all leases of that LockAll, in the order of their keys. If
// there is no lease, it returns nil. The leases may have ended. Package fence uses LeasesOf to find
// the fence of a write.
func LeasesOf(ctx context.Context) []*Lease {
	x := leaseContextOf(ctx)
	if x == nil || x.lease == nil {
		return nil
	}
	if all, ok := x.held.(*Leases); ok { // x is the context of Leases
		return all.All()
	}
	return []*Lease{x.lease}
}
