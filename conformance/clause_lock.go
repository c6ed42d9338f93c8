package conformance

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

// lockClauses use the driver through package hasp, up to the grant of a lease.
var lockClauses = []clause{
	{name: "lock-goroutines", says: saysHasp, check: lockGoroutines,
		why: "Goroutines of several Clients hold one key one at a time."},
	{name: "lock-held", says: saysHasp, check: lockHeld,
		why: "TryLock of a held key returns ErrHeld. Lock returns it when WithMaxWait has passed."},
	{name: "lock-outage", says: saysHasp, check: lockOutage,
		why: "An outage is never reported as ErrHeld, but as the store's own error. After it the key can be locked."},
	{name: "lock-lost-reply", says: saysHasp, check: tapOn(lockLostReply),
		why: "If the reply to an Acquire is lost, its hold is released."},
	{name: "lock-waits", says: saysHasp, check: lockWaits,
		why: "Lock gets a key that another Client unlocks, and a key whose holder died."},
	{name: "lock-fence", says: saysHasp, check: lockFence,
		why: "With WithFence every lease has a larger fence, or Lock returns errors.ErrUnsupported."},
	{name: "lock-invalid", says: saysHasp, check: lockInvalid,
		why: "Bad arguments are ErrInvalid and do not reach the store."},
	{name: "lock-all", says: saysHasp, check: lockAll,
		why: "LockAll holds all keys or none."},
}

// lockGoroutines increments a number that only the lock protects.
func lockGoroutines(e *env) {
	clients, key, began := e.clients(), e.key(), time.Now()
	var inside, total atomic.Int32
	shared := 0

	must(e.each(24, func(i int) {
		for n := 0; n < 10 && time.Since(began) < 3*time.Second; n++ {
			lease := e.lock(clients[i%len(clients)], key)
			in := inside.Add(1)
			require(in == 1, "%d goroutines hold one key", in)
			shared++ // not atomic: two holders at once would lose increments
			total.Add(1)
			inside.Add(-1)
			must(lease.Unlock(e.ctx))
		}
	}))

	require(shared == int(total.Load()), "%d increments under the lock came to %d", total.Load(), shared)
}

func lockHeld(e *env) {
	a, b := e.newClient(), e.newClient()
	key := e.key()
	lease := e.lock(a, key)

	for _, c := range []*hasp.Client{a, b} {
		must(is("TryLock of a held key", errOf(c.TryLock(e.ctx, key)), hasp.ErrHeld))
		err := errOf(c.Lock(e.ctx, key, hasp.WithMaxWait(e.term/4)))

		// On a slow machine the store may not have answered yet.
		requireInTime(errors.Is(err, hasp.ErrHeld), "lock of a held key with MaxWait: %v, want ErrHeld", err)
		require(!errors.Is(err, context.DeadlineExceeded), "lock of a held key with MaxWait, whose context goes on: %w", err)
	}

	must(lease.Unlock(e.ctx))
	// TryLock might find the key held: a Lock that gave up may have a place in a queue, or a
	// request under way that arrives after the Unlock. Both are released in the background.
	must(e.lock(b, key).Unlock(e.ctx))
}

// outage ends the try unless err is the store's own error. An attempt that took too
// long may have another error, which is slow.
func outage(what string, err error) {
	require(err != nil && !errors.Is(err, hasp.ErrHeld), "%s: got %v", what, err)
	requireInTime(errors.Is(err, errCut), "%s: %w", what, err)
}

func lockOutage(e *env) {
	c, t := e.tapped(hasp.Options{Timeout: 2 * e.term})
	var out atomic.Bool
	out.Store(true)
	t.acquire = func(_ backend.Claim, next func() (backend.Grant, error)) (backend.Grant, error) {
		if out.Load() {
			return backend.Grant{}, errCut
		}
		return next()
	}

	key := e.key()
	outage("TryLock during an outage", errOf(c.TryLock(e.ctx, key)))
	outage("a Lock during an outage", e.within("Lock during an outage", func() error { return errOf(c.Lock(e.ctx, key)) }))

	out.Store(false)
	e.unlockInTime(e.lockInTime(c, key))
}

func lockLostReply(e *env, c *hasp.Client, t *tap, b *driver, key string) {
	t.acquire = func(_ backend.Claim, next func() (backend.Grant, error)) (backend.Grant, error) {
		if _, err := next(); err != nil {
			return backend.Grant{}, err
		}
		return backend.Grant{}, errCut // the store has granted the key
	}

	must(is("TryLock whose reply is lost", errOf(c.TryLock(e.ctx, key)), errCut))

	// The engine releases the hold in the background.
	mustf(b.grantedAtLast(key), "after a TryLock whose reply was lost")
}

func lockWaits(e *env) {
	a, b, dead := e.newClient(), e.newClient(), e.open()
	orphan := dead.hold(e.term)
	key := e.key()

	lease := e.lock(a, key)
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

func lockFence(e *env) {
	clients := []*hasp.Client{e.newClient(), e.newClient()}
	key, last := e.key(), uint64(0)
	for i := range 6 {
		lease, err := clients[i%2].Lock(e.ctx, key, hasp.WithFence())
		if !e.traits.Fenced {
			must(is("Lock with a fence over a driver that has none", err, errors.ErrUnsupported))
			return
		}
		must(err)

		require(lease.Fence() > last, "fence %d after %d", lease.Fence(), last)
		last = lease.Fence()
		must(lease.Unlock(e.ctx))
	}
}

func lockInvalid(e *env) {
	c, t := e.tapped(hasp.Options{})
	for what, err := range map[string]error{
		"an empty key":      errOf(c.Lock(e.ctx, "")),
		"a TTL of 99 ms":    errOf(c.Lock(e.ctx, e.key(), hasp.WithTTL(99*time.Millisecond))),
		"a negative TTL":    errOf(c.TryLock(e.ctx, e.key(), hasp.WithTTL(-time.Second))),
		"a negative wait":   errOf(c.Lock(e.ctx, e.key(), hasp.WithMaxWait(-1))),
		"a max hold of 0 s": errOf(c.Lock(e.ctx, e.key(), hasp.WithMaxHold(0))),
	} {
		must(is("lock with "+what, err, hasp.ErrInvalid))
		var he *hasp.Error
		require(errors.As(err, &he), "lock with %s: %T is not a *hasp.Error", what, err)
	}
	t.askedNothing("callers with bad arguments")
}

func lockAll(e *env) {
	a, b := e.newClient(), e.open()
	keys := []string{e.key(), e.key(), e.key()}
	holder := e.claimOf(keys[2], e.long)
	b.take(holder)
	_, err := hasp.LockAll(e.ctx, a, keys, hasp.WithMaxWait(e.term/4))
	requireInTime(errors.Is(err, hasp.ErrHeld), "LockAll with one key held: %v, want ErrHeld", err)

	b.give(holder)
	for _, key := range keys {
		mustf(b.grantedAtLast(key), "after a LockAll that failed")
	}

	all, err := hasp.LockAll(e.ctx, a, keys)
	must(err)
	for _, key := range keys {
		must(b.refused(key))
	}

	must(all.Unlock(e.ctx))
	for _, key := range keys {
		mustf(b.granted(key), "after Unlock of LockAll")
	}
}

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
