package conformance

import (
	"errors"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

var keepClauses = append(given(keeps, []clause{
	{name: "keep-refuses", says: saysKeeps, check: pair(keepRefuses),
		why: "A Release with KeepUntil leaves the key taken until then, also for Inspect and " +
			"List. Then others get it."},
	{name: "keep-end", says: saysKeepEnds, check: pair(keepEnd),
		why: "KeepUntil ends a longer term sooner, and a shorter term later."},
	{name: "keep-loses", says: saysKeepLoses, check: pair(keepLoses),
		why: "After a Release with KeepUntil, a late Renew returns ErrLost and prolongs nothing, " +
			"and a repeated Release, with it or without, frees nothing early."},
	{name: "keep-past", says: saysKeepPast, check: pair(keepPast),
		why: "If KeepUntil has passed, Release frees the key immediately."},
	{name: "keep-wait", need: waiter, says: saysKeepWait, check: pair(keepWait),
		why: "A waiter gets a key at the end of KeepUntil, not before, and not only at the end of the term."},
	{name: "keep-break", need: inspector, says: saysKeepBreak, check: pair(keepBreak),
		why: "A Break frees a key that was released with KeepUntil."},
}),
	clause{name: "keep-unclaimed", need: unkept, says: saysKeepIgnored, check: pair(keepUnclaimed),
		why: "A driver without MinHold frees the key although KeepUntil is set, and WithMinHold " +
			"is errors.ErrUnsupported."})

// keptFor returns c with a KeepUntil of time.Now() + d.
func keptFor(c backend.Claim, d time.Duration) backend.Claim {
	c.KeepUntil = time.Now().Add(d)
	return c
}

// endsAt waits until d acquires key. If the grant is earlier than the argument end, the try ends.
func (d *driver) endsAt(key string, end time.Time) {
	c := d.succeed(key, d.e.long)
	d.e.notBefore(end, time.Now())
	d.give(c)
}

// notBefore ends the try if a key was granted too early. The argument at is the time of the grant.
// It may precede the argument end by the drift, because the store's clock may run at another speed.
func (e *env) notBefore(end, at time.Time) {
	early := end.Sub(at) - backend.Drift(3*e.term) // the longest time that callers of notBefore wait
	require(early <= 0, "the key was granted %v before the end of KeepUntil", early)
}

// keptHold takes a key for ttl and releases it at once, with a KeepUntil of time.Now() + rest.
func (d *driver) keptHold(ttl, rest time.Duration) backend.Claim {
	c := keptFor(d.hold(ttl), rest)
	verdict := mustf
	if ttl <= rest {
		verdict = mustInTime // on a slow machine the term may have ended before the release
	}
	verdict(d.release(c), "release with KeepUntil")
	return c
}

// keepRefuses releases a key with KeepUntil. Until then the key must be refused, and be held for
// Inspect and List. Then the key must be granted.
func keepRefuses(e *env, a, b *driver) {
	c := a.keptHold(3*e.term, 2*e.term)
	for _, d := range []*driver{a, b} {
		// On a slow machine the key may be free again before the attempt.
		requireInTime(time.Until(c.KeepUntil) > e.term/2,
			"%v until the end of KeepUntil", time.Until(c.KeepUntil))
		d.refusal(c.Key, 2*e.term)
	}

	for call, s := range a.statuses(c.Key) {
		requireInTime(s.Held, "%s %s, which was released with KeepUntil: %+v", call, brief(c.Key),
			s)
		require(s.Owner == "" || s.Owner == c.Owner,
			"%s %s: owner %q, want %q", call, brief(c.Key), s.Owner, c.Owner)
		require(s.TTL <= 2*e.term+time.Second,
			"%s %s: %v left, want %v at most", call, brief(c.Key), s.TTL, 2*e.term)
	}

	b.endsAt(c.Key, c.KeepUntil)
}

// keepEnd ends a longer term sooner, and a shorter term later.
func keepEnd(e *env, a, b *driver) {
	for _, ttl := range []time.Duration{e.long, e.term} {
		c := a.keptHold(ttl, 2*e.term)
		b.endsAt(c.Key, c.KeepUntil)
	}
}

// keepLoses renews and releases a hold again after its release with KeepUntil. Each call must
// return ErrLost, and the key must still be taken until KeepUntil.
func keepLoses(e *env, a, b *driver) {
	c := a.keptHold(e.long, 2*e.term)
	for _, d := range []*driver{a, b} {
		must(is("renewal after a release with KeepUntil", d.renews(c), backend.ErrLost))
		for _, keepUntil := range []time.Time{c.KeepUntil, {}} {
			again := c
			again.KeepUntil = keepUntil
			must(is("repeat of a release with KeepUntil", d.release(again), backend.ErrLost))
		}
	}

	b.endsAt(c.Key, c.KeepUntil)
}

func keepPast(e *env, a, b *driver) {
	for _, past := range []time.Duration{0, time.Millisecond, time.Hour} {
		c := a.hold(e.long)
		mustf(a.release(keptFor(c, -past)), "release with a KeepUntil that has passed")
		mustf(b.granted(c.Key), "after a release with a KeepUntil that has passed")
	}
}

// keepWait releases a key with KeepUntil while a caller waits. That caller must get the key at
// KeepUntil, not before.
func keepWait(e *env, a, b *driver) {
	// KeepUntil ends the first term sooner, and the second one later.
	for _, ttl := range []time.Duration{e.long, 2 * e.term} {
		c := a.hold(ttl)
		w := e.queue(c.Key, 1, a, b)[0]
		c = keptFor(c, 3*e.term)
		mustInTime(a.release(c), "release with KeepUntil") // the second term may have ended
		w.granted("Wait for a key that was released with KeepUntil")
		e.notBefore(c.KeepUntil, time.Now())
		w.use()
	}
}

func keepBreak(e *env, a, b *driver) {
	c := a.keptHold(e.long, e.long)
	a.refusal(c.Key, e.long)
	b.breakKey(c.Key)
	must(a.granted(c.Key))
}

func keepUnclaimed(e *env, a, b *driver) {
	c := keptFor(a.hold(e.long), e.long)
	mustf(a.release(c), "release with KeepUntil by a driver without MinHold")
	mustf(b.granted(c.Key), "after a release with KeepUntil by a driver without MinHold")

	_, err := e.newClient().TryLock(e.ctx, e.key(), hasp.WithMinHold(e.term))
	must(is("TryLock with a min hold over a driver without MinHold", err, errors.ErrUnsupported))
}
