package conformance

import (
	"errors"
	"fmt"
	"time"

	"github.com/hasplock/hasp/backend"
)

var termClauses = []clause{
	{name: "expiry", says: saysLasts, check: expiry,
		why: "A hold that is not renewed lasts for the whole term that its own claim asked for, " +
			"whatever others asked for. Then others get the key. Its deadline, also that of a " +
			"renewal, has passed before that."},
	{name: "expiry-rounded", says: saysRounds, check: pair(expiryRounded),
		why: "A term that the store does not count exactly is rounded up, to Traits.MinTTL and " +
			"Traits.TTLUnit and no further."},
}

// succession takes a key for a term and waits until another driver acquires the key. If renewed is
// true, succession renews the hold once. It returns the start of the last call that prolonged the
// hold, and the time of the next grant. It returns an error if that grant came before the hold's
// deadline.
func (e *env) succession(renewed bool) (called, next time.Time, err error) {
	a := e.open()
	b := e.open()
	c := e.claim(e.term)
	called = time.Now()
	g := a.take(c)
	if renewed {
		e.sleep(e.term / 4)
		renewCalled := time.Now()

		// On a slow machine the renewal may come too late. Then the hold ends with its first term.
		renewal, err := a.renew(c)
		if err == nil {
			called = renewCalled
			g = renewal
		}
	}

	next, err = b.succeedsAfter(deadlineOf(g, c, called), c.Key)
	return called, next, err
}

// succeedsAfter waits until d acquires key, and returns the time of the grant. It returns an error
// if that time is before the deadline of the previous hold.
func (d *driver) succeedsAfter(deadline time.Time, key string) (at time.Time, err error) {
	d.succeed(key, d.e.long)
	at = time.Now()
	if deadline.After(at) {
		err = fmt.Errorf("the deadline of a hold is %v after the next token was granted the key",
			deadline.Sub(at))
	}
	return at, err
}

// expiry checks a hold with a short term, and one that is renewed, while a long hold exists. The
// long hold must last.
func expiry(e *env) {
	a := e.open()
	long := a.hold(e.long)
	for _, renewed := range []bool{false, true} {
		// Report a term that is too short before err, which would be a consequence.
		called, next, err := e.succession(renewed)
		early := called.Add(e.term - backend.Drift(e.term)).Sub(next)
		require(early <= 0, "another token was granted the key %v before the end of a term of %v",
			early, e.term)
		must(err)
	}
	mustf(a.refused(long.Key), "a hold of %v, after a term of %v", e.long, e.term)
}

// expiryRounded asks for a term that may be below Traits.MinTTL, and for a term that no store
// counts exactly.
func expiryRounded(e *env, a, b *driver) {
	for _, ttl := range []time.Duration{
		max(backend.MinTTL, e.term/3), e.term + e.term/3 + time.Microsecond,
	} {
		// The term must not be shorter than the rounded one.
		c := e.claim(ttl)
		rounded := e.rounded(ttl)
		called := time.Now()
		next, err := b.succeedsAfter(deadlineOf(a.take(c), c, called), c.Key)
		must(err)
		early := called.Add(rounded - backend.Drift(rounded)).Sub(next)
		require(early <= 0, "another token was granted the key %v before the end of a term of %v, "+
			"asked for as %v", early, rounded, ttl)

		// The key must be free after the rounded term.
		c = a.hold(ttl)
		a.outlast(rounded)
		mustf(b.grantedAtLast(c.Key), "after a term of %v, asked for as %v", rounded, ttl)
	}
}

var fenceClauses = []clause{
	{name: "fence-grows", need: fenced, says: saysFence, check: fenceGrows,
		why: "Every new hold of a key has a larger fence, also after an expiry, KeepUntil or a " +
			"Wait, and when all drivers that asked for one are closed. A fence is never zero, unless the claim does not ask for it."},
	{name: "fence-unsupported", need: unfenced, says: saysUnfenced, check: fenceUnsupported,
		why: "If a claim asks for a fence, a driver that is not Fenced returns " +
			"errors.ErrUnsupported and takes nothing."},
}

