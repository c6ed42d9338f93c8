package hasp

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/internal/clock"
)

// EventKind is the kind of an [Event].
type EventKind string

const (
	// EventRequested says that a caller or Lead began a call of Lock, TryLock or Resume. Each is
	// followed by one EventAcquired or EventRefused of the same ID, and each EventAcquired by one
	// EventReleased, EventDetached or EventLost.
	EventRequested EventKind = "requested"

	// EventAcquired says that a caller got a lease. Wait is how long the caller waited.
	EventAcquired EventKind = "acquired"

	// EventRefused says that a caller did not get a lease. Err says why.
	EventRefused EventKind = "refused"

	// EventReleased says that a lease was unlocked. Err is set if Unlock's outcome is unknown.
	EventReleased EventKind = "released"

	// EventDetached says that a lease ended by Detach. The lease of a Resume has another ID.
	EventDetached EventKind = "detached"

	// EventLost says that a lease ended before it was unlocked. Err is a *LostError or ErrClosed.
	EventLost EventKind = "lost"

	// EventRenewFailed says that a renewal or an Extend failed or was not answered. A renewal is
	// tried again until the deadline. Err is the store's error.
	EventRenewFailed EventKind = "renew failed"

	// EventRenewed says that a renewal has succeeded after one or more have failed. Other renewals
	// that succeed are not reported, because there may be thousands a second.
	EventRenewed EventKind = "renewed"

	// EventStillWaiting says that a Lock has waited for ten terms, or for a minute if that is
	// shorter. It comes once for a call. If the key is held, Err is a *HeldError that names the
	// holder. Its field Here says that the holder is a caller of this Client, which may be the
	// waiting caller itself: a Lock re-enters only with the context of the lease.
	EventStillWaiting EventKind = "still waiting"

	// EventStillHeld says that a lease has been held for ten terms, and for a minute at least. The
	// caller is still at work, or has forgotten to unlock. The event comes once for a lease, but
	// not for Do, DoAll and Lead, which never forget to unlock.
	EventStillHeld EventKind = "still held"

	// EventDegraded says that Open has succeeded although a part of the store does not answer, such
	// as a node of redlock. Err names the part. The event comes once, and has no key and no ID.
	EventDegraded EventKind = "degraded"
)

// Event reports one change of a lock, for metrics, traces and logs. It contains no token and no
// secret of the store.
type Event struct {
	Kind   EventKind
	ID     uint64 // identifies the call of Lock, TryLock or Resume; unique in the process
	Op     string // the call that has the ID: "lock", "trylock", "lead" or "resume"
	Key    string // as the caller gave it
	Owner  string // Options.Owner
	Shared bool   // the lease is shared; not set in EventRequested and EventRefused

	// Reentry says that the lease joined a hold that its caller had. To count holds, skip such
	// events. It is set from EventAcquired on.
	Reentry bool

	Fence uint64 // the lease's fence, or 0

	// Wait is how long the caller waited, for EventAcquired, EventRefused and EventStillWaiting.
	Wait time.Duration

	// Hold is how long the lease has lasted, for EventReleased, EventDetached, EventLost and
	// EventStillHeld.
	Hold time.Duration

	Err error // the reason, for the kinds that have one

	// Tries is the number of calls to the store before EventAcquired or EventRefused. A driver's
	// Wait is one call. If EventAcquired has 0 Tries and no Reentry, the hold was handed over
	// within the Client.
	Tries int

	// Failures is how many renewals in a row have failed, for EventRenewFailed and EventRenewed.
	Failures int
}

