package conformance

import (
	"context"
	"errors"
	"fmt"

	"github.com/hasplock/hasp"
)

// reentryClauses check re-entry and the end of a Client.
var reentryClauses = []clause{
	{
		name:  "reentry",
		why:   "A call with a lease's context re-enters without a round trip. The last Unlock releases the key.",
		says:  saysHasp,
		check: reentry,
	},
	{
		name:  "reentry-limits",
		why:   "Re-entry needs the same context, Client and key. All other callers are excluded. A fence needs an outer lease with a fence.",
		says:  saysHasp,
		check: reentryLimits,
	},
	{
		name:  "client-close",
		why:   "Close ends waits and every lease's context with ErrClosed. After it no caller can lock.",
		says:  saysHasp,
		check: clientClose,
	},
	{
		name:  "client-close-keeps",
		why:   "Close does not release the key of a holder that still runs. Unlock after Close returns ErrClosed.",
		says:  saysHasp,
		check: clientCloseKeeps,
	},
	{
		name:  "client-leaves-nothing",
		why:   "After Close no goroutine is left.",
		says:  saysHasp,
		check: clientLeavesNothing,
	},
}

func reentry(e *env) error {
	c, t := e.tapped(hasp.Options{})
	b := e.open()
	key := e.key()
	outer := e.lock(c, key)
	asked := t.asked()
	type own struct{}
	inner, err := c.Lock(context.WithValue(outer.Context(), own{}, 1), key)
	mustf(err, "lock with the lease's context")
	third, err := c.TryLock(inner.Context(), key)
	mustf(err, "TryLock with the inner lease's context")
	if n := t.asked() - asked; n > 0 {
		return fmt.Errorf("re-entry asked the store %d times", n)
	}
	for i, l := range []*hasp.Lease{inner, outer, third} {
		mustf(b.refused(key), "after %d of 3 Unlocks", i)
		mustf(l.Unlock(e.ctx), "unlock %d of 3", i+1)
	}
	return b.granted(key)
}

func reentryLimits(e *env) error {
	a, other := e.newClient(), e.newClient()
	key := e.key()
	outer := e.lock(a, key)
	if _, err := a.TryLock(e.ctx, key); !errors.Is(err, hasp.ErrHeld) {
		return is("TryLock of the same Client with another context", err, hasp.ErrHeld)
	}
	if _, err := other.TryLock(outer.Context(), key); !errors.Is(err, hasp.ErrHeld) {
		return is("TryLock of another Client with the lease's context", err, hasp.ErrHeld)
	}
	if e.traits.Fenced {
		_, err := a.Lock(outer.Context(), key, hasp.WithFence())
		must(is("re-entry with a fence where the outer lease has none", err, hasp.ErrInvalid))
	}
	second, err := a.Lock(outer.Context(), e.key())
	mustf(err, "lock of another key with the lease's context")
	must(outer.Unlock(e.ctx))
	if second.Context().Err() == nil {
		return errors.New("the context of a lease goes on after the lease it is derived from was unlocked")
	}
	if _, err := a.Lock(outer.Context(), key); !errors.Is(err, context.Canceled) {
		return fmt.Errorf("lock with the context of a lease that was unlocked: %v, want its end", err)
	}
	return second.Unlock(e.ctx)
}

func clientClose(e *env) error {
	c, t := e.tapped(hasp.Options{})
	b := e.open()
	held, wanted := e.key(), e.claim(e.h.Long)
	b.take(wanted)
	lease := e.lock(c, held)
	ctx := lease.Context()
	asked, done := t.asked(), make(chan error, 1)
	go func() {
		_, err := c.Lock(e.ctx, wanted.Key)
		done <- err
	}()
	must(e.poll("an attempt of Lock", func() (bool, error) { return t.asked() > asked, nil }))
	closed := make(chan error, 1)
	go func() { closed <- c.Close() }()
	err := e.arrives("a Lock that waits when its Client is closed", done)
	must(is("a Lock that waits when its Client is closed", err, hasp.ErrClosed))
	must(e.poll("the end of a lease's context by Close", func() (bool, error) { return ctx.Err() != nil, nil }))
	must(is("the cause of a context's end by Close", context.Cause(ctx), hasp.ErrClosed))
	// Holders may unlock while Close waits for them.
	switch err := lease.Unlock(e.ctx); {
	case errors.Is(err, hasp.ErrClosed):
		return slow("Unlock while Close waits for it: %w", err)
	case err != nil:
		return fmt.Errorf("unlock while Close waits for it: %w", err)
	}
	must(e.arrives("Close", closed))
	if _, err := c.Lock(e.ctx, held); !errors.Is(err, hasp.ErrClosed) {
		return is("Lock after Close", err, hasp.ErrClosed)
	}
	mustf(c.Close(), "second Close")
	b.give(wanted)
	for _, key := range []string{held, wanted.Key} {
		must(b.grantedAtLast(key))
	}
	return nil
}

func clientCloseKeeps(e *env) error {
	c, t := e.tapped(hasp.Options{Timeout: e.term})
	b := e.open()
	key := e.key()
	lease, err := c.Lock(e.ctx, key)
	if err != nil {
		return slow("Lock with a timeout of %v: %w", e.term, err)
	}
	must(e.within("Close with a lease that is not unlocked", c.Close))
	mustf(b.refused(key), "after Close with a lease that is not unlocked")
	must(is("Unlock after Close", lease.Unlock(e.ctx), hasp.ErrClosed))
	return b.release(t.last())
}

func clientLeavesNothing(e *env) error {
	use := func() error {
		c, b := e.newClient(), e.openOwn(e.store)
		defer b.Close()
		for range 2 {
			key := e.key()
			lease, err := c.Lock(e.ctx, key, hasp.WithTTL(e.term))
			if err != nil {
				return err
			}
			lease.Context()
			if _, err := c.Lock(e.ctx, key, hasp.WithMaxWait(e.term/2)); err == nil {
				return slow("no renewal for a term of %v", e.term)
			}
			if err := lease.Unlock(e.ctx); err != nil && !errors.Is(err, hasp.ErrLost) {
				return err
			}
		}
		held := b.hold(e.h.Long)
		ctx, cancel := context.WithTimeout(e.ctx, e.term/2)
		defer cancel()
		_, err := c.Lock(ctx, held.Key)
		if err := is("Lock of a held key until its context ends", err, context.DeadlineExceeded); err != nil {
			return err
		}
		b.give(held)
		return c.Close()
	}
	must(use())
	return e.leaves(use)
}
