package conformance

import (
	"context"
	"errors"

	"github.com/hasplock/hasp"
)

// reentryClauses check re-entry and the end of a Client.
var reentryClauses = []clause{
	{name: "reentry", says: saysHasp, check: tapOn(reentry),
		why: "A call with a lease's context re-enters without a round trip. The last Unlock releases the key."},
	{name: "reentry-limits", says: saysHasp, check: reentryLimits,
		why: "Re-entry needs the same context, Client and key. All other callers are excluded. A fence needs an outer lease with a fence."},
	{name: "client-close", says: saysHasp, check: clientClose,
		why: "Close ends waits and every lease's context with ErrClosed. After it no caller can lock."},
	{name: "client-close-keeps", says: saysHasp, check: clientCloseKeeps,
		why: "Close does not release the key of a holder that still runs. Unlock after Close returns ErrClosed."},
	{name: "client-leaves-nothing", says: saysHasp, check: clientLeavesNothing,
		why: "After Close no goroutine is left."},
}

func reentry(e *env, c *hasp.Client, t *tap, b *driver, key string) {
	outer := e.lock(c, key)
	asked := t.asked()
	type own struct{}

	inner, err := c.Lock(context.WithValue(outer.Context(), own{}, 1), key)
	mustf(err, "lock with the lease's context")
	third, err := c.TryLock(inner.Context(), key)
	mustf(err, "TryLock with the inner lease's context")
	n := t.asked() - asked
	require(n == 0, "re-entry asked the store %d times", n)

	// The key stays locked until the last Unlock, in any order.
	for i, l := range []*hasp.Lease{inner, outer, third} {
		mustf(b.refused(key), "after %d of 3 Unlocks", i)
		mustf(l.Unlock(e.ctx), "unlock %d of 3", i+1)
	}

	must(b.granted(key))
}

func reentryLimits(e *env) {
	a, other, key := e.newClient(), e.newClient(), e.key()
	outer := e.lock(a, key)
	inside := outer.Context()
	must(is("TryLock of the same Client with another context", errOf(a.TryLock(e.ctx, key)), hasp.ErrHeld))
	must(is("TryLock of another Client with the lease's context", errOf(other.TryLock(inside, key)), hasp.ErrHeld))
	if e.traits.Fenced {
		err := errOf(a.Lock(inside, key, hasp.WithFence()))
		must(is("re-entry with a fence where the outer lease has none", err, hasp.ErrInvalid))
	}

	second, err := a.Lock(inside, e.key())
	mustf(err, "lock of another key with the lease's context")
	must(outer.Unlock(e.ctx))
	require(second.Context().Err() != nil, "the context of a lease goes on after the lease it is derived from was unlocked")
	must(is("Lock with the context of a lease that was unlocked", errOf(a.Lock(inside, key)), context.Canceled))
	must(second.Unlock(e.ctx))
}

func clientClose(e *env) {
	c, t := e.tapped(hasp.Options{})
	b, held := e.open(), e.key()
	blocked := b.hold(e.long)
	lease := e.lock(c, held)
	ctx := lease.Context()

	done := t.attempts(func() error { return errOf(c.Lock(e.ctx, blocked.Key)) })
	closed := e.begin(c.Close)
	err := e.arrives("a Lock that waits when its Client is closed", done)
	must(is("a Lock that waits when its Client is closed", err, hasp.ErrClosed))

	e.untilDone(ctx, "the end of a lease's context by Close")
	must(is("the cause of the context after Close", context.Cause(ctx), hasp.ErrClosed))

	// Holders may unlock while Close waits for them.
	err = lease.Unlock(e.ctx)
	requireInTime(!errors.Is(err, hasp.ErrClosed), "Unlock while Close waits for it: %w", err)
	mustf(err, "unlock while Close waits for it")

	must(e.arrives("Close", closed))
	must(is("Lock after Close", errOf(c.Lock(e.ctx, held)), hasp.ErrClosed))
	mustf(c.Close(), "second Close")

	b.give(blocked)
	for _, key := range []string{held, blocked.Key} {
		must(b.grantedAtLast(key))
	}
}

func clientCloseKeeps(e *env) {
	c, t := e.tapped(hasp.Options{Timeout: e.term})
	b, key := e.open(), e.key()
	lease := e.lockInTime(c, key)

	must(e.within("Close with a lease that is not unlocked", func() error {
		_ = c.Close() // its error names the key
		return nil
	}))
	mustf(b.refused(key), "after Close with a lease that is not unlocked")
	must(is("Unlock after Close", lease.Unlock(e.ctx), hasp.ErrClosed))
	b.give(t.last())
}

func clientLeavesNothing(e *env) {
	use := func() {
		c, b := e.newClient(), e.open()
		for range 2 {
			key := e.key()
			lease := e.lock(c, key, hasp.WithTTL(e.term))
			lease.Context()
			err := errOf(c.Lock(e.ctx, key, hasp.WithMaxWait(e.term/2)))
			requireInTime(err != nil, "no renewal for a term of %v", e.term)

			if err := lease.Unlock(e.ctx); !errors.Is(err, hasp.ErrLost) {
				must(err)
			}
		}

		held := b.hold(e.long)
		err := errOf(c.Lock(e.endingAfter(e.term/2), held.Key))
		must(is("Lock of a held key until its context ends", err, context.DeadlineExceeded))
		b.give(held)
		must(c.Close())
		must(b.Close())
	}

	use()
	must(e.leaves(use))
}
