package conformance

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/hasplock/hasp/backend"
)

var inspectClauses = []clause{
	{
		name:  "inspect-holder",
		why:   "Inspect returns whether a key is held, its owner, the remaining term and the fence.",
		says:  saysInspect,
		need:  inspector,
		check: inspectHolder,
	},
	{
		name:  "inspect-waiters",
		why:   "Inspect returns the waiters of an Ordered driver, in order.",
		says:  saysInspect,
		need:  all(inspector, ordered),
		check: inspectWaiters,
	},
	{
		name:  "break-frees",
		why:   "Break removes a hold, whichever token has it. Others get the key, and the holder gets ErrLost. Break of a free key is not an error.",
		says:  saysBreak,
		need:  inspector,
		check: breakFrees,
	},
	{
		name:  "break-wakes",
		why:   "A waiter gets a key that is broken.",
		says:  saysWaitGets,
		need:  all(inspector, waiter),
		check: breakWakes,
	},
}

var closeClauses = []clause{
	{
		name:  "close-keeps-holds",
		why:   "Close ends what the driver has opened. It frees no key, and no other driver notices.",
		says:  saysCloseKeeps,
		check: closeKeepsHolds,
	},
	{
		name:  "token-any-driver",
		why:   "Renew and Release work from any driver, also when the driver that acquired the key is closed.",
		says:  saysAnyDriver,
		check: tokenAnyDriver,
	},
	{
		name:  "close-leaves-nothing",
		why:   "After Close no goroutine of the driver is left.",
		says:  saysCloseEnds,
		check: closeLeavesNothing,
	},
}

func inspectHolder(e *env) error {
	a, b := e.open(), e.open()
	c := e.claim(e.h.Long)
	c.Fenced = e.traits.Fenced
	if s := b.inspect(c.Key); s.Held || s.Owner != "" || s.TTL != 0 || len(s.Waiters) > 0 {
		return fmt.Errorf("a key that was never held: %+v", s)
	}
	g := a.take(c)
	s := b.inspect(c.Key)
	if !s.Held {
		return fmt.Errorf("a key that is held: %+v", s)
	}
	if s.Owner != "" && s.Owner != c.Owner {
		return fmt.Errorf("owner %q, want %q", s.Owner, c.Owner)
	}
	// A store may count terms in whole seconds.
	if s.TTL <= 0 || s.TTL > c.TTL+time.Second {
		return fmt.Errorf("%v left of a term of %v", s.TTL, c.TTL)
	}
	if s.Fence != 0 && s.Fence != g.Fence {
		return fmt.Errorf("fence %d, want %d", s.Fence, g.Fence)
	}
	if len(s.Waiters) > 0 {
		return fmt.Errorf("waiters %q, although no caller waits", s.Waiters)
	}
	a.give(c)
	if s := b.inspect(c.Key); s.Held || s.Owner != "" || s.TTL != 0 {
		return fmt.Errorf("a key that was released: %+v", s)
	}
	short := e.claimOf(c.Key, e.term)
	a.take(short)
	a.outlast(e.term)
	if s := b.inspect(c.Key); s.Held {
		return fmt.Errorf("a key whose hold has run out: %+v", s)
	}
	return nil
}

func inspectWaiters(e *env) error {
	a, b := e.open(), e.open()
	c := a.hold(e.h.Long)
	var owners []string
	for i := range 3 {
		w := b.want(e.claimOf(c.Key, e.h.Long))
		owners = append(owners, w.c.Owner)
		e.queued(a, c.Key, i+1)
	}
	if s := a.inspect(c.Key); !slices.Equal(s.Waiters, owners) {
		return fmt.Errorf("waiters %q, want %q", s.Waiters, owners)
	}
	return nil
}

func breakFrees(e *env) error {
	a, b := e.open(), e.open()
	c := e.claim(e.h.Long)
	b.breakKey(c.Key)
	a.take(c)
	b.breakKey(c.Key)
	next := e.claimOf(c.Key, e.h.Long)
	if _, err := b.acquire(next); err != nil {
		return fmt.Errorf("acquire a key that was broken: %w", err)
	}
	must(is("renewal of a hold that was broken", a.renews(c), backend.ErrLost))
	must(is("release of a hold that was broken", a.release(c), backend.ErrLost))
	mustf(a.refused(c.Key), "after a late release of a hold that was broken")
	b.give(next)
	b.breakKey(c.Key)
	return a.granted(c.Key)
}

func breakWakes(e *env) error {
	a, b := e.open(), e.open()
	c := a.hold(e.h.Long)
	w := b.want(e.claimOf(c.Key, e.h.Long))
	e.queued(a, c.Key, 1)
	a.breakKey(c.Key)
	must(e.arrives("Wait for a key that was broken", w.done))
	b.keep(w.c)
	return b.release(w.c)
}

func closeKeepsHolds(e *env) error {
	a, b := e.openOwn(e.store), e.open()
	mine, other := e.claim(e.h.Long), e.claim(e.h.Long)
	_, err := a.acquire(mine)
	b.take(other)
	if cerr := a.Close(); cerr != nil || err != nil {
		return errors.Join(err, cerr)
	}
	mustf(b.refused(mine.Key), "after its holder's driver was closed")
	b.keep(other)
	mustf(b.release(other), "release by a driver after another was closed")
	return nil
}

func tokenAnyDriver(e *env) error {
	a, b := e.openOwn(e.store), e.open()
	now, later := e.claim(e.h.Long), e.claim(e.h.Long)
	_, err := a.acquire(now)
	if _, lerr := a.acquire(later); err == nil {
		err = lerr
	}
	if err == nil {
		err = b.uses(now)
	}
	if cerr := a.Close(); err != nil || cerr != nil {
		return errors.Join(err, cerr)
	}
	mustf(b.uses(later), "when its driver was closed")
	return nil
}

// uses renews and releases a hold of another driver.
func (d *driver) uses(c backend.Claim) error {
	if err := d.renews(c); err != nil {
		return fmt.Errorf("renewal of a hold that another driver acquired: %w", err)
	}
	if err := d.release(c); err != nil {
		return fmt.Errorf("release of a hold that another driver acquired: %w", err)
	}
	return d.granted(c.Key)
}

func closeLeavesNothing(e *env) error {
	use := func() error {
		d := e.openOwn(e.store)
		c := d.hold(e.h.Long)
		if e.waiter {
			w := d.want(e.claimOf(c.Key, e.h.Long))
			e.sleep(e.term / 8)
			w.stop()
			if err := e.arrives("a cancelled Wait", w.done); err == nil {
				return errors.New("wait for a held key: granted")
			}
		}
		d.keep(c)
		d.give(c)
		return d.Close()
	}
	// A library may start goroutines once for the whole program. It starts them
	// here.
	must(use())
	return e.leaves(func() error { return errors.Join(use(), use()) })
}
