package conformance

import (
	"fmt"
	"time"

	"github.com/hasplock/hasp/backend"
)

var termClauses = []clause{
	{
		name:  "expiry-frees",
		why:   "A hold that is not renewed ends with its term, and others get the key.",
		says:  saysFree,
		check: expiryFrees,
	},
	{
		name:  "expiry-not-early",
		why:   "A hold lasts for the whole term that was asked for.",
		says:  saysLasts,
		check: expiryNotEarly,
	},
	{
		name:  "expiry-own-term",
		why:   "Each hold has the term that its own claim asked for.",
		says:  saysLasts,
		check: expiryOwnTerm,
	},
	{
		name:  "deadline-in-time",
		why:   "Grant.Until, or call start + TTL − drift, has passed before another token is granted the key.",
		says:  saysUntil,
		check: deadlineInTime,
	},
	{
		name:  "deadline-after-renewal",
		why:   "Grant.Until of a renewal has passed before another token is granted the key.",
		says:  saysUntil,
		check: deadlineAfterRenewal,
	},
	{
		name:     "expiry-long-term",
		why:      "A term of a day lasts a day by the store's clock, and no longer.",
		says:     saysLasts,
		need:     advance,
		alone:    true,
		optional: yes,
		check:    expiryLongTerm,
	},
}

// succession is an expired hold and the next one.
type succession struct {
	called time.Time // before the call that began or renewed the hold
	until  time.Time // what its holder was told
	seized time.Time // after the call that was granted the key next
}

// succeed lets a hold a key for a short term, and renew it once if renewed. Then b
// gets the key.
func (e *env) succeed(renewed bool) (s succession, err error) {
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
	_, s.seized, err = b.seize(c.Key, e.h.Long)
	return s, err
}

func expiryFrees(e *env) error {
	_, err := e.succeed(false)
	return err
}

func expiryNotEarly(e *env) error {
	s, err := e.succeed(false)
	must(err)
	if end := s.called.Add(e.term - backend.Drift(e.term)); s.seized.Before(end) {
		return fmt.Errorf("another was granted the key %v before the end of a term of %v", end.Sub(s.seized), e.term)
	}
	return nil
}

func expiryOwnTerm(e *env) error {
	a, b := e.open(), e.open()
	long, short := e.claim(e.h.Long), e.claim(e.term)
	a.take(long)
	a.take(short)
	if _, _, err := b.seize(short.Key, e.h.Long); err != nil {
		return err
	}
	a.outlast(e.term)
	mustf(b.refused(long.Key), "after two terms of %v a hold of %v", e.term, e.h.Long)
	a.give(long)
	return nil
}

func (s succession) inTime() error {
	if s.until.After(s.seized) {
		return fmt.Errorf("its holder may trust it until %v after another was granted the key", s.until.Sub(s.seized))
	}
	return nil
}

func deadlineInTime(e *env) error {
	s, err := e.succeed(false)
	must(err)
	return s.inTime()
}

func deadlineAfterRenewal(e *env) error {
	s, err := e.succeed(true)
	must(err)
	return s.inTime()
}

func expiryLongTerm(e *env) error {
	a, b := e.open(), e.open()
	const day = 24 * time.Hour
	c := a.hold(day)
	hooked(e.h.Advance(e.ctx, e.store, day-time.Hour))
	mustf(b.refused(c.Key), "an hour before the end of a day")
	hooked(e.h.Advance(e.ctx, e.store, 2*time.Hour))
	mustf(b.grantedAtLast(c.Key), "an hour after the end of a day")
	must(is("release of a hold that has run out", a.release(c), backend.ErrLost))
	return nil
}
