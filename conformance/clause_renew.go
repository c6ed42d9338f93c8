package conformance

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/hasplock/hasp/backend"
)

var renewClauses = []clause{
	{name: "renew-holds", says: saysProlongs, check: pair(renewHolds),
		why: "A hold that is renewed in time lasts for any number of terms."},
	{name: "renew-raises", says: saysProlongs, check: func(e *env) { e.renewRaises(false) },
		why: "After a renewal at least its TTL is left, even if it is longer than the term before."},
	{name: "renew-never-shortens", says: saysNoShorter, check: pair(renewNeverShortens),
		why: "A renewal never shortens a term, in whatever order renewals arrive."},
	{name: "renew-never-revives", says: saysNoShorter, check: pair(renewNeverRevives),
		why: "A renewal with a token that had lost its key returns ErrLost and does not take the key again, even if no caller has held it since."},
	{name: "renew-stale", says: saysNoShorter, check: pair(renewStale),
		why: "A late renewal by a holder whose term has ended returns ErrLost, and neither ends nor prolongs the successor's hold."},
	{name: "renew-foreign", says: saysOutcomes, check: pair(renewForeign),
		why: "A renewal with a token that does not hold the key returns ErrLost and prolongs nothing."},
	{name: "renew-many", says: saysOutcomes, check: pair(renewMany),
		why: "Renew answers every claim of a batch once, each with its own outcome."},
	{name: "renew-answers", says: saysDone, check: renewAnswers,
		why: "Renew calls done at most once for each claim, and never after it has returned, also when its context ends."},
}

func renewHolds(e *env, a, b *driver) {
	c := e.claim(e.term)
	first := time.Now()
	last := first // when the newest renewal that succeeded began
	a.take(c)

	// inTerm reports whether the hold must still exist. On a slow machine its term
	// may end before the next renewal.
	inTerm := func() bool { return time.Since(last) < e.term-backend.Drift(e.term) }

	for time.Since(first) < 4*e.term {
		at := time.Now()
		if err := a.renews(c); err != nil {
			requireInTime(inTerm(), "no renewal for a term of %v", e.term)
			fail("renewal %v after the previous one, with a term of %v: %w", time.Since(last), e.term, err)
		}

		last = at
		if err := b.refused(c.Key); err != nil {
			requireInTime(inTerm(), "no renewal for a term of %v", e.term)
			fail("%v after a renewal for %v: %w", time.Since(last), e.term, err)
		}

		e.sleep(e.term / 5)
	}
}

// renewRaises renews a hold for longer, beside another one if they are shared.
func (e *env) renewRaises(shared bool) {
	a, b := e.open(), e.open()
	c := e.claim(e.term)
	c.Shared = shared
	a.take(c)
	others := b.beside(c)
	c.TTL = e.long
	mustInTime(a.renews(c), "renewal right after the grant")

	a.outlast(e.term)
	b.give(others...)
	mustf(b.refused(c.Key), "a term of %v after a renewal for %v", e.term, e.long)
	a.keep(c)
	a.give(c)
}

func renewNeverShortens(e *env, a, b *driver) {
	one := a.hold(e.long)
	short := one
	short.TTL = e.term
	a.keep(short)

	// The same when both renewals are under way at once.
	many := a.holdMany(8, e.long)
	err := e.each(2*len(many), func(i int) {
		c := many[i/2]
		if i%2 == 0 {
			c.TTL = e.term
		}
		must(a.renews(c))
	})
	mustf(err, "two renewals of one hold at once")

	a.outlast(e.term)
	for _, c := range append(many, one) {
		mustf(b.refused(c.Key), "after a renewal for %v a hold of %v ended", e.term, e.long)
		a.give(c)
	}
}

func renewNeverRevives(e *env, a, b *driver) {
	expired, released, never := a.hold(e.term), a.hold(e.long), e.claim(e.long)
	a.give(released)
	a.outlast(e.term)
	expired.TTL = e.long

	for what, c := range map[string]backend.Claim{"has expired": expired, "was released": released, "never was": never} {
		must(is("renewal of a hold that "+what, a.renews(c), backend.ErrLost))

		// After a loss a store may refuse the key to every caller for a while.
		mustf(b.grantedAtLast(c.Key), "after the renewal of a hold that %s", what)
	}
}

func renewStale(e *env, a, b *driver) {
	c, d := a.hold(e.term), a.hold(e.term)
	long, short := b.succeed(c.Key, e.long), b.succeed(d.Key, e.term)
	c.TTL, d.TTL = e.long, e.long
	for _, c := range []backend.Claim{c, d} {
		must(is("renewal by the previous holder", a.renews(c), backend.ErrLost))
	}

	mustf(b.release(long), "release by the successor after a late renewal by the previous holder")
	mustf(a.grantedAtLast(short.Key), "the successor's term after a late renewal by the previous holder")
}

