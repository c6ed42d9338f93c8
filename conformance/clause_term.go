package conformance

import (
	"fmt"
	"time"

	"github.com/hasplock/hasp/backend"
)

var termClauses = []clause{
	{name: "expiry-frees", says: saysFree, check: expiryFrees,
		why: "A hold that is not renewed ends with its term, and others get the key."},
	{name: "expiry-not-early", says: saysLasts, check: expiryNotEarly,
		why: "A hold lasts for the whole term that was asked for."},
	{name: "expiry-own-term", says: saysLasts, check: pair(expiryOwnTerm),
		why: "Each hold has the term that its own claim asked for."},
	{name: "expiry-rounded", says: saysRounds, check: pair(expiryRounded),
		why: "A term that the store does not count exactly is rounded up, to Traits.MinTTL and Traits.TTLUnit and no further."},
	{name: "deadline-in-time", says: saysUntil, check: deadlineInTime,
		why: "Grant.Until, or call start + TTL − drift, has passed before another token is granted the key."},
	{name: "deadline-after-renewal", says: saysUntil, check: deadlineAfterRenewal,
		why: "Grant.Until of a renewal has passed before another token is granted the key."},
	{name: "expiry-long-term", need: advance, alone: true, optional: yes, says: saysLasts, check: pair(expiryLongTerm),
		why: "A term of a day lasts a day by the store's clock, and no longer."},
}

// succession is an expired hold and the next one.
type succession struct {
	called time.Time // before the call that began or renewed the hold
	until  time.Time // what its holder may rely on
	seized time.Time // after the call that was granted the key next
}

// succession lets a hold expire, which is renewed once if renewed. Then another
// driver gets the key.
func (e *env) succession(renewed bool) (s succession) {
	a, b := e.open(), e.open()
	c := e.claim(e.term)
	s.called = time.Now()
	g := a.take(c)
	if renewed {
		e.sleep(e.term / 4)
		at := time.Now()

		// On a slow machine the hold may be lost by now. Then the first
		// term counts.
		if again, err := a.renew(c); err == nil {
			s.called, g = at, again
		}
	}

	s.until = until(g, c, s.called)
	s.seizedBy(b, c.Key)
	return s
}

// seizedBy lets d get key when the hold has ended.
func (s *succession) seizedBy(d *driver, key string) {
	d.succeed(key, d.e.long)
	s.seized = time.Now()
}

// inTime returns an error if the deadline had not passed before the next grant.
func (s succession) inTime() error {
	if s.until.After(s.seized) {
		return fmt.Errorf("the deadline of a hold is %v after the next token was granted the key", s.until.Sub(s.seized))
	}
	return nil
}

func expiryFrees(e *env) { e.succession(false) }

func expiryNotEarly(e *env) {
	s := e.succession(false)
	early := s.called.Add(e.term - backend.Drift(e.term)).Sub(s.seized)
	require(early <= 0, "another token was granted the key %v before the end of a term of %v", early, e.term)
}

func expiryOwnTerm(e *env, a, b *driver) {
	long, short := a.hold(e.long), a.hold(e.term)
	b.succeed(short.Key, e.long)
	a.outlast(e.term)
	mustf(b.refused(long.Key), "a hold of %v, after two terms of %v", e.long, e.term)
	a.give(long)
}

func expiryRounded(e *env, a, b *driver) {
	for _, ttl := range []time.Duration{max(backend.MinTTL, e.term/3), e.term + e.term/3 + time.Microsecond} {
		c, whole := e.claim(ttl), e.granted(ttl)
		called := time.Now()
		s := succession{until: until(a.take(c), c, called)}
		s.seizedBy(b, c.Key)
		must(s.inTime())
		early := called.Add(whole - backend.Drift(whole)).Sub(s.seized)
		require(early <= 0, "another token was granted the key %v before the end of a term of %v, asked for as %v", early, whole, ttl)

		c = a.hold(ttl)
		a.outlast(whole)
		mustf(b.grantedAtLast(c.Key), "after a term of %v, asked for as %v", whole, ttl)
	}
}

func deadlineInTime(e *env) { must(e.succession(false).inTime()) }

func deadlineAfterRenewal(e *env) { must(e.succession(true).inTime()) }

func expiryLongTerm(e *env, a, b *driver) {
	const day = 24 * time.Hour
	c := a.hold(day)

	hooked(e.h.Advance(e.ctx, e.store, day-time.Hour))
	mustf(b.refused(c.Key), "an hour before the end of a day")
	hooked(e.h.Advance(e.ctx, e.store, 2*time.Hour))
	mustf(b.grantedAtLast(c.Key), "an hour after the end of a day")
	must(is("release of a hold that has expired", a.release(c), backend.ErrLost))
}
