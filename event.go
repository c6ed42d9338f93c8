package hasp

import (
	"context"
	"errors"
	"log/slog"
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
