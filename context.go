package hasp

import (
	"context"
	"time"
)

// leaseContext is the context of a lease: a child of Lock's context that also
// ends with the lease, at its deadline at the latest.
type leaseContext struct {
	context.Context // of package context, so that children attach to it without a goroutine
	lease           *Lease
	cancel          context.CancelCauseFunc

	// The deadline of Lock's context, read once. Otherwise each call of Deadline
	// would climb the whole chain of contexts of nested leases.
	deadline time.Time
	bounded  bool
}

// Err returns nil until the context ends. It reads the clock first.
func (x *leaseContext) Err() error {
	x.check()
	return x.Context.Err()
}

// Done returns a channel that is closed when the context ends. It reads the clock
// first.
func (x *leaseContext) Done() <-chan struct{} {
	x.check()
	return x.Context.Done()
}

// check ends the context if the lease has ended by the clock. The renewer, which
// ends it otherwise, may run late.
func (x *leaseContext) check() {
	if x.Context.Err() != nil {
		return
	}
	if err := x.lease.Err(); err != nil {
		x.cancel(err)
	}
}

// Deadline returns the deadline of Lock's context. The deadline of the lease
// itself moves with each renewal; Lease.Expires returns it.
func (x *leaseContext) Deadline() (time.Time, bool) { return x.deadline, x.bounded }

// leaseKey is the key under which a context returns its innermost lease.
var leaseKey = new(int)

// Value returns the lease for leaseKey, for re-entry.
func (x *leaseContext) Value(key any) any {
	if key == any(leaseKey) {
		return x.lease
	}
	return x.Context.Value(key)
}
