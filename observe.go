package hasp

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/clock"
)

// maxUnobserved is how many events may wait for Observe. If more events wait, events of failed
// renewals are dropped, because such events repeat.
const maxUnobserved = 4096

var lastEventID atomic.Uint64

// observer calls Options.Observe, if there is one. Events of a call come on the caller's goroutine.
// All other events come on a goroutine of the observer, so that an Observe that blocks delays
// neither renewals nor the end of a context.
type observer struct {
	*core

	// The fields below are guarded by mu.
	running bool         // the goroutine exists; it ends when the queue is empty
	queue   []unobserved // the events that wait, in the order in which they happened
}

// unobserved is an event that waits for Observe.
type unobserved struct {
	ctx context.Context // Lock's context, which may have ended
	e   Event
}

// event returns an event of l, with the fields that all events of l have.
func (l *Lease) event(kind EventKind, err error) Event {
	return Event{Kind: kind, ID: l.id, Op: l.op, Key: l.key, Shared: l.Shared(), Reentry: l.reentry, Fence: l.hold.fence, Err: err}
}

func (o *observer) call(ctx context.Context, e Event) {
	if o.opts.Observe != nil {
		e.Owner = o.opts.Owner
		if _, ok := e.Err.(*Error); !ok { // an *Error is what Lock returns, and is marked already
			e.Err = marked(e.Err)
		}
		o.opts.Observe(ctx, e)
	}
}

// acquired reports that a caller got l. The argument waited is the length of the wait, and tries is
// the number of calls to the store. If the lease has ended already, acquired also reports that.
func (o *observer) acquired(ctx context.Context, l *Lease, waited time.Duration, tries int) {
	e := l.event(EventAcquired, nil)
	e.Wait, e.Tries = waited, tries
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
	e.Hold = time.Duration(o.clock.Now() - l.since)
	o.call(ctx, e)
}

// detached reports the end of l by Detach.
func (o *observer) detached(ctx context.Context, l *Lease) {
	e := l.event(EventDetached, nil)
	e.Hold = time.Duration(o.clock.Now() - l.since)
	o.call(ctx, e)
}

func (o *observer) lost(l *Lease, err error) {
	e := l.event(EventLost, err)
	e.Hold = time.Duration(o.clock.Now() - l.since)
	o.mu.Lock()
	now := o.lostLocked(l, e)
	o.mu.Unlock()
	if now {
		o.call(context.WithoutCancel(l.parent), e)
	}
}

// lostLocked queues e, the EventLost of l, or stores e in l until EventAcquired was reported. If
// Close has stopped waiting, no goroutine may start. In that case, lostLocked returns true, and the
// caller must report e after it has released mu.
func (o *observer) lostLocked(l *Lease, e Event) (now bool) {
	switch {
	case !l.reported:
		l.unseen = &e
	case o.stopped:
		return true
	default:
		o.queueEventLocked(l.parent, e)
	}
	return false
}

// renewalLocked queues an event of the renewals of h: EventRenewFailed, or EventRenewed after
// failures.
func (o *observer) renewalLocked(h *hold, kind EventKind, err error) {
	if o.opts.Observe == nil || len(h.leases) == 0 || len(o.queue) >= maxUnobserved {
		return
	}
	// Report only the outermost lease, and not those that have re-entered. If its EventAcquired was
	// not reported yet, drop the event, because the next renewal that fails creates another event.
	if l := h.leases[0]; l.reported {
		e := l.event(kind, err)
		e.Failures = int(h.Failed)
		o.queueEventLocked(l.parent, e)
	}
}

// overdueTerms is the number of terms after which EventStillHeld reports a lease.
const overdueTerms = 10

// reportStillHeldLocked queues EventStillHeld, once, if l has been held for long and its caller
// must unlock it. l is the outermost lease of its hold.
func (o *observer) reportStillHeldLocked(l *Lease, now clock.Instant) {
	if o.opts.Observe == nil || !l.reported || l.stillHeld || l.untilUnlock || time.Duration(now-l.since) < max(overdueTerms*l.hold.claim.TTL, time.Minute) {
		return
	}
	l.stillHeld = true
	e := l.event(EventStillHeld, nil)
	e.Hold = time.Duration(now - l.since)
	o.queueEventLocked(l.parent, e)
}

// reportLongWait has EventStillWaiting reported when the wait has lasted for ten terms, or for a
// minute if that is shorter. The caller stops the timer at the end of the wait.
func (w *wait) reportLongWait(ctx context.Context) *time.Timer {
	c, start, key := w.c, w.start, w.r.key // not w itself, which is used again after the wait
	e := Event{Kind: EventStillWaiting, ID: w.r.id, Op: w.r.op, Key: w.r.name}
	return time.AfterFunc(min(overdueTerms*w.r.ttl, time.Minute), func() {
		c.spawn(func() {
			e.Err = c.heldBy(ctx, key)
			e.Wait = time.Duration(c.clock.Now() - start)
			c.mu.Lock()
			defer c.mu.Unlock()
			c.observer.queueEventLocked(ctx, e)
		})
	})
}

// heldBy returns a HeldError that names the holder of key, nil if the key is free or the driver
// cannot tell, or another error of the store.
func (c *Client) heldBy(ctx context.Context, key string) error {
	c.mu.Lock()
	if ln := c.queue.Line(key); ln != nil && ln.Held() {
		defer c.mu.Unlock()
		return ln.Refusal()
	}
	c.mu.Unlock()

	s, err := inspect(&c.store, context.WithoutCancel(ctx), key, backend.Inspector.Inspect)
	switch {
	case errors.Is(err, errors.ErrUnsupported), err == nil && !s.Held:
		return nil
	case err != nil:
		return err
	case len(s.Shared) > 0:
		return &backend.HeldError{Owner: s.Shared[0], RetryAfter: s.TTL, Shared: true}
	}
	return &backend.HeldError{Owner: s.Owner, RetryAfter: s.TTL, Kept: s.Kept}
}

// queueEventLocked queues e, whose call had the context ctx.
func (o *observer) queueEventLocked(ctx context.Context, e Event) {
	// Let one goroutine serve the queue, so that the events keep their order.
	o.queue = append(o.queue, unobserved{ctx, e})
	if !o.running {
		o.running = o.spawnLocked(o.run)
	}
}

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

		// Call Observe and the methods of the context without mu, because they are users' code.
		for _, u := range events {
			o.call(context.WithoutCancel(u.ctx), u.e)
		}
	}
}