// LogEvents returns an [Options.Observe] that writes to l. If l is nil, it writes to slog.Default.
// A message is, for example, "hasp: acquired", with the attributes key, id, op, wait, hold,
// failures, fence and err, as far as the event has them. The levels are
//   - Error for a lost lease, but not if Close has ended the lease;
//   - Warn for the first of several failed renewals in a row, for a call that is refused with
//     ErrUnavailable, for EventDegraded, and for EventStillWaiting of Lock;
//   - Info for EventRenewed, for EventStillHeld, and for EventStillWaiting of Lead, which may wait
//     for long;
//   - Debug, which slog does not show by default, for all other events.
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
		attrs = append(attrs,
			slog.String("key", e.Key),
			slog.Uint64("id", e.ID),
			slog.String("op", e.Op))
		switch e.Kind {
		case EventAcquired, EventRefused, EventStillWaiting:
			attrs = append(attrs, slog.Duration("wait", e.Wait))
		case EventReleased, EventDetached, EventLost, EventStillHeld:
			attrs = append(attrs, slog.Duration("hold", e.Hold))
		case EventRenewFailed, EventRenewed:
			attrs = append(attrs, slog.Int("failures", e.Failures))
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

// level returns the level that LogEvents documents.
func (e Event) level() slog.Level {
	switch {
	case e.Kind == EventLost && errors.Is(e.Err, ErrLost):
		return slog.LevelError
	case e.Kind == EventRenewFailed && e.Failures == 1:
		return slog.LevelWarn
	case e.Kind == EventRefused && errors.Is(e.Err, ErrUnavailable):
		return slog.LevelWarn
	case e.Kind == EventStillWaiting && e.Op != "lead", e.Kind == EventDegraded:
		return slog.LevelWarn
	case e.Kind == EventStillWaiting, e.Kind == EventStillHeld, e.Kind == EventRenewed:
		return slog.LevelInfo
	}
	return slog.LevelDebug
}

// maxUnobserved is how many events may wait for Observe. If more events wait, events of renewals
// are dropped, because failures of renewals repeat.
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

// call calls Observe, if there is one. The caller must not hold mu.
func (o *observer) call(ctx context.Context, e Event) {
	if o.opts.Observe == nil {
		return
	}
	e.Owner = o.opts.Owner
	if _, isMarked := e.Err.(*Error); !isMarked { // newError has marked the Err of an *Error
		e.Err = marked(e.Err)
	}
	o.opts.Observe(ctx, e)
}

// acquired reports that a caller got l. The argument waited is the length of the wait, and tries is
// the number of calls to the store. If the lease was lost meanwhile, acquired also reports that.
func (o *observer) acquired(ctx context.Context, l *Lease, waited time.Duration, tries int) {
	e := l.event(EventAcquired, nil)
	e.Wait = waited
	e.Tries = tries
	o.call(ctx, e)

	// If the lease was lost before reported was set, its EventLost waits in unseen.
	o.mu.Lock()
	l.reported = true
	end := l.unseen
	l.unseen = nil
	callNow := end != nil && o.lostLocked(l, *end)
	o.mu.Unlock()
	if callNow {
		o.call(context.WithoutCancel(l.parent), *end)
	}
}

// unlocked reports the end of l by an Unlock that has returned err.
func (o *observer) unlocked(ctx context.Context, l *Lease, err error) {
	if errors.Is(err, ErrLost) {
		o.lost(l, err)
		return
	}
	o.call(ctx, o.lasted(l, EventReleased, err))
}

// detached reports the end of l by Detach.
func (o *observer) detached(ctx context.Context, l *Lease) {
	o.call(ctx, o.lasted(l, EventDetached, nil))
}

// lost reports that l was lost, with the reason err. If Close has ended l, err is ErrClosed.
func (o *observer) lost(l *Lease, err error) {
	e := o.lasted(l, EventLost, err)
	o.mu.Lock()
	callNow := o.lostLocked(l, e)
	o.mu.Unlock()
	if callNow {
		o.call(context.WithoutCancel(l.parent), e)
	}
}

// lasted returns an event of l that says how long the lease has lasted.
func (o *observer) lasted(l *Lease, kind EventKind, err error) Event {
	e := l.event(kind, err)
	e.Hold = time.Duration(o.clock.Now() - l.since)
	return e
}

// lostLocked queues e, the EventLost of l. If EventAcquired was not reported yet, it stores e in l
// instead, and the method acquired reports e. If Close has stopped waiting, no goroutine may start
// that could serve the queue. In that case, lostLocked returns true, and the caller must report e
// itself after it has released mu.
func (o *observer) lostLocked(l *Lease, e Event) (callNow bool) {
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

// renewalLocked queues an event of the renewals of h, which has not ended: EventRenewFailed, or
// EventRenewed after failures. If the queue is full, it drops the event.
func (o *observer) renewalLocked(h *hold, kind EventKind, err error) {
	if o.opts.Observe == nil || len(o.queue) >= maxUnobserved {
		return
	}

	// Report only the outermost lease, and not those that have re-entered. Before its
	// EventAcquired, drop the event. The next renewal that fails creates another one.
	if l := h.leases[0]; l.reported {
		e := l.event(kind, err)
		e.Failures = int(h.Failed)
		o.queueEventLocked(l.parent, e)
	}
}

// overdueTerms is the number of terms after which EventStillHeld reports a lease.
const overdueTerms = 10

// reportStillHeldLocked queues EventStillHeld, once, if l has been held for long. It does not for a
// lease of Do, DoAll or Lead, which never forget to unlock. l is the outermost lease of its hold.
func (o *observer) reportStillHeldLocked(l *Lease, now clock.Instant) {
	if o.opts.Observe == nil || !l.reported {
		return
	}
	overdue := max(overdueTerms*l.hold.claim.TTL, time.Minute)
	if l.stillHeld || l.untilUnlock || time.Duration(now-l.since) < overdue {
		return // reported already, or a lease of Do, DoAll or Lead, or not held for long
	}

	l.stillHeld = true
	o.queueEventLocked(l.parent, o.lasted(l, EventStillHeld, nil))
}

// queueEventLocked queues e, whose call had the context ctx.
func (o *observer) queueEventLocked(ctx context.Context, e Event) {
	// Let one goroutine serve the queue, so that the events keep their order.
	o.queue = append(o.queue, unobserved{ctx, e})
	if !o.running {
		o.running = o.spawnLocked(o.run)
	}
}

// run reports the events in the queue, until the queue is empty.
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
