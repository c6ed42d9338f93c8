package conformance

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

// promptly is how soon a call must return after its context has ended.
const promptly = 50 * time.Millisecond

// cancelClauses check callers whose context ends.
var cancelClauses = []clause{
	{
		name:  "lock-cancelled-before",
		why:   "Lock and TryLock with a context that has ended do not call the store.",
		says:  saysHasp,
		check: lockCancelledBefore,
	},
	{
		name:  "lock-cancelled-waiting",
		why:   "If its context ends, a waiting Lock returns promptly. The error matches ErrHeld and the cause, and nothing is left.",
		says:  saysHasp,
		check: lockCancelledWaiting,
	},
	{
		name:  "lock-cancelled-sent",
		why:   "If its context ends during an attempt, the caller does not wait for the answer. A later grant is released.",
		says:  saysHasp,
		check: lockCancelledSent,
	},
}

func lockCancelledBefore(e *env) error {
	c, t := e.tapped(hasp.Options{})
	ctx, cancel := context.WithCancel(e.ctx)
	cancel()
	key := e.key()
	for _, lock := range []func(context.Context, string, ...hasp.Option) (*hasp.Lease, error){c.Lock, c.TryLock} {
		if _, err := lock(ctx, key); !errors.Is(err, context.Canceled) || errors.Is(err, hasp.ErrHeld) {
			return fmt.Errorf("lock with a context that has ended: %v, want its end", err)
		}
	}
	if n := t.asked(); n != 0 {
		return fmt.Errorf("the store was asked %d times for a caller whose context had ended", n)
	}
	return nil
}

// lockCancelledWaiting uses the shortest of several times, because a slow machine
// may delay any of them.
func lockCancelledWaiting(e *env) error {
	c, t := e.tapped(hasp.Options{})
	a := e.open()
	best := time.Duration(1<<63 - 1)
	for range 6 {
		holder := a.hold(e.h.Long)
		ctx, cancel := context.WithCancelCause(e.ctx)
		done, asked := make(chan error, 1), t.asked()
		go func() {
			_, err := c.Lock(ctx, holder.Key)
			done <- err
		}()
		must(e.poll("an attempt of Lock", func() (bool, error) { return t.asked() > asked, nil }))
		e.sleep(e.term / 4)
		cause := errors.New("changed my mind")
		began := time.Now()
		cancel(cause)
		err := e.arrives("a cancelled Lock", done)
		best = min(best, time.Since(began))
		if !errors.Is(err, context.Canceled) || !errors.Is(err, cause) {
			return fmt.Errorf("a cancelled Lock: %v, want the context's error and cause", err)
		}
		if !errors.Is(err, hasp.ErrHeld) {
			return slow("a cancelled Lock of a held key: %w, want ErrHeld as well", err)
		}
		must(a.release(holder))
		mustf(a.grantedAtLast(holder.Key), "after a cancelled Lock")
	}
	if best > promptly {
		return slow("of several cancelled Locks the fastest took %v to return", best)
	}
	return nil
}

func lockCancelledSent(e *env) error {
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
		key, done := e.key(), make(chan error, 1)
		go func() {
			_, err := c.TryLock(ctx, key)
			done <- err
		}()
		must(e.arrives("an attempt of TryLock", sent))
		cancel()
		err := e.arrives("TryLock, cancelled while the store has not answered,", done)
		close(answer)
		if !errors.Is(err, context.Canceled) || errors.Is(err, hasp.ErrHeld) {
			return fmt.Errorf("TryLock, cancelled while the store has not answered: %v, want the context's end", err)
		}
		mustf(b.grantedAtLast(key), "after a grant that landed %s its caller had left", lands)
	}
	return nil
}
