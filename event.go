package hasp

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"time"
)

// EventKind is the kind of an [Event].
type EventKind string

const (
	// EventRequested: a call of Lock, TryLock or Resume began, by a caller or by Lead. Each is
	// followed by one EventAcquired or EventRefused of the same ID, and each EventAcquired by one
	// EventReleased, EventDetached or EventLost.
	EventRequested EventKind = "requested"

	// EventAcquired: a caller got a lease. Wait and Tries say what it took.
	EventAcquired EventKind = "acquired"

	// EventRefused: a caller did not get a lease. Err says why.
	EventRefused EventKind = "refused"

	// EventReleased: a lease was unlocked. Err is nil, or the error of the Unlock if its outcome is
	// unknown.
	EventReleased EventKind = "released"

	// EventDetached: a lease ended by Detach. The key stays taken. The lease of Resume has another
	// ID.
	EventDetached EventKind = "detached"

	// EventLost: a lease ended before it was unlocked. Err is a *LostError or ErrClosed.
	EventLost EventKind = "lost"

	// EventRenewFailed: a renewal or an Extend failed or was not answered. A renewal is tried again
	// until the deadline. Err is the store's error.
	EventRenewFailed EventKind = "renew failed"

	// EventStillHeld: a lease has been held for ten terms and a minute. The caller has much to do,
	// or has forgotten to unlock. The event comes once for a lease, but not for Do, DoAll and Lead,
	// which never forget to unlock.
	EventStillHeld EventKind = "still held"
)

// Event reports one change of a lock, for metrics, traces and logs. It has no token and no secret
// of the store.
type Event struct {
	Kind    EventKind
	ID      uint64        // identifies the call of Lock, TryLock or Resume; unique in the process
	Op      string        // the call that has the ID: "lock", "trylock", "lead" or "resume"
	Key     string        // as the caller gave it
	Owner   string        // Options.Owner
	Shared  bool          // the lease is shared; not set in EventRequested and EventRefused
	Reentry bool          // the lease joined a hold that its caller had; to count holds, skip such events; set from EventAcquired on
	Fence   uint64        // the lease's fence, or 0
	Wait    time.Duration // EventAcquired, EventRefused: how long the caller waited
	Hold    time.Duration // EventReleased, EventDetached, EventLost, EventStillHeld: how long the lease has lasted
	Err     error         // the reason, for the kinds that have one

	// Tries is the number of calls to the store before EventAcquired or EventRefused. A driver's
	// Wait is one call. If EventAcquired has 0 Tries and no Reentry, the hold was handed over
	// within the Client.
	Tries int
}

// LogEvents returns an [Options.Observe] that writes to l. A lost lease is an Error. A failed
// renewal and a Lock refused with ErrUnavailable are Warn. EventStillHeld, which finds a forgotten
// Unlock, is Info. All other events are Debug, which slog does not show by default. A message is,
// for example, "hasp: acquired", with the attributes key, id, op, wait, hold, fence and err, as far
// as the event has them. If l is nil, LogEvents calls slog.Default at each event.
func LogEvents(l *slog.Logger) func(context.Context, Event) {
	return func(ctx context.Context, e Event) {
		to := l
		if to == nil {
			to = slog.Default()
		}
		level := e.level()
		if !to.Enabled(ctx, level) {
			return
		}

		attrs := make([]slog.Attr, 0, 7)
		attrs = append(attrs, slog.String("key", e.Key), slog.Uint64("id", e.ID), slog.String("op", e.Op))
		switch e.Kind {
		case EventAcquired, EventRefused:
			attrs = append(attrs, slog.Duration("wait", e.Wait))
		case EventReleased, EventDetached, EventLost, EventStillHeld:
			attrs = append(attrs, slog.Duration("hold", e.Hold))
		}
		if e.Fence != 0 {
			attrs = append(attrs, slog.Uint64("fence", e.Fence))
		}
		if e.Err != nil {
			attrs = append(attrs, slog.Any("err", e.Err))
		}
		to.LogAttrs(ctx, level, "hasp: "+string(e.Kind), attrs...)
	}
}

func (e Event) level() slog.Level {
	switch {
	case e.Kind == EventLost && errors.Is(e.Err, ErrLost):
		return slog.LevelError
	case e.Kind == EventRenewFailed, e.Kind == EventRefused && errors.Is(e.Err, ErrUnavailable):
		return slog.LevelWarn
	case e.Kind == EventStillHeld:
		return slog.LevelInfo
	}
	return slog.LevelDebug
}

// maxUnobserved is how many events may wait for Observe. If more wait, events of failed renewals
// are dropped, because such events repeat.
const maxUnobserved = 4096

var lastEventID atomic.Uint64

// observer calls Options.Observe, if there is one. Events of a call come on the caller's goroutine.
// The others come on a goroutine of the observer, so that an Observe that blocks delays neither
// renewals nor the end of a context.
type observer struct {
	*core

	// Guarded by mu.
	running bool         // the goroutine exists; it ends when the queue is empty
	queue   []unobserved // the events that wait, in the order in which they happened
}

// unobserved is an event that waits for Observe.
type unobserved struct {
	ctx context.Context // Lock's context, which may have ended
	e   Event
}

// event returns an event of l, with the fields that all its events have.
func (l *Lease) event(kind EventKind, err error) Event {
	return Event{Kind: kind, ID: l.id, Op: l.op, Key: l.key, Shared: l.shared, Reentry: l.reentry, Fence: l.hold.fence, Err: err}
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

// requested reports that the call of r begins, and gives r its ID.
func (o *observer) requested(ctx context.Context, r *request) {
	r.id = lastEventID.Add(1)
	o.call(ctx, Event{Kind: EventRequested, ID: r.id, Op: r.op, Key: r.name})
}

func (o *observer) refused(ctx context.Context, w *wait, err error) {
	o.call(ctx, Event{Kind: EventRefused, ID: w.r.id, Op: w.r.op, Key: w.r.name, Wait: o.clock.now().sub(w.start), Tries: w.tries, Err: err})
}

// acquired reports that a caller got l. If the lease has ended already, acquired then also reports
// that end.
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

// detached reports the end of l by Detach.
func (o *observer) detached(ctx context.Context, l *Lease) {
	e := l.event(EventDetached, nil)
	e.Hold = o.clock.now().sub(l.since)
	o.call(ctx, e)
}

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
	// Report only the outermost lease, and not those that have re-entered. If its EventAcquired was
	// not reported yet, drop the event: the next renewal that fails makes another.
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

func (o *observer) queueEventLocked(l *Lease, e Event) {
	// Let one goroutine serve the queue, so that the events keep their order.
	o.queue = append(o.queue, unobserved{l.parent, e})
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

		// Call Observe, and the methods of the context, without mu, because they are the user's
		// code.
		for _, u := range events {
			o.call(context.WithoutCancel(u.ctx), u.e)
		}
	}
}
