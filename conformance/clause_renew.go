package conformance

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
)

var renewClauses = []clause{
	{
		name:  "renew-holds",
		why:   "A hold that is renewed in time lasts for any number of terms.",
		says:  saysProlongs,
		check: renewHolds,
	},
	{
		name:  "renew-raises",
		why:   "After a renewal at least its TTL is left, even if it is longer than the term before.",
		says:  saysProlongs,
		check: renewRaises,
	},
	{
		name:  "renew-never-shortens",
		why:   "A renewal never shortens a term, in whatever order renewals arrive.",
		says:  saysNoShorter,
		check: renewNeverShortens,
	},
	{
		name:  "renew-never-revives",
		why:   "A renewal with a token that had lost its key returns ErrLost and does not take the key again, even if no caller has held it since.",
		says:  saysNoShorter,
		check: renewNeverRevives,
	},
	{
		name:  "renew-stale",
		why:   "A late renewal by a holder whose term has ended returns ErrLost, and neither ends nor prolongs the successor's hold.",
		says:  saysNoShorter,
		check: renewStale,
	},
	{
		name:  "renew-foreign",
		why:   "A renewal with a token that does not hold the key returns ErrLost and prolongs nothing.",
		says:  saysOutcomes,
		check: renewForeign,
	},
	{
		name:  "renew-many",
		why:   "Renew answers every claim of a batch once, each with its own outcome.",
		says:  saysOutcomes,
		check: renewMany,
	},
	{
		name:  "renew-answers",
		why:   "Renew calls done at most once for each claim, and never after it has returned, also when its context ends.",
		says:  saysDone,
		check: renewAnswers,
	},
}

func renewHolds(e *env) error {
	a, b := e.open(), e.open()
	c := e.claim(e.term)
	first := time.Now()
	last := first
	a.take(c)
	trusted := e.term - backend.Drift(e.term)
	for time.Since(first) < 4*e.term {
		at := time.Now()
		_, err := a.renew(c)
		if err != nil {
			if since := time.Since(last); !errors.Is(err, backend.ErrLost) || since < trusted {
				return fmt.Errorf("renewal %v after the one before, with a term of %v: %w", since, e.term, err)
			}
			return slow("no renewal for a term of %v", e.term)
		}
		last = at
		if err := b.refused(c.Key); err != nil {
			if since := time.Since(last); since < trusted {
				return fmt.Errorf("%v after a renewal for %v: %w", since, e.term, err)
			}
			return slow("no renewal for a term of %v", e.term)
		}
		e.sleep(e.term / 5)
	}
	return nil
}

func renewRaises(e *env) error {
	a, b := e.open(), e.open()
	c := a.hold(e.term)
	c.TTL = e.h.Long
	if _, err := a.renew(c); err != nil {
		return slow("renewal right after the grant: %w", err)
	}
	a.outlast(e.term)
	mustf(b.refused(c.Key), "a term of %v after a renewal for %v", e.term, e.h.Long)
	return a.release(c)
}

func renewNeverShortens(e *env) error {
	a, b := e.open(), e.open()
	one := a.hold(e.h.Long)
	short := one
	short.TTL = e.term
	a.keep(short)

	// The same when both renewals are under way at once.
	many := make([]backend.Claim, 8)
	for i := range many {
		many[i] = e.claim(e.h.Long)
		a.take(many[i])
	}
	err := e.each(2*len(many), func(i int) error {
		c := many[i/2]
		if i%2 == 0 {
			c.TTL = e.term
		}
		_, err := a.renew(c)
		return err
	})
	mustf(err, "two renewals of one hold at once")
	a.outlast(e.term)
	for _, c := range append(many, one) {
		mustf(b.refused(c.Key), "after a renewal for %v a hold of %v ended", e.term, e.h.Long)
		must(a.release(c))
	}
	return nil
}

func renewNeverRevives(e *env) error {
	a, b := e.open(), e.open()
	expired, released, never := e.claim(e.term), e.claim(e.h.Long), e.claim(e.h.Long)
	a.take(expired)
	a.take(released)
	a.give(released)
	a.outlast(e.term)
	expired.TTL = e.h.Long
	for what, c := range map[string]backend.Claim{"ran out": expired, "was released": released, "never was": never} {
		must(is("renewal of a hold that "+what, a.renews(c), backend.ErrLost))
		// After a loss a store may refuse the key to every caller for a while.
		mustf(b.grantedAtLast(c.Key), "after the renewal of a hold that %s", what)
	}
	return nil
}

func renewStale(e *env) error {
	a, b := e.open(), e.open()
	c, d := e.claim(e.term), e.claim(e.term)
	a.take(c)
	a.take(d)
	long, _, err := b.seize(c.Key, e.h.Long)
	must(err)
	short, _, err := b.seize(d.Key, e.term)
	must(err)
	c.TTL, d.TTL = e.h.Long, e.h.Long
	for _, c := range []backend.Claim{c, d} {
		must(is("renewal by the holder before", a.renews(c), backend.ErrLost))
	}
	mustf(b.release(long), "release by the successor after a late renewal by the holder before")
	mustf(a.grantedAtLast(short.Key), "the successor's term after a late renewal by the holder before")
	return nil
}