// fences checks that each fence of a key is larger than the previous fence.
type fences struct {
	e    *env
	key  string
	last uint64
}

func (e *env) fences() *fences { return &fences{e: e, key: e.key()} }

// claim returns a claim of the key that asks for a fence.
func (f *fences) claim(ttl time.Duration) backend.Claim {
	return fencedClaim(f.e.claimOf(f.key, ttl))
}

// add ends the try unless the fence of g is larger than the previous fence.
func (f *fences) add(how string, g backend.Grant) {
	require(g.Fence != 0, "%s: no fence", how)
	require(g.Fence > f.last, "%s: fence %d after %d", how, g.Fence, f.last)
	f.last = g.Fence
}

// take acquires the key with a fence. The key must be free.
func (f *fences) take(how string, d *driver) backend.Claim {
	c := f.claim(f.e.long)
	f.add(how, d.take(c))
	return c
}

// seize waits until the present hold has ended, and acquires the key with a fence.
func (f *fences) seize(how string, d *driver, ttl time.Duration) backend.Claim {
	c, g, err := d.seize(func() backend.Claim { return f.claim(ttl) })
	mustf(err, "%s", how)
	f.add(how, g)
	return c
}

// fenceGrows takes one key again and again, after each way in which a hold can end. Each fence must
// be larger than the one before.
func fenceGrows(e *env) {
	drivers := []*driver{e.open(), e.open()}
	f := e.fences()

	// Each driver takes the key twice in a row. After each release, one of the drivers also takes
	// the key without a fence.
	for i := range 12 {
		d := drivers[i/2%2]
		c := f.take("after a release", d)
		g := d.keep(c)
		require(g.Fence == 0 || g.Fence == f.last,
			"a renewal returns fence %d of a hold with fence %d", g.Fence, f.last)

		must(d.refused(f.key))
		d.give(c)
		drivers[i%2].grantsNoFence(f.key)
	}

	// Some holds are not released, so that they end with their terms.
	a := drivers[0]
	b := drivers[1]
	f.add("first", a.take(f.claim(e.term)))
	for _, d := range []*driver{b, a} {
		f.seize("after the end of a term", d, e.term)
	}

	if e.traits.MinHold {
		c := f.seize("before KeepUntil", b, e.long)
		mustf(b.release(keptFor(c, e.term)), "release with KeepUntil")
	}

	c := f.seize("after KeepUntil or the end of a term", a, e.long)
	if e.waiter {
		w := b.want(f.claim(e.long))
		e.sleep(e.term / 8) // so that the Wait has asked for the key
		a.give(c)
		w.granted("Wait")
		f.add("by Wait", w.grant)
		b.give(w.c)
	} else {
		a.give(c)
	}

	// The fences must not depend on the drivers that asked for them, so close all of these.
	for range 2 {
		d := e.open()
		for _, before := range drivers {
			before.Close()
		}

		drivers = []*driver{d}
		d.give(f.take("by a new driver", d))
	}
}

// fenceUnsupported asks for a fence by Acquire and by Wait. The key must be free after that.
func fenceUnsupported(e *env) {
	a := e.open()
	key := e.key()
	g, err := a.acquire(fencedClaim(e.claimOf(key, e.long)))
	require(err != nil || g.Fence == 0,
		"fence %d from a driver that is not Fenced by its Traits", g.Fence)
	must(is("acquire with a fence from a driver that is not Fenced", err, errors.ErrUnsupported))
	if e.waiter {
		w := a.want(fencedClaim(e.claimOf(key, e.long)))
		must(is("wait with a fence for a driver that is not Fenced", e.arrives("Wait", w.done),
			errors.ErrUnsupported))
	}

	a.grantsNoFence(key)
}

// grantsNoFence takes the key, and ends the try if the grant has a fence that nobody has asked for.
func (d *driver) grantsNoFence(key string) {
	c := d.e.claimOf(key, d.e.long)
	g := d.take(c)
	require(g.Fence == 0, "fence %d for a claim that did not ask for one", g.Fence)
	d.give(c)
}
