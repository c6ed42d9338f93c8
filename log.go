package hasp

import (
	"context"
	"errors"
	"log/slog"
)

// LogEvents returns an [Options.Observe] that writes to l. A lost lease is an Error. A
// failed renewal is a Warn, and so is a Lock refused with ErrUnavailable. EventStillHeld,
// which finds a forgotten Unlock, is an Info. All else is Debug, which slog does not show by default. A line is such as "hasp: acquired", with
// those of key, id, op, wait, hold, fence and err that the event has. If l is nil,
// LogEvents asks slog.Default at each event.
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
		case EventReleased, EventLost, EventStillHeld:
			attrs = append(attrs, slog.Duration("hold", e.Hold))
		}
		if e.Fence != 0 {
			attrs = append(attrs, slog.Uint64("fence", e.Fence))
		}
		if e.Err != nil {
			attrs = append(attrs, slog.Any("err", e.Err))
		}
		to.LogAttrs(ctx, level, "hasp: "+e.Kind.String(), attrs...)
	}
}

// level returns the level at which LogEvents writes e.
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
