package conformance

import (
	"context"
	"errors"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

// cancelClauses check callers whose context ends.
var cancelClauses = []clause{
	{name: "lock-cancelled-before", says: saysHasp, check: lockCancelledBefore,
		why: "Lock and TryLock with a context that has ended do not call the store."},
	{name: "lock-cancelled-waiting", says: saysHasp, check: lockCancelledWaiting,
		why: "If its context ends, a waiting Lock returns promptly. The error matches ErrHeld and the cause, and nothing is left."},
	{name: "lock-cancelled-sent", says: saysHasp, check: lockCancelledSent,
		why: "If its context ends during an attempt, the caller does not wait for the answer. A later grant is released."},
}

func lockCancelledBefore(e *env) {
	c, t := e.tapped(hasp.Options{})
	ctx, key := e.deadContext(), e.key()
	for _, err := range []error{errOf(c.Lock(ctx, key)), errOf(c.TryLock(ctx, key))} {
		require(onlyCancelled(err), "lock with a context that has ended: %v, want the context's error", err)
	}
	t.askedNothing("callers whose context had ended")
}

// onlyCancelled reports whether err is the end of a context, and no answer of the
// store.
func onlyCancelled(err error) bool {
	return errors.Is(err, context.Canceled) && !errors.Is(err, hasp.ErrHeld)
}

// cancelLock begins a Lock, and cancels it when its attempt is pause old. It returns
// the error of the Lock, and how long the Lock took to return.
func (t *tap) cancelLock(key string, pause time.Duration, cause error) (took time.Duration, err error) {
	ctx, cancel := context.WithCancelCause(t.e.ctx)
	done := t.attempts(func() error { return errOf(t.client.Lock(ctx, key)) })
	t.e.sleep(pause)
	began := time.Now()
	cancel(cause)
	err = t.e.arrives("a cancelled Lock", done)
	return time.Since(began), err
}

// lockCancelledWaiting uses the shortest of several times, because a slow machine
// may delay any of them.
func lockCancelledWaiting(e *env) {
	_, t := e.tapped(hasp.Options{})
	a := e.open()
	best := e.patience

	for range 6 {
		holder := a.hold(e.long)
		cause := errors.New("changed my mind")
		took, err := t.cancelLock(holder.Key, e.term/4, cause)
		best = min(best, took)

		require(errors.Is(err, context.Canceled) && errors.Is(err, cause), "a cancelled Lock: %v, want the context's error and cause", err)
		requireInTime(errors.Is(err, hasp.ErrHeld), "a cancelled Lock of a held key: %w, want ErrHeld as well", err)

		a.give(holder)
		mustf(a.grantedAtLast(holder.Key), "after a cancelled Lock")
	}

	requireInTime(best <= e.promptly, "of several cancelled Locks the fastest took %v to return", best)
}

func lockCancelledSent(e *env) {
	c, t := e.tapped(hasp.Options{})
	b := e.open()
	for _, lands := range []string{"before", "after"} {
		sent, answer := make(chan error, 1), make(chan struct{})
		t.acquire = func(_ backend.Claim, next func() (backend.Grant, error)) (g backend.Grant, err error) {
			if lands == "before" {
				g, err = next()
			}
			sent <- nil
			select {
			case <-answer:
			case <-e.ctx.Done():
			}
			if lands == "after" {
				g, err = next()
			}
			return g, err
		}

		ctx, cancel := context.WithCancel(e.ctx)
		defer cancel()
		key := e.key()
		done := e.begin(func() error { return errOf(c.TryLock(ctx, key)) })

		// The caller leaves while its attempt is in flight.
		must(e.arrives("an attempt of TryLock", sent))

		cancel()
		err := e.arrives("TryLock, cancelled while the store has not answered,", done)
		close(answer)
		require(onlyCancelled(err), "TryLock, cancelled while the store has not answered: %v, want the context's error", err)
		mustf(b.grantedAtLast(key), "after a grant that came %s its caller had left", lands)
	}
}
