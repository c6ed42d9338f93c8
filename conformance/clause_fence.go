package conformance

import (
	"errors"
	"time"

	"github.com/hasplock/hasp/backend"
)

var fenceClauses = []clause{
	{name: "fence-grows", need: fenced, says: saysFence, check: fenceGrows,
		why: "Every new hold of a key has a larger fence, whichever client takes it. A fence is never zero."},
	{name: "fence-after-expiry", need: fenced, says: saysFence, check: fenceAfterExpiry,
		why: "A fence is larger than the fence of a hold that expired."},
	{name: "fence-outlives-drivers", need: fenced, says: saysFence, check: fenceOutlivesDrivers,
		why: "Fences still grow after all drivers that asked for one are closed."},
	{name: "fence-when-asked", says: saysFence, check: fenceWhenAsked,
		why: "A fence is zero unless the claim asked for it."},
	{name: "fence-unsupported", need: unfenced, says: saysUnfenced, check: fenceUnsupported,
		why: "If a claim asks for a fence, a driver that is not Fenced returns errors.ErrUnsupported and takes nothing."},
}

// fences checks that each fence of a key is larger than the one before.
type fences struct {
	e    *env
	key  string
	last uint64
}

func (e *env) fences() *fences { return &fences{e: e, key: e.key()} }

// claim returns a claim that asks for a fence.
func (f *fences) claim(ttl time.Duration) backend.Claim { return fencedClaim(f.e.claimOf(f.key, ttl)) }

// add ends the try unless the fence of g is larger than the one before.
func (f *fences) add(how string, g backend.Grant) {
	require(g.Fence != 0, "%s: no fence", how)
	require(g.Fence > f.last, "%s: fence %d after %d", how, g.Fence, f.last)
	f.last = g.Fence
}

// take acquires the key, which is free, with a fence.
func (f *fences) take(how string, d *driver) backend.Claim {
	c := f.claim(f.e.long)
	f.add(how, d.take(c))
	return c
}

// seize acquires the key with a fence when its hold has ended.
func (f *fences) seize(how string, d *driver, ttl time.Duration) {
	_, g, err := d.seize(func() backend.Claim { return f.claim(ttl) })
	mustf(err, "%s", how)
	f.add(how, g)
}

func fenceGrows(e *env) {
	drivers := []*driver{e.open(), e.open()}
	f := e.fences()
	for i := range 12 {
		d := drivers[i/2%2]
		c := f.take("after a release", d)
		g := d.keep(c)
		require(g.Fence == 0 || g.Fence == f.last, "a renewal returns fence %d of a hold with fence %d", g.Fence, f.last)

		must(d.refused(f.key))
		d.give(c)
		must(drivers[i%2].granted(f.key)) // unfenced, in between
	}
}

func fenceAfterExpiry(e *env) {
	drivers := []*driver{e.open(), e.open()}
	f := e.fences()
	f.add("first", drivers[0].take(f.claim(e.term)))

	for i := range 2 {
		f.seize("after the end of a term", drivers[(i+1)%2], e.term)
	}
}

func fenceOutlivesDrivers(e *env) {
	f := e.fences()
	for range 3 {
		d := e.open()
		d.give(f.take("by a new driver", d))
		d.Close()
	}
}

func fenceWhenAsked(e *env) {
	a, key := e.open(), e.key()
	if e.traits.Fenced {
		f := fencedClaim(e.claimOf(key, e.long))
		a.take(f)
		a.give(f)
	}
	c := e.claimOf(key, e.long)
	g := a.take(c)
	require(g.Fence == 0, "fence %d for a claim that did not ask for one", g.Fence)
	a.give(c)
}

func fenceUnsupported(e *env) {
	a, key := e.open(), e.key()
	g, err := a.acquire(fencedClaim(e.claimOf(key, e.long)))
	require(err != nil || g.Fence == 0, "fence %d from a driver that is not Fenced by its Traits", g.Fence)
	must(is("acquire with a fence from a driver that is not Fenced", err, errors.ErrUnsupported))
	if e.waiter {
		w := a.want(fencedClaim(e.claimOf(key, e.long)))
		must(is("wait with a fence for a driver that is not Fenced", e.arrives("Wait", w.done), errors.ErrUnsupported))
	}
	must(a.granted(key))
}
