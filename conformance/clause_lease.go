package conformance

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

// leaseClauses use the driver through package hasp, from the grant of a lease on.
var leaseClauses = []clause{
	{name: "lease-renewed", says: saysHasp, check: leaseRenewed,
		why: "A lease is renewed past many terms, and no other caller gets the key."},
	{name: "lease-rides-out-outage", says: saysHasp, check: tapOn(leaseRidesOutOutage),
		why: "A lease survives an outage that is shorter than the rest of its term."},
	{name: "lease-renewal-stops", says: saysHasp, check: leaseRenewalStops,
		why: "No hold is renewed after Unlock or after Close."},
	{name: "lease-loss-before-others", says: saysHasp, check: tapOn(leaseLossBeforeOthers),
		why: "A lease that cannot be renewed ends with cause ErrLost before another caller holds the key, for its context and for Err."},
	{name: "lease-loss-once", says: saysHasp, check: tapOn(leaseLossOnce),
		why: "A loss is reported once. A normal Unlock is not a loss."},
	{name: "lease-loss-taken", says: saysHasp, check: tapOn(leaseLossTaken),
		why: "If the hold is gone from the store, the lease is lost at the next renewal."},
	{name: "lease-extend", says: saysHasp, check: leaseExtend,
		why: "After Extend the lease lasts at least that long, also in the store."},
	{name: "lease-context", says: saysHasp, check: leaseContextEnds,
		why: "When Lock's context ends, the lease's context ends. The key stays locked until Unlock."},
}

func leaseRenewed(e *env) {
	c, _ := e.tapped(hasp.Options{})
	b, key := e.open(), e.key()
	lease := e.lock(c, key, hasp.WithTTL(e.term))
	e.lasts(lease, b)
	e.unlockInTime(lease)
}

func leaseRidesOutOutage(e *env, c *hasp.Client, t *tap, b *driver, key string) {
	lease := e.lock(c, key, hasp.WithTTL(e.term))

	// The outage ends half a term before the lease.
	t.cut.Store(true)
	time.AfterFunc(e.term/2, func() { t.cut.Store(false) })
	e.lasts(lease, b)
	requireInTime(len(t.eventsOf(hasp.EventRenewFailed)) > 0, "the outage was over before a renewal was due")
	e.unlockInTime(lease)
}

// lasts ends the try unless a short lease lasts for several terms, and b does not
// get its key.
func (e *env) lasts(lease *hasp.Lease, b *driver) {
	for range 4 {
		b.outlast(e.term)
		mustInTime(lease.Err(), "a lease that is renewed")
		b.refusedWhileRenewed(lease.Key(), lease.Err)
	}
	mustInTime(context.Cause(lease.Context()), "the context of a lease that is renewed")
}

// leaseRenewalStops checks that no token is renewed after its end, and that no key
// stays locked.
func leaseRenewalStops(e *env) {
	c, t := e.tapped(hasp.Options{Timeout: e.term})
	b := e.open()
	// The Unlocks come about when the renewals are sent.
	must(e.each(20, func(int) {
		lease := e.lockInTime(c, e.key(), hasp.WithTTL(e.term))
		e.sleep(e.term / 2)
		if err := lease.Unlock(e.ctx); !errors.Is(err, hasp.ErrLost) {
			mustInTime(err, "Unlock")
		}
	}))

	requireInTime(t.renewed.Load() > 0, "no renewal in half a term")

	key := e.key()
	e.lockInTime(c, key, hasp.WithTTL(e.term))
	e.sleep(e.term / 2)
	_ = c.Close() // its error names the key

	b.outlast(e.term) // for renewals on their way
	before := t.renewed.Load()
	b.outlast(e.term)
	n := t.renewed.Load() - before
	require(n == 0, "%d renewals in a term after Unlock and Close", n)
	mustf(b.grantedAtLast(key), "a lease that was held at Close")
}

func leaseLossBeforeOthers(e *env, c *hasp.Client, t *tap, b *driver, key string) {
	t.cut.Store(true)
	lease := e.lock(c, key, hasp.WithTTL(e.term))
	ctx := lease.Context()

	b.succeed(key, e.long)

	// Even the first check after the other's grant must see the loss.
	require(ctx.Err() != nil, "another holds the key, and the lease's context goes on")
	isLost(lease, "when another holds the key")

	child, cancel := context.WithCancel(ctx)
	defer cancel()
	require(child.Err() != nil, "a context derived from the context of a lost lease goes on")
}

func leaseLossOnce(e *env, c *hasp.Client, t *tap, b *driver, key string) {
	losses := func() []hasp.Event { return t.eventsOf(hasp.EventLost) }
	lease := e.lock(c, key)
	ctx := lease.Context()
	must(lease.Unlock(e.ctx))
	must(is("the cause of the context after Unlock", context.Cause(ctx), hasp.ErrReleased))
	require(len(losses()) == 0, "a normal Unlock was reported as a loss: %+v", losses())

	t.cut.Store(true)
	lease = e.lock(c, key, hasp.WithTTL(e.term))
	e.untilDone(lease.Context(), "the end of a lease that is not renewed")
	isLost(lease, "when it was not renewed")
	must(is("Unlock of a lease that was lost", lease.Unlock(e.ctx), hasp.ErrLost))

	e.until("the event of a loss", func() bool { return len(losses()) > 0 })
	b.outlast(e.term)
	lost := losses()
	require(len(lost) == 1 && lost[0].Key == key && errors.Is(lost[0].Err, hasp.ErrLost), "a loss was reported as %+v, want one event", lost)
}