func renewForeign(e *env) error {
	a, b := e.open(), e.open()
	c := a.hold(e.term)
	for _, d := range []*driver{a, b} {
		must(is("renewal with a foreign token", d.renews(e.claimOf(c.Key, e.h.Long)), backend.ErrLost))
	}
	mustf(b.grantedAtLast(c.Key), "after a renewal with a foreign token")
	return nil
}

// answers counts the calls of done.
type answers struct {
	count []atomic.Int32
	errs  []error
	over  atomic.Bool
	late  atomic.Int32
	wrong atomic.Int32
}

// renewAll renews cs and counts the answers.
func renewAll(ctx context.Context, d *driver, cs []backend.Claim) *answers {
	a := &answers{count: make([]atomic.Int32, len(cs)), errs: make([]error, len(cs))}
	d.Renew(ctx, cs, func(i int, _ backend.Grant, err error) {
		switch {
		case a.over.Load():
			a.late.Add(1)
		case i < 0 || i >= len(cs):
			a.wrong.Add(1)
		case a.count[i].Add(1) == 1:
			a.errs[i] = err
		}
	})
	a.over.Store(true)
	return a
}

func (a *answers) check() error {
	if n := a.late.Load(); n > 0 {
		return fmt.Errorf("done was called %d times after Renew had returned", n)
	}
	if n := a.wrong.Load(); n > 0 {
		return fmt.Errorf("done was called %d times with an index out of range", n)
	}
	for i := range a.count {
		if n := a.count[i].Load(); n > 1 {
			return fmt.Errorf("done was called %d times for one claim", n)
		}
	}
	return nil
}

// renewMany mixes holds, free keys and keys of other tokens.
func renewMany(e *env) error {
	a, b := e.open(), e.open()
	cs := make([]backend.Claim, 60)
	for i := range cs {
		cs[i] = e.claim(e.term)
		switch {
		case i%4 == 1: // nobody's
		case i%4 == 2:
			b.take(e.claimOf(cs[i].Key, e.h.Long))
		default:
			// The hold must still exist when the batch is sent.
			cs[i].TTL = e.h.Long
			a.take(cs[i])
		}
	}
	var none []backend.Claim
	must(renewAll(e.ctx, a, none).check())
	ctx, cancel := context.WithTimeout(e.ctx, patience)
	defer cancel()
	got := renewAll(ctx, a, cs)
	a.outlast(e.term)
	must(got.check())
	for i := range cs {
		if got.count[i].Load() == 0 {
			return fmt.Errorf("claim %d of %d was not answered", i, len(cs))
		}
		if i%4 == 1 || i%4 == 2 {
			must(is(fmt.Sprintf("claim %d of %d, whose token holds nothing", i, len(cs)), got.errs[i], backend.ErrLost))
			continue
		}
		if got.errs[i] != nil {
			return fmt.Errorf("claim %d of %d, which is held: %w", i, len(cs), got.errs[i])
		}
	}
	return e.renewedInBatch(a, b)
}

// renewedInBatch checks that every hold of a batch is prolonged, not only
// answered.
func (e *env) renewedInBatch(a, b *driver) error {
	cs := make([]backend.Claim, 10)
	for i := range cs {
		cs[i] = e.claim(e.term)
		a.take(cs[i])
		cs[i].TTL = e.h.Long
	}
	ctx, cancel := context.WithTimeout(e.ctx, patience)
	defer cancel()
	got := renewAll(ctx, a, cs)
	a.outlast(e.term)
	for i, c := range cs {
		if errors.Is(got.errs[i], backend.ErrLost) {
			return slow("claim %d of %d was lost before its renewal", i, len(cs))
		}
		if err := b.refused(c.Key); err != nil {
			return fmt.Errorf("claim %d of %d was renewed for %v (answer: %v), and after %v: %w", i, len(cs), e.h.Long, got.errs[i], e.term, err)
		}
		a.give(c)
	}
	return nil
}

func renewAnswers(e *env) error {
	a := e.open()
	cs := make([]backend.Claim, 40)
	for i := range cs {
		cs[i] = e.claim(e.h.Long)
		a.take(cs[i])
	}
	var all []*answers
	for round := range 6 {
		ctx, cancel := context.WithCancel(e.ctx)
		switch round {
		case 0:
			cancel()
		default:
			time.AfterFunc(time.Duration(round)*100*time.Microsecond, cancel)
		}
		err := e.within("Renew whose context ends", func() error {
			all = append(all, renewAll(ctx, a, cs))
			return nil
		})
		cancel()
		must(err)
	}
	a.outlast(e.term) // for calls that come late
	for _, got := range all {
		must(got.check())
		for i, err := range got.errs {
			if errors.Is(err, backend.ErrLost) {
				return fmt.Errorf("claim %d, which is held, when the context of Renew ended: %w", i, err)
			}
		}
	}
	for _, c := range cs {
		a.give(c)
	}
	return nil
}
