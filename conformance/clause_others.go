package conformance

import (
	"errors"
	"fmt"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

// otherClauses check strategies that keep their locks under the same keys of one
// store. With them users can change from one strategy to another while both run.
var otherClauses = []clause{
	{
		name:  "others-exclude",
		why:   "Strategies that share keys exclude each other. If one holds a key, another's Acquire returns ErrHeld, and its Renew and Release return ErrLost. After the hold it gets the key.",
		says:  saysShared,
		need:  others,
		check: func(e *env) error { return e.pairs(othersExclude) },
	},
	{
		name:  "others-wait",
		why:   "A waiter gets a key that another strategy releases or lets expire, although no message wakes it.",
		says:  saysWaitGets,
		need:  others,
		check: func(e *env) error { return e.pairs(othersWait) },
	},
	{
		name:  "others-break",
		why:   "Inspect reports the hold of another strategy, and Break ends it. Its holder gets ErrLost, and a waiter of either strategy gets the key.",
		says:  saysBreak,
		need:  others,
		check: func(e *env) error { return e.pairs(othersBreak) },
	},
	{
		name:  "others-fence",
		why:   "Strategies that share keys have fences that grow together.",
		says:  saysShared,
		need:  all(others, fenced),
		check: othersFence,
	},
	{
		name:  "others-history",
		why:   "Simultaneous calls of all strategies that share keys are linearizable as one lock.",
		says:  saysShared,
		need:  others,
		check: othersHistory,
	},
}

// strategies returns the strategy under test and its others.
func (e *env) strategies() []Other {
	return append([]Other{{Name: "this strategy", Open: e.h.Open}}, e.h.Others...)
}

// driverOf opens a driver of a strategy that the end of the try closes.
func (e *env) driverOf(o Other) *driver {
	d := e.openBy(o.Open, e.store)
	e.onEnd(func() { d.Close() })
	return d
}

// clientOf returns a Client over a new driver of a strategy.
func (e *env) clientOf(o Other) *hasp.Client {
	return e.client(e.openBy(o.Open, e.store).Driver, hasp.Options{})
}

// pairs runs f for the strategy under test with each other strategy, in both
// orders, all at once.
func (e *env) pairs(f func(e *env, a, b Other) error) error {
	this := e.strategies()[0]
	var pairs [][2]Other
	for _, other := range e.h.Others {
		pairs = append(pairs, [2]Other{this, other}, [2]Other{other, this})
	}
	return e.each(len(pairs), func(i int) error {
		a, b := pairs[i][0], pairs[i][1]
		if err := e.try(func() error { return f(e, a, b) }); err != nil {
			return fmt.Errorf("%s with %s: %w", a.Name, b.Name, err)
		}
		return nil
	})
}

// othersExclude checks that b does not get a key that a holds before it is
// released, and before its term has ended.
func othersExclude(e *env, first, second Other) error {
	a, b := e.driverOf(first), e.driverOf(second)
	c := e.claim(e.h.Long)
	c.Fenced = a.Traits().Fenced
	a.take(c)
	if err := b.shutOut(c.Key); err != nil {
		return err
	}
	a.keep(c)
	a.give(c)
	if err := b.granted(c.Key); err != nil {
		return fmt.Errorf("after a release: %w", err)
	}
	old := e.claimOf(c.Key, e.term)
	a.take(old)
	next, _, err := b.seize(c.Key, e.h.Long)
	if err != nil {
		return fmt.Errorf("a key whose holder died: %w", err)
	}
	_, err = a.renew(old)
	if err := is("renewal of a hold that ran out", err, backend.ErrLost); err != nil {
		return err
	}
	if err := is("release of a hold that ran out", a.release(old), backend.ErrLost); err != nil {
		return err
	}
	if err := a.shutOut(c.Key); err != nil {
		return err
	}
	b.keep(next)
	return b.release(next)
}

// shutOut returns an error if d can change a key that another strategy holds.
func (d *driver) shutOut(key string) error {
	c := d.e.claimOf(key, d.e.h.Long)
	_, err := d.renew(c)
	if err := is("renewal of another's hold", err, backend.ErrLost); err != nil {
		return err
	}
	if err := is("release of another's hold", d.release(c), backend.ErrLost); err != nil {
		return err
	}
	if d.Traits().Fenced {
		c = fencedClaim(d.e.claimOf(key, d.e.h.Long))
		_, err := d.acquire(c)
		if err := is("acquire with a fence a key that is held", err, backend.ErrHeld); err != nil {
			return err
		}
	}
	return d.refused(key)
}

// othersWait lets b wait for a key that a holds. If a releases the key, b must get
// it long before the term ends.
func othersWait(e *env, first, second Other) error {
	a, b := e.driverOf(first), e.clientOf(second)
	key := e.key()
	for _, ttl := range []time.Duration{e.h.Long, e.h.Long, e.term} {
		c := e.claimOf(key, ttl)
		a.take(c)
		done := e.locks(b, key)
		e.sleep(e.term / 8)
		if ttl == e.h.Long {
			a.give(c)
		}
		if err := e.arrives(fmt.Sprintf("Lock of a key that %s had for a term of %v", first.Name, ttl), done); err != nil {
			return err
		}
	}
	return a.grantedAtLast(key)
}

// locks locks key once.
func (e *env) locks(c *hasp.Client, key string) <-chan error {
	done := make(chan error, 1)
	go func() {
		lease, err := c.Lock(e.ctx, key)
		if err == nil {
			err = lease.Unlock(e.ctx)
		}
		done <- err
	}()
	return done
}

// othersBreak lets b break a hold of a, while waiters of both wait for the key.
func othersBreak(e *env, first, second Other) error {
	a, b := e.driverOf(first), e.driverOf(second)
	if _, ok := b.Driver.(backend.Inspector); !ok {
		return nil
	}
	c := a.hold(e.h.Long)
	s := b.inspect(c.Key)
	if !s.Held || s.TTL <= 0 || s.TTL > c.TTL+time.Second || s.Owner != "" && s.Owner != c.Owner {
		return fmt.Errorf("inspect a key that another holds for a term of %v as %s: %+v", c.TTL, c.Owner, s)
	}
	waits := []<-chan error{e.locks(e.clientOf(first), c.Key), e.locks(e.clientOf(second), c.Key)}
	e.sleep(e.term / 8)
	b.breakKey(c.Key)
	for _, done := range waits {
		if err := e.arrives("Lock of a key that was broken by another strategy", done); err != nil {
			return err
		}
	}
	_, err := a.renew(c)
	if err := is("renewal of a hold that was broken", err, backend.ErrLost); err != nil {
		return err
	}
	if err := is("release of a hold that was broken", a.release(c), backend.ErrLost); err != nil {
		return err
	}
	return errors.Join(a.grantedAtLast(c.Key), b.grantedAtLast(c.Key))
}

// othersFence gets fences from all strategies in turn.
func othersFence(e *env) error {
	f := fences{key: e.key()}
	for range 3 {
		for _, o := range e.strategies() {
			d := e.driverOf(o)
			if !d.Traits().Fenced {
				continue
			}
			for range 2 {
				c := fencedClaim(e.claimOf(f.key, e.h.Long))
				must(f.add("by "+o.Name, d.take(c)))
				d.give(c)
			}
		}
	}
	return nil
}

func othersHistory(e *env) error {
	var drivers []*driver
	var clients []*hasp.Client
	fenced := true
	for _, o := range e.strategies() {
		drivers, clients = append(drivers, e.driverOf(o)), append(clients, e.clientOf(o))
		fenced = fenced && drivers[len(drivers)-1].Traits().Fenced
	}
	must(e.driverHistory(drivers, fenced).check(false))
	return e.lockerHistory(clients, fenced, 4*time.Millisecond).check(false)
}
