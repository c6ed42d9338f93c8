package conformance

import (
	"errors"
	"fmt"

	"github.com/hasplock/hasp/backend"
)

var fenceClauses = []clause{
	{
		name:  "fence-grows",
		why:   "Every new hold of a key has a larger fence, whichever client takes it. A fence is never zero.",
		says:  saysFence,
		need:  fenced,
		check: fenceGrows,
	},
	{
		name:  "fence-after-expiry",
		why:   "A fence is larger than the fence of a hold that expired.",
		says:  saysFence,
		need:  fenced,
		check: fenceAfterExpiry,
	},
	{
		name:  "fence-outlives-drivers",
		why:   "Fences still grow after all drivers that asked for one are closed.",
		says:  saysFence,
		need:  fenced,
		check: fenceOutlivesDrivers,
	},
	{
		name:  "fence-when-asked",
		why:   "A fence is zero unless the claim asked for it.",
		says:  saysFence,
		check: fenceWhenAsked,
	},
	{
		name:  "fence-unsupported",
		why:   "If a claim asks for a fence, a driver that is not Fenced returns errors.ErrUnsupported and takes nothing.",
		says:  saysUnfenced,
		need:  unfenced,
		check: fenceUnsupported,
	},
}

// fences checks that each fence of a key is larger than the one before.
type fences struct {
	key  string
	last uint64
}

func (f *fences) add(how string, g backend.Grant) error {
	if g.Fence == 0 {
		return fmt.Errorf("%s: no fence", how)
	}
	if g.Fence <= f.last {
		return fmt.Errorf("%s: fence %d after %d", how, g.Fence, f.last)
	}
	f.last = g.Fence
	return nil
}

func fenceGrows(e *env) error {
	drivers := []*driver{e.open(), e.open()}
	f := fences{key: e.key()}
	for i := range 12 {
		d := drivers[i/2%2]
		c := fencedClaim(e.claimOf(f.key, e.h.Long))
		must(f.add("after a release", d.take(c)))
		if g := d.keep(c); g.Fence != 0 && g.Fence != f.last {
			return fmt.Errorf("a renewal says fence %d of a hold with fence %d", g.Fence, f.last)
		}
		must(d.refused(f.key))
		d.give(c)
		if err := drivers[i%2].granted(f.key); err != nil { // unfenced, in between
			return err
		}
	}
	return nil
}

func fenceAfterExpiry(e *env) error {
	drivers := []*driver{e.open(), e.open()}
	f := fences{key: e.key()}
	must(f.add("first", drivers[0].take(fencedClaim(e.claimOf(f.key, e.term)))))
	for i := range 2 {
		d := drivers[(i+1)%2]
		var g backend.Grant
		err := e.poll("acquire after the end of a term", func() (ok bool, err error) {
			g, err = d.acquire(fencedClaim(e.claimOf(f.key, e.term)))
			if errors.Is(err, backend.ErrHeld) {
				return false, nil
			}
			return err == nil, err
		})
		must(err)
		must(f.add("after the end of a term", g))
	}
	return nil
}

func fenceOutlivesDrivers(e *env) error {
	f := fences{key: e.key()}
	for range 3 {
		d := e.openOwn(e.store)
		c := fencedClaim(e.claimOf(f.key, e.h.Long))
		err := f.add("by a new driver", d.take(c))
		d.give(c)
		d.Close()
		must(err)
	}
	return nil
}

func fenceWhenAsked(e *env) error {
	a := e.open()
	c := e.claim(e.h.Long)
	if e.traits.Fenced {
		f := fencedClaim(c)
		a.take(f)
		a.give(f)
		c = e.claimOf(c.Key, e.h.Long)
	}
	if g := a.take(c); g.Fence != 0 {
		return fmt.Errorf("fence %d for a claim that did not ask for one", g.Fence)
	}
	return a.release(c)
}

func fenceUnsupported(e *env) error {
	a := e.open()
	c := fencedClaim(e.claim(e.h.Long))
	g, err := a.acquire(c)
	if err == nil && g.Fence != 0 {
		return fmt.Errorf("fence %d from a driver that is not Fenced by its Traits", g.Fence)
	}
	must(is("acquire with a fence from a driver that is not Fenced", err, errors.ErrUnsupported))
	if e.waiter {
		w := a.want(fencedClaim(e.claimOf(c.Key, e.h.Long)))
		must(is("wait with a fence for a driver that is not Fenced", e.arrives("Wait", w.done), errors.ErrUnsupported))
	}
	return a.granted(c.Key)
}