func leaseLossTaken(e *env, c *hasp.Client, t *tap, b *driver, key string) {
	lease := e.lock(c, key, hasp.WithTTL(e.term))

	// This is as if the store had lost the hold.
	mustInTime(b.release(t.last()), "release with the lease's own token")

	e.untilDone(lease.Context(), "the context of a lease whose hold is gone")
	isLost(lease, "when its hold is gone")
	must(is("Unlock of a lease whose hold is gone", lease.Unlock(e.ctx), hasp.ErrLost))
}

func leaseExtend(e *env) {
	c, b, key := e.newClient(), e.open(), e.key()
	lease := e.lock(c, key, hasp.WithTTL(e.term), hasp.WithoutRenewal())
	called := time.Now()
	mustInTime(lease.Extend(e.ctx, e.long), "Extend right after Lock") // a try lasts a tenth of the term
	left := lease.Expires().Sub(called)
	require(left >= e.long, "after Extend by %v the lease lasts %v", e.long, left)

	b.outlast(e.term)
	mustf(lease.Err(), "%v after Extend by %v", e.term, e.long)
	mustf(b.refused(key), "%v after Extend by %v", e.term, e.long)
	must(lease.Unlock(e.ctx))
}

func leaseContextEnds(e *env) {
	c, b, key := e.newClient(), e.open(), e.key()
	ctx, cancel := context.WithCancel(e.ctx)
	defer cancel()
	lease, err := c.Lock(ctx, key)
	must(err)

	cancel()
	require(lease.Context().Err() != nil, "the lease's context goes on after the end of Lock's context")
	mustf(lease.Err(), "the hold, after the end of Lock's context")
	mustf(b.refused(key), "after the end of Lock's context")
	must(lease.Unlock(ctx))
	must(b.granted(key))
}

var unlockClauses = []clause{
	{name: "unlock-lost", says: saysHasp, check: tapOn(unlockLost),
		why: "Unlock of a lost lease returns ErrLost and does not affect the successor."},
	{name: "unlock-dead-context", says: saysHasp, check: unlockDeadContext,
		why: "Unlock works with a context that has ended."},
	{name: "unlock-twice", says: saysHasp, check: unlockTwice,
		why: "A second Unlock returns ErrReleased."},
	{name: "unlock-again", says: saysHasp, check: unlockAgain,
		why: "An Unlock of unknown outcome returns an error, and may be called again until it succeeds. The key is then free."},
}

func unlockLost(e *env, c *hasp.Client, t *tap, b *driver, key string) {
	t.cut.Store(true)
	lease := e.lock(c, key, hasp.WithTTL(e.term))

	next := b.succeed(key, e.long)
	for range 2 {
		must(is("Unlock of a lease that was lost", lease.Unlock(e.ctx), hasp.ErrLost))
	}
	must(is("Extend of a lease that was lost", lease.Extend(e.ctx, e.long), hasp.ErrLost))

	b.outlast(e.term) // for what goes on in the background
	mustf(b.renews(next), "renewal by the successor after the Unlock of a lost lease")
	b.give(next)
}

func unlockDeadContext(e *env) {
	c, b, key := e.newClient(), e.open(), e.key()
	mustf(e.lock(c, key).Unlock(e.deadContext()), "unlock with a context that has ended")
	must(b.granted(key))
}

func unlockTwice(e *env) {
	lease := e.lock(e.newClient(), e.key())
	must(lease.Unlock(e.ctx))
	must(is("second Unlock", lease.Unlock(e.ctx), hasp.ErrReleased))
	must(is("Err after Unlock", lease.Err(), hasp.ErrReleased))
}

// unlockAgain loses the first command of a release, or its reply.
func unlockAgain(e *env) {
	for _, lost := range []string{"command", "reply"} {
		c, t := e.tapped(hasp.Options{})
		b, key := e.open(), e.key()
		var failed atomic.Bool
		t.release = func(_ backend.Claim, next func() error) error {
			switch {
			case failed.Swap(true):
				return next()
			case lost == "reply":
				if err := next(); err != nil {
					return err
				}
			}
			return errCut
		}

		lease := e.lock(c, key)
		must(is("Unlock whose "+lost+" is lost", lease.Unlock(e.ctx), errCut))
		require(lease.Context().Err() != nil, "the context of a lease goes on after an Unlock of unknown outcome")
		mustf(lease.Unlock(e.ctx), "unlock again, after one whose %s was lost", lost)
		must(is("Unlock after one that succeeded", lease.Unlock(e.ctx), hasp.ErrReleased))
		mustf(b.granted(key), "after an Unlock whose %s was lost, and another", lost)
	}
}

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
