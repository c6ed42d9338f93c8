package conformance

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

// leftoverClauses check the store's entries.
var leftoverClauses = []clause{
	{
		name:  "leftovers",
		why:   "After callers that hold, wait or are cancelled, the store keeps nothing, two timeouts later.",
		says:  saysLeaves,
		need:  entries,
		alone: true,
		check: leftovers,
	},
	{
		name:  "leftovers-close",
		why:   "If the Client is closed right after Unlock, the store keeps nothing, one timeout later.",
		says:  saysCleansUp,
		need:  entries,
		alone: true,
		check: leftoversClose,
	},
	{
		name:  "leftovers-expired",
		why:   "What an expired or broken hold leaves disappears by itself, even if no caller wants the key again.",
		says:  saysLeaves,
		need:  entries,
		alone: true,
		check: leftoversExpired,
	},
}

// entries lists the store's entries.
func (e *env) entries() []string {
	l, err := e.h.Entries(e.ctx, e.store)
	hooked(err)
	return l
}

// nothingSince returns an error if the store has more entries than before.
func (e *env) nothingSince(before []string) error {
	left := slices.DeleteFunc(e.entries(), func(entry string) bool { return slices.Contains(before, entry) })
	if len(left) > 0 {
		return fmt.Errorf("the store keeps %q", left)
	}
	return nil
}

// leftovers asks for long terms, so that leftovers do not expire during the test.
func leftovers(e *env) error {
	before := e.entries()
	c, b := e.newClient(), e.openOwn(e.store)
	key := e.key()
	held := e.claimOf(key, e.h.Long)
	b.take(held)
	err := e.each(12, func(i int) error {
		ctx, cancel := context.WithTimeout(e.ctx, time.Duration(i)*e.term/12)
		defer cancel()
		k := key
		if i%3 == 0 {
			k = e.key()
		}
		lease, err := c.Lock(ctx, k)
		if err == nil {
			return lease.Unlock(ctx)
		}
		if i%4 == 0 {
			c.TryLock(e.ctx, key)
		}
		return nil
	})
	b.give(held)
	if err == nil {
		err = e.leaveBehind(c, b)
	}
	// A late command lands before the last release of its token, which comes a
	// timeout later. A Client that is closed earlier does not wait for that.
	e.sleep(e.h.Timeout)
	err = errors.Join(err, c.Close(), b.Close())
	must(err)
	e.sleep(e.h.Timeout)
	return e.nothingSince(before)
}

// leaveBehind makes each kind of call that could leave something in the store.
func (e *env) leaveBehind(c *hasp.Client, b *driver) error {
	k := e.claim(e.h.Long)
	k.Fenced = e.traits.Fenced
	b.take(k)
	if err := b.refused(k.Key); err != nil {
		return err
	}
	if e.waiter {
		w := b.want(e.claimOf(k.Key, e.h.Long))
		e.queued(b, k.Key, 1)
		w.stop()
		if err := e.arrives("a cancelled Wait", w.done); err == nil {
			return errors.New("wait for a held key: granted")
		}
	}
	b.give(k)
	if err := is("second release", b.release(k), backend.ErrLost); err != nil {
		return err
	}
	if _, err := b.renew(k); !errors.Is(err, backend.ErrLost) {
		return is("renewal of a hold that was released", err, backend.ErrLost)
	}
	lease, err := c.Lock(e.ctx, k.Key)
	if err != nil {
		return err
	}
	return lease.Unlock(e.ctx)
}

// leftoversClose closes a Client and its driver while a command may be in flight,
// such as the vote of a node that the driver did not wait for.
func leftoversClose(e *env) error {
	before := e.entries()
	for range 20 {
		c, d := e.newClient(), e.openOwn(e.store)
		lease, err := c.Lock(e.ctx, e.key())
		if err == nil {
			err = errors.Join(lease.Unlock(e.ctx), c.Close())
		}
		must(err)
		claim := d.hold(e.h.Long)
		d.give(claim)
		must(d.Close())
	}
	e.sleep(e.h.Timeout)
	return e.nothingSince(before)
}

// leftoversExpired ends holds in every way except by a Release.
func leftoversExpired(e *env) error {
	before := e.entries()
	d := e.open()
	expired := e.claim(e.term)
	expired.Fenced = e.traits.Fenced
	d.take(expired)
	if e.waiter {
		held := d.hold(e.h.Long)
		w := d.want(e.claimOf(held.Key, e.term))
		e.queued(d, held.Key, 1)
		d.give(held)
		if err := e.arrives("Wait", w.done); err != nil {
			return slow("%w", err) // it may have run out before it was confirmed
		}
	}
	if e.inspector {
		broken := e.claim(e.h.Long)
		broken.Fenced = e.traits.Fenced
		d.take(broken)
		d.breakKey(broken.Key)
	}
	must(e.leaveLost())

	d.outlast(e.term)
	var left error
	err := e.poll("an end of what the holds have left", func() (bool, error) {
		if e.h.Sweep != nil {
			hooked(e.h.Sweep(e.ctx, e.store))
		}
		left = e.nothingSince(before)
		return left == nil, nil
	})
	if err != nil {
		return fmt.Errorf("%w: %w", err, left)
	}
	return nil
}

// leaveLost makes a Client lose a lease, and closes the Client.
func (e *env) leaveLost() error {
	c, t := e.tapped(hasp.Options{Timeout: e.term})
	t.cutRenewals(true)
	lease, err := c.Lock(e.ctx, e.key(), hasp.WithTTL(e.term))
	if err != nil {
		return slow("Lock: %w", err)
	}
	lost := make(chan error, 1)
	go func() { <-lease.Context().Done(); lost <- nil }()
	if err := e.arrives("the end of a lease that is not renewed", lost); err != nil {
		return err
	}
	return c.Close()
}
