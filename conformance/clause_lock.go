package conformance

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

// lockClauses use the driver through package hasp, up to the grant of a lease.
var lockClauses = []clause{
	{
		name:  "lock-goroutines",
		why:   "Goroutines of several Clients hold one key one at a time.",
		says:  saysHasp,
		check: lockGoroutines,
	},
	{
		name:  "lock-held",
		why:   "TryLock of a held key returns ErrHeld. Lock returns it when WithMaxWait has passed.",
		says:  saysHasp,
		check: lockHeld,
	},
	{
		name:  "lock-outage",
		why:   "An outage is never reported as ErrHeld, but as the store's own error. After it the key can be locked.",
		says:  saysHasp,
		check: lockOutage,
	},
	{
		name:  "lock-lost-reply",
		why:   "If the reply to an Acquire is lost, its hold is released.",
		says:  saysHasp,
		check: lockLostReply,
	},
	{
		name:  "lock-waits",
		why:   "Lock gets a key that another Client unlocks, and a key whose holder died.",
		says:  saysHasp,
		check: lockWaits,
	},
	{
		name:  "lock-fence",
		why:   "With WithFence every lease has a larger fence, or Lock returns errors.ErrUnsupported.",
		says:  saysHasp,
		check: lockFence,
	},
	{
		name:  "lock-invalid",
		why:   "Bad arguments are ErrInvalid and do not reach the store.",
		says:  saysHasp,
		check: lockInvalid,
	},
	{
		name:  "lock-all",
		why:   "LockAll holds all keys or none.",
		says:  saysHasp,
		check: lockAll,
	},
}

// lockGoroutines increments a number that only the lock protects.
func lockGoroutines(e *env) error {
	clients := []*hasp.Client{e.newClient(), e.newClient(), e.newClient()}
	key, began := e.key(), time.Now()
	var inside, total atomic.Int32
	shared := 0
	err := e.each(24, func(i int) error {
		for n := 0; n < 10 && time.Since(began) < 3*time.Second; n++ {
			lease, err := clients[i%len(clients)].Lock(e.ctx, key)
			if err != nil {
				return err
			}
			if in := inside.Add(1); in != 1 {
				return fmt.Errorf("%d goroutines hold one key", in)
			}
			shared++
			total.Add(1)
			inside.Add(-1)
			if err := lease.Unlock(e.ctx); err != nil {
				return err
			}
		}
		return nil
	})
	if err == nil && shared != int(total.Load()) {
		err = fmt.Errorf("%d increments under the lock came to %d", total.Load(), shared)
	}
	return err
}

func lockHeld(e *env) error {
	a, b := e.newClient(), e.newClient()
	key := e.key()
	lease := e.lock(a, key)
	for _, c := range []*hasp.Client{a, b} {
		_, err := c.TryLock(e.ctx, key)
		must(is("TryLock of a held key", err, hasp.ErrHeld))
		_, err = c.Lock(e.ctx, key, hasp.WithMaxWait(e.term/4))
		if err := is("Lock of a held key with MaxWait", err, hasp.ErrHeld); err != nil {
			return slow("%w", err) // the store may not have answered yet
		}
		if errors.Is(err, context.DeadlineExceeded) {
			return fmt.Errorf("lock of a held key with MaxWait, whose context goes on: %w", err)
		}
	}
	must(lease.Unlock(e.ctx))
	again := b.TryLock
	if e.traits.Ordered {
		// The Unlock may have handed the key to the place of the Lock that has just
		// given up. That place is released in the background.
		again = b.Lock
	}
	lease, err := again(e.ctx, key)
	mustf(err, "locking again after Unlock by another Client")
	return lease.Unlock(e.ctx)
}

// outage returns an error unless err is the store's own error. An attempt that took
// too long may have another error, which is slow.
func outage(what string, err error) error {
	switch {
	case errors.Is(err, errCut) && !errors.Is(err, hasp.ErrHeld):
		return nil
	case err == nil || errors.Is(err, hasp.ErrHeld):
		return fmt.Errorf("%s: got %v", what, err)
	}
	return slow("%s: %w", what, err)
}

