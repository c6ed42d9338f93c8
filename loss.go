package hasp

import (
	"cmp"
	"context"
	"time"
)

// This file ends holds that are lost: by the clock (endExpiredLocked), or by an answer of the store
// (batch.answer in renew.go). The context of the lease and an event report the loss to the program.

// endExpiredLocked ends the leases of h whose time is over by the clock, and returns them. The
// caller calls endContext of each, after it has released mu.
func (h *hold) endExpiredLocked(now instant) []*Lease {
	if now >= min(instant(h.deadline.Load()), h.limit) {
		h.lapsed = true
		return h.loseLocked(h.lapseLocked())
	}

	if now >= cmp.Or(h.lingers, never) {
		h.endLingerLocked(nil)
		return nil
	}

	// The hold goes on. End only the leases whose WithMaxHold is over.
	var ended []*Lease
	for i := len(h.leases) - 1; i >= 0; i-- {
		if l := h.leases[i]; now >= l.maxHold {
			h.leases = append(h.leases[:i], h.leases[i+1:]...)
			l.loseLocked(&LostError{Reason: LostMaxHold})
			ended = append(ended, l)
		}
	}
	switch {
	case len(ended) == 0:
	case len(h.leases) == 0:
		h.lapsed = true
		h.loseLocked(nil) // no lease is left that needs the reason
	default:
		h.c.renewer.scheduleLocked(h)
	}
	return ended
}

// lapseLocked returns why h has ended by the clock.
func (h *hold) lapseLocked() *LostError {
	switch {
	case h.limit <= instant(h.deadline.Load()):
		return &LostError{Reason: LostMaxHold}
	case h.failure != nil:
		return &LostError{LostUnanswered, h.failure}
	case h.renewal != renews:
		return &LostError{Reason: LostNotRenewed}
	}
	// All renewals have succeeded, so the process did not make the next one in time.
	return &LostError{Reason: LostStopped}
}

// loseLocked ends h as lost because of why, and returns its leases. The caller calls endContext of
// each, after it has released mu.
func (h *hold) loseLocked(why *LostError) []*Lease {
	ended := h.leases
	h.leases = nil
	for _, l := range ended {
		l.loseLocked(why)
	}
	h.c.renewer.unscheduleLocked(h)

	// Let the next caller ask the store before the contexts have ended. That is safe, because
	// Lease.Err, and Err and Done of the leases' contexts, already report the loss. Only contexts
	// derived from them end a moment later.
	h.line.endedLocked(h)
	return ended
}

// loseLocked ends l as lost because of why, and returns why.
func (l *Lease) loseLocked(why *LostError) error {
	l.loss = why // set before state, because cause reads both without mu
	l.state.Store(lost)
	return why
}

// endContext ends the context of a lease that has ended, and queues its event for the observer. The
// caller must not hold mu, because the end of a context runs code of its users.
func (l *Lease) endContext(cause error) {
	if x := l.ctx.Load(); x != nil {
		x.cancel(cause)
	}
	l.hold.c.observer.lost(l, cause)
}

// leaseContext is the context of a lease, or of several: a child of Lock's context that also ends
// with the lease, at its deadline at the latest.
type leaseContext struct {
	context.Context                          // made by package context, so that children attach to it without a goroutine
	lease           *Lease                   // the innermost lease, for re-entry
	held            interface{ Err() error } // the Lease or the Leases with which the context ends
	cancel          context.CancelCauseFunc

	// The deadline of Lock's context, read once. Otherwise each call of Deadline would climb the
	// whole chain of contexts of nested leases.
	deadline time.Time
	bounded  bool
}

func newLeaseContext(parent context.Context, l *Lease, held interface{ Err() error }) *leaseContext {
	x := &leaseContext{lease: l, held: held}
	x.Context, x.cancel = context.WithCancelCause(parent)
	x.deadline, x.bounded = parent.Deadline()
	return x
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
	if x.Context.Err() != nil {
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

// LeasesOf returns the lease of the innermost Lock that ctx is derived from. If ctx is derived from
// the context of [Leases], they are all leases of that LockAll, in the order of their keys. If there
// is no lease, LeasesOf returns nil. The leases may have ended. Package fence uses it to find the
// fence of a write.
func LeasesOf(ctx context.Context) []*Lease {
	x, _ := ctx.Value(leaseKey).(*leaseContext)
	if x == nil {
		return nil
	}
	if all, ok := x.held.(*Leases); ok {
		return all.All()
	}
	return []*Lease{x.lease}
}
