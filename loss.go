package hasp

import (
	"cmp"
	"context"
	"errors"
	"sync/atomic"
	"time"
)

// This file ends holds that are not unlocked, because of the clock (endExpiredLocked) or of an
// answer of the store (batch.answer in renew.go). The context of the lease and an event tell the
// program.

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
		h.loseLocked(nil) // it has no lease left
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
	// All renewals have succeeded, so the next one was not made in time.
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

// leaseContext is the context of a lease, or of several: a child of Lock's context that also
// ends with the lease, at its deadline at the latest.
type leaseContext struct {
	context.Context                          // of package context, so that children attach to it without a goroutine
	lease           *Lease                   // the innermost one
	held            interface{ Err() error } // a Lease or Leases, with which it ends
	cancel          context.CancelCauseFunc

	// The deadline of Lock's context, read once. Otherwise each call of Deadline
	// would climb the whole chain of contexts of nested leases.
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

// check ends the context if the lease has ended by the clock, because the renewer may run late.
func (x *leaseContext) check() {
	if x.Context.Err() != nil {
		return
	}
	if err := x.held.Err(); err != nil {
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

// maxUnobserved is how many events may wait for Observe. If more wait, events of failed renewals
// are dropped, because such events repeat.
const maxUnobserved = 4096

// lastEventID is the last Event.ID of the process.
var lastEventID atomic.Uint64

// observer calls Options.Observe, if there is one. Events of a call come on the caller's goroutine.
// The others come on a goroutine of the observer, so that an Observe that blocks delays neither
// renewals nor the end of a context.
type observer struct {
	*core

	// Guarded by mu.
	running bool         // the goroutine exists; it ends when the queue is empty
	queue   []unobserved // in the order in which they happened
}

// unobserved is an event that waits for Observe.
type unobserved struct {
	ctx context.Context // Lock's, which may have ended
	e   Event
}

// event returns an event of l, with the fields that all its events have.
func (l *Lease) event(kind EventKind, err error) Event {
	return Event{Kind: kind, ID: l.id, Op: l.op, Key: l.key, Shared: l.shared, Reentry: l.reentry, Fence: l.hold.fence, Err: err}
}

// call calls Observe on the caller's goroutine.
func (o *observer) call(ctx context.Context, e Event) {
	if o.opts.Observe != nil {
		e.Owner = o.opts.Owner
		if _, ok := e.Err.(*Error); !ok { // Lock's own error, which is marked already
			e.Err = marked(e.Err)
		}
		o.opts.Observe(ctx, e)
	}
}

// requested reports that the call of r begins, and gives r its ID.
func (o *observer) requested(ctx context.Context, r *request) {
	r.id = lastEventID.Add(1)
	o.call(ctx, Event{Kind: EventRequested, ID: r.id, Op: r.op, Key: r.name})
}

// refused reports that a caller did not get a lease.
func (o *observer) refused(ctx context.Context, w *wait, err error) {
	o.call(ctx, Event{Kind: EventRefused, ID: w.r.id, Op: w.r.op, Key: w.r.name, Wait: o.clock.now().sub(w.start), Tries: w.tries, Err: err})
}

// acquired reports that a caller got l. If the lease has ended already, acquired then also
// reports that end.
func (o *observer) acquired(ctx context.Context, w *wait, l *Lease) {
	e := l.event(EventAcquired, nil)
	e.Wait, e.Tries = l.since.sub(w.start), w.tries
	o.call(ctx, e)

	// The lease may have ended while Observe ran.
	o.mu.Lock()
	l.reported = true
	end := l.unseen
	l.unseen = nil
	now := end != nil && o.lostLocked(l, *end)
	o.mu.Unlock()
	if now {
		o.call(context.WithoutCancel(l.parent), *end)
	}
}

// unlocked reports the end of l by an Unlock that has returned err.
func (o *observer) unlocked(ctx context.Context, l *Lease, err error) {
	if errors.Is(err, ErrLost) {
		o.lost(l, err)
		return
	}
	e := l.event(EventReleased, err)
	e.Hold = o.clock.now().sub(l.since)
	o.call(ctx, e)
}

// lost reports that l has ended before it was unlocked.
func (o *observer) lost(l *Lease, err error) {
	if o.opts.Observe == nil {
		return
	}
	e := l.event(EventLost, err)
	e.Hold = o.clock.now().sub(l.since)
	o.mu.Lock()
	now := o.lostLocked(l, e)
	o.mu.Unlock()
	if now {
		o.call(context.WithoutCancel(l.parent), e)
	}
}

// lostLocked queues e, the EventLost of l, or keeps e in l until EventAcquired was reported. If
// Close has stopped waiting, no goroutine may start: then lostLocked returns true, and the caller
// must report e after it has released mu.
func (o *observer) lostLocked(l *Lease, e Event) (now bool) {
	switch {
	case !l.reported:
		l.unseen = &e
	case o.stopped:
		return true
	default:
		o.queueEventLocked(l, e)
	}
	return false
}

// renewFailedLocked queues the event of a failed renewal of h.
func (o *observer) renewFailedLocked(h *hold, err error) {
	if o.opts.Observe == nil || len(h.leases) == 0 || len(o.queue) >= maxUnobserved {
		return
	}
	// Report the outermost lease, for all that have re-entered. Drop the event if EventAcquired of
	// that lease was not reported yet, because a later renewal reports another.
	if l := h.leases[0]; l.reported {
		o.queueEventLocked(l, l.event(EventRenewFailed, err))
	}
}

// reportStillHeldLocked queues EventStillHeld, once, if the outermost lease of h has been held for
// long and its caller must unlock it.
func (o *observer) reportStillHeldLocked(h *hold, now instant) {
	l := h.leases[0]
	if o.opts.Observe == nil || !l.reported || l.stillHeld || l.untilUnlock || now.sub(l.since) < max(overdueTerms*h.claim.TTL, time.Minute) {
		return
	}
	l.stillHeld = true
	e := l.event(EventStillHeld, nil)
	e.Hold = now.sub(l.since)
	o.queueEventLocked(l, e)
}

// queueEventLocked queues an event of l for Observe.
func (o *observer) queueEventLocked(l *Lease, e Event) {
	// Let one goroutine serve the queue, so that the events keep their order.
	o.queue = append(o.queue, unobserved{l.parent, e})
	if !o.running {
		o.running = o.spawnLocked(o.run)
	}
}

// run serves the queue until it is empty.
func (o *observer) run() {
	for {
		o.mu.Lock()
		events := o.queue
		o.queue = nil
		if len(events) == 0 {
			o.running = false
			o.mu.Unlock()
			return
		}
		o.mu.Unlock()

		// Call Observe, and the methods of the context, without mu, because they are the user's
		// code.
		for _, u := range events {
			o.call(context.WithoutCancel(u.ctx), u.e)
		}
	}
}