func lockOutage(e *env) error {
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
	_, err := c.TryLock(e.ctx, key)
	must(outage("TryLock during an outage", err))
	err = e.within("Lock during an outage", func() error {
		_, err := c.Lock(e.ctx, key)
		return err
	})
	must(outage("a Lock during an outage", err))
	out.Store(false)
	lease, err := c.Lock(e.ctx, key)
	if err != nil {
		return slow("a Lock after an outage: %w", err)
	}
	return unlockShort(e, lease)
}

func lockLostReply(e *env) error {
	c, t := e.tapped(hasp.Options{})
	b := e.open()
	t.acquire = func(_ backend.Claim, next func() (backend.Grant, error)) (backend.Grant, error) {
		if _, err := next(); err != nil {
			return backend.Grant{}, err
		}
		return backend.Grant{}, errCut
	}
	key := e.key()
	_, err := c.TryLock(e.ctx, key)
	must(is("TryLock whose reply is lost", err, errCut))
	mustf(b.grantedAtLast(key), "after a TryLock whose reply was lost")
	return nil
}

func lockWaits(e *env) error {
	a, b := e.newClient(), e.newClient()
	dead := e.open()
	orphan := dead.hold(e.term)
	key := e.key()
	lease := e.lock(a, key)
	done := make(chan error, 1)
	go func() {
		l, err := b.Lock(e.ctx, key)
		if err == nil {
			err = l.Unlock(e.ctx)
		}
		done <- err
	}()
	e.sleep(e.term / 8)
	must(lease.Unlock(e.ctx))
	must(e.arrives("Lock of a key that was unlocked", done))
	return e.within("Lock of a key whose holder died", func() error {
		l, err := a.Lock(e.ctx, orphan.Key)
		if err != nil {
			return err
		}
		if err := is("release by a holder that ran out", dead.release(orphan), backend.ErrLost); err != nil {
			return err
		}
		return l.Unlock(e.ctx)
	})
}

func lockFence(e *env) error {
	clients := []*hasp.Client{e.newClient(), e.newClient()}
	key, last := e.key(), uint64(0)
	for i := range 6 {
		lease, err := clients[i%2].Lock(e.ctx, key, hasp.WithFence())
		if !e.traits.Fenced {
			return is("Lock with a fence over a driver that has none", err, errors.ErrUnsupported)
		}
		must(err)
		if lease.Fence() <= last {
			return fmt.Errorf("fence %d after %d", lease.Fence(), last)
		}
		last = lease.Fence()
		must(lease.Unlock(e.ctx))
	}
	return nil
}

func lockInvalid(e *env) error {
	c, t := e.tapped(hasp.Options{})
	for what, lock := range map[string]func() (*hasp.Lease, error){
		"an empty key":      func() (*hasp.Lease, error) { return c.Lock(e.ctx, "") },
		"a TTL of 99 ms":    func() (*hasp.Lease, error) { return c.Lock(e.ctx, e.key(), hasp.WithTTL(99*time.Millisecond)) },
		"a negative TTL":    func() (*hasp.Lease, error) { return c.TryLock(e.ctx, e.key(), hasp.WithTTL(-time.Second)) },
		"a negative wait":   func() (*hasp.Lease, error) { return c.Lock(e.ctx, e.key(), hasp.WithMaxWait(-1)) },
		"a max hold of 0 s": func() (*hasp.Lease, error) { return c.Lock(e.ctx, e.key(), hasp.WithMaxHold(0)) },
	} {
		_, err := lock()
		must(is("lock with "+what, err, hasp.ErrInvalid))
		var he *hasp.Error
		if !errors.As(err, &he) {
			return fmt.Errorf("lock with %s: %T is not a *hasp.Error", what, err)
		}
	}
	if n := t.asked(); n != 0 {
		return fmt.Errorf("the store was asked %d times", n)
	}
	return nil
}

func lockAll(e *env) error {
	a, b := e.newClient(), e.open()
	keys := []string{e.key(), e.key(), e.key()}
	holder := e.claimOf(keys[2], e.h.Long)
	b.take(holder)
	_, err := hasp.LockAll(e.ctx, a, keys, hasp.WithMaxWait(e.term/4))
	if err := is("LockAll with one key held", err, hasp.ErrHeld); err != nil {
		return slow("%w", err)
	}
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
	return nil
}
