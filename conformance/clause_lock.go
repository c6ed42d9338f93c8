package conformance

import (
	"context"
	"errors"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

// lockClauses use the driver through package hasp, as programs do. They check only what depends on
// the driver, because the tests of package hasp check the engine.
var lockClauses = []clause{
	{name: "lock-waits", says: saysHasp, check: lockWaits,
		why: "TryLock of a held key returns ErrHeld, and Lock does when WithMaxWait has passed. Lock gets a key that another Client unlocks, and a key whose holder died."},
	{name: "lock-cancelled-waiting", says: saysHasp, check: lockCancelledWaiting,
		why: "If its context ends, a waiting Lock returns promptly. The error matches ErrHeld and the cause, and nothing is left."},
	{name: "lease-renewed", says: saysHasp, check: leaseRenewed,
		why: "A lease is renewed past many terms, and no other caller gets the key."},
	{name: "lease-loss-before-others", says: saysHasp, check: tapOn(leaseLossBeforeOthers),
		why: "A lease that cannot be renewed ends with cause ErrLost before another caller holds the key, for its context and for Err. " +
			"Its Unlock returns ErrLost and does not affect the successor."},
	{name: "lease-resumed", says: saysHandle, check: leaseResumed,
		why: "A lease that a Client has detached keeps the key, also after the Close of that Client. Another Client resumes it once: then it is renewed, and its Unlock frees the key."},
	{name: "client-close", says: saysHasp, check: clientClose,
		why: "Close ends waits and every lease's context with ErrClosed. After it no caller can lock."},
	{name: "client-leaves-nothing", says: saysHasp, check: clientLeavesNothing,
		why: "After Close no goroutine is left."},
}

func lockWaits(e *env) {
	a, b, dead := e.newClient(), e.newClient(), e.open()
	orphan := dead.hold(e.term)
	key := e.key()

	lease := e.lock(a, key)
	for _, c := range []*hasp.Client{a, b} {
		must(is("TryLock of a held key", errOf(c.TryLock(e.ctx, key)), hasp.ErrHeld))
		err := errOf(c.Lock(e.ctx, key, hasp.WithMaxWait(e.term/4)))

		// On a slow machine the store may not have answered yet.
		requireInTime(errors.Is(err, hasp.ErrHeld), "lock of a held key with MaxWait: %v, want ErrHeld", err)
		require(!errors.Is(err, context.DeadlineExceeded), "lock of a held key with MaxWait, whose context goes on: %w", err)
	}

	done := e.locks(b, key)
	e.sleep(e.term / 8)
	must(lease.Unlock(e.ctx))
	must(e.arrives("Lock of a key that was unlocked", done))

	must(e.within("Lock of a key whose holder died", func() error {
		l := e.lock(a, orphan.Key)
		must(is("release by a holder whose term has ended", dead.release(orphan), backend.ErrLost))
		return l.Unlock(e.ctx)
	}))
}

// lockCancelledWaiting cancels several Locks and judges the fastest, because a slow machine may
// delay some of them.
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

// cancelLock begins a Lock, waits for its first attempt and a pause, and cancels it. It returns the
// time from the cancellation to the return of Lock, and the error of Lock.
func (t *tap) cancelLock(key string, pause time.Duration, cause error) (took time.Duration, err error) {
	ctx, cancel := context.WithCancelCause(t.e.ctx)
	done := t.attempts(func() error { return errOf(t.client.Lock(ctx, key)) })
	t.e.sleep(pause)
	began := time.Now()
	cancel(cause)
	err = t.e.arrives("a cancelled Lock", done)
	return time.Since(began), err
}

func leaseRenewed(e *env) {
	c, b, key := e.newClient(), e.open(), e.key()
	lease := e.lock(c, key, hasp.WithTTL(e.term))
	for range 4 {
		b.outlast(e.term)
		mustInTime(lease.Err(), "a lease that is renewed")
		b.refusedWhileRenewed(key, lease.Err)
	}
	mustInTime(context.Cause(lease.Context()), "the context of a lease that is renewed")
	e.unlockInTime(lease)
}

func leaseResumed(e *env) {
	a, b, key := e.newClient(), e.newClient(), e.key()
	handle, err := e.lock(a, key, hasp.WithTTL(e.term)).Detach(e.ctx, e.long)
	mustInTime(err, "Detach")
	must(a.Close())
	other := e.open()
	other.outlast(e.term)
	mustf(other.refused(key), "after Detach")

	lease, err := b.Resume(e.ctx, handle)
	mustInTime(err, "Resume")
	for range 3 {
		other.outlast(e.term)
		other.refusedWhileRenewed(key, lease.Err)
	}
	e.unlockInTime(lease)
	mustf(other.grantedAtLast(key), "after the Unlock of a lease that was resumed")
	must(is("Resume after Unlock", errOf(b.Resume(e.ctx, handle)), hasp.ErrLost))
}

func leaseLossBeforeOthers(e *env, c *hasp.Client, t *tap, b *driver, key string) {
	t.cut.Store(true)
	lease := e.lock(c, key, hasp.WithTTL(e.term))
	ctx := lease.Context()

	next := b.succeed(key, e.long)

	// The loss must show as soon as the other caller has the key.
	require(ctx.Err() != nil, "another holds the key, and the lease's context goes on")
	isLost(lease, "when another holds the key")

	child, cancel := context.WithCancel(ctx)
	defer cancel()
	require(child.Err() != nil, "a context derived from the context of a lost lease goes on")

	for range 2 {
		must(is("Unlock of a lease that was lost", lease.Unlock(e.ctx), hasp.ErrLost))
	}
	must(is("Extend of a lease that was lost", lease.Extend(e.ctx, e.long), hasp.ErrLost))

	b.outlast(e.term) // so that calls in the background end first
	mustf(b.renews(next), "renewal by the successor after the Unlock of a lost lease")
	b.give(next)
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

	// Close waits for the holder, which may still unlock.
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