func renewForeign(e *env, a, b *driver) {
	c := a.hold(e.term)
	for _, d := range []*driver{a, b} {
		must(is("renewal with a foreign token", d.renews(e.claimOf(c.Key, e.long)), backend.ErrLost))
	}
	mustf(b.grantedAtLast(c.Key), "after a renewal with a foreign token")
}

// answers are the answers to a Renew.
type answers struct {
	mu    sync.Mutex // guards all below, until Renew has returned
	errs  []error
	given []bool
	over  bool  // Renew has returned
	wrong error // how done was called
}

// renewAll renews cs and records the answers.
func renewAll(ctx context.Context, d *driver, cs []backend.Claim) *answers {
	a := &answers{errs: make([]error, len(cs)), given: make([]bool, len(cs))}
	noted := make([]backend.Claim, len(cs))
	for i, c := range cs {
		noted[i] = d.noted(c)
	}
	d.Renew(ctx, noted, func(i int, g backend.Grant, err error) {
		a.mu.Lock()
		defer a.mu.Unlock()
		switch {
		case a.over:
			a.wrong = errors.New("done was called after Renew had returned")
		case i < 0 || i >= len(cs):
			a.wrong = fmt.Errorf("done was called with index %d of %d", i, len(cs))
		case a.given[i]:
			a.wrong = errors.New("done was called twice for one claim")
		default:
			a.given[i], a.errs[i] = true, err
			if err == nil {
				d.note(cs[i], g)
			}
		}
	})

	a.mu.Lock()
	defer a.mu.Unlock()
	a.over = true
	return a
}

// check ends the try if done was called too late, too often, or for no claim.
func (a *answers) check() {
	a.mu.Lock()
	defer a.mu.Unlock()
	must(a.wrong)
}

// renewMany mixes holds, free keys and keys of other tokens.
func renewMany(e *env, a, b *driver) {
	cs := make([]backend.Claim, 60)
	holdsNothing := func(i int) bool { return i%4 == 1 || i%4 == 2 }

	for i := range cs {
		cs[i] = e.claim(e.term)
		switch {
		case i%4 == 2:
			b.take(e.claimOf(cs[i].Key, e.long))
		case !holdsNothing(i):
			// The hold must still exist when the batch is sent.
			cs[i].TTL = e.long
			a.take(cs[i])
		}
	}

	renewAll(e.ctx, a, nil).check() // an empty batch
	got := renewAll(e.endingAfter(e.patience), a, cs)
	a.outlast(e.term)
	got.check()

	for i := range cs {
		require(got.given[i], "claim %d of %d was not answered", i, len(cs))
		if holdsNothing(i) {
			must(is(fmt.Sprintf("claim %d of %d, whose token holds nothing", i, len(cs)), got.errs[i], backend.ErrLost))
		} else {
			mustf(got.errs[i], "claim %d of %d, which is held", i, len(cs))
		}
	}

	// Every hold of a batch is prolonged, not only answered.
	cs = a.holdMany(10, e.term)
	for i := range cs {
		cs[i].TTL = e.long
	}
	got = renewAll(e.endingAfter(e.patience), a, cs)
	a.outlast(e.term)
	for i, c := range cs {
		requireInTime(!errors.Is(got.errs[i], backend.ErrLost), "claim %d of %d was lost before its renewal", i, len(cs))
		mustf(b.refused(c.Key), "claim %d of %d was renewed for %v (answer: %v), and after %v", i, len(cs), e.long, got.errs[i], e.term)
		a.give(c)
	}
}

// renewAnswers ends the context of Renew before the call, or at several moments
// during it.
func renewAnswers(e *env) {
	a := e.open()
	cs := a.holdMany(40, e.long)
	var all []*answers

	for round := range 6 {
		ctx, cancel := context.WithCancel(e.ctx)
		if round == 0 {
			cancel()
		}
		time.AfterFunc(time.Duration(round)*100*time.Microsecond, cancel)
		must(e.within("Renew whose context ends", func() error {
			all = append(all, renewAll(ctx, a, cs))
			return nil
		}))
	}

	a.outlast(e.term) // for calls that come late
	for _, got := range all {
		got.check()
		for i, err := range got.errs {
			require(!errors.Is(err, backend.ErrLost), "claim %d, which is held, when the context of Renew ended: %w", i, err)
		}
	}

	a.give(cs...)
}
