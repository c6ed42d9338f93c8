package conformance

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
)

// firstClause runs alone, before all others.
const firstClause = "takes-and-releases"

var firstClauses = []clause{
	{
		name:  firstClause,
		why:   "Acquire takes a free key, and Release frees it again.",
		says:  saysGrants,
		check: takesAndReleases,
	},
}

var traitClauses = []clause{
	{
		name:  "traits-constant",
		why:   "Traits never change; Ordered drivers are Waiters.",
		says:  saysTraits,
		check: traitsConstant,
	},
}

var acquireClauses = []clause{
	{
		name:  "acquire-excludes",
		why:   "Acquire of a held key returns ErrHeld. After the release the key is granted.",
		says:  saysGrants,
		check: acquireExcludes,
	},
	{
		name:  "acquire-not-reentrant",
		why:   "Acquire never takes a key that is held, not even by a token of the same driver and owner.",
		says:  saysNever,
		check: acquireNotReentrant,
	},
	{
		name:  "acquire-one-winner",
		why:   "At most one of many simultaneous attempts is granted.",
		says:  saysOneHolder,
		check: acquireOneWinner,
	},
	{
		name:  "acquire-one-attempt",
		why:   "Acquire makes one attempt and does not wait for the key.",
		says:  saysAttempt,
		check: acquireOneAttempt,
	},
	{
		name:  "acquire-refused-changes-nothing",
		why:   "ErrHeld is definite: the holder, its term and its fence do not change.",
		says:  saysDefinite,
		check: acquireRefusedChangesNothing,
	},
	{
		name:  "acquire-held-details",
		why:   "A HeldError has the right owner and remaining term, or leaves them empty.",
		says:  saysRetryAfter,
		check: acquireHeldDetails,
	},
	{
		name:  "acquire-max-ttl",
		why:   "A term of Traits.MaxTTL is granted. A longer one is ErrInvalid.",
		says:  saysMaxTTL,
		need:  limited,
		check: acquireMaxTTL,
	},
	{
		name:  "acquire-dead-context",
		why:   "If its context has ended, Acquire of a free key does not return ErrHeld. A Release of its token removes all that it leaves.",
		says:  saysCtx,
		check: acquireDeadContext,
	},
}

func takesAndReleases(e *env) error {
	d := e.open()
	key := e.key()
	for range 2 {
		must(d.granted(key))
	}
	return nil
}

func acquireMaxTTL(e *env) error {
	d := e.open()
	c := e.claim(e.traits.MaxTTL + time.Millisecond)
	if _, err := d.acquire(c); !errors.Is(err, backend.ErrInvalid) {
		return is("acquire for longer than Traits.MaxTTL", err, backend.ErrInvalid)
	}
	c = e.claim(e.traits.MaxTTL)
	d.take(c)
	d.give(c)
	return nil
}

func traitsConstant(e *env) error {
	a, b := e.open(), e.open()
	first := a.Traits()
	a.give(func() backend.Claim { c := e.claim(e.h.Long); a.take(c); return c }())
	for _, t := range []backend.Traits{a.Traits(), b.Traits(), e.traits} {
		if t != first {
			return fmt.Errorf("traits %+v, before %+v", t, first)
		}
	}
	if _, ok := a.Driver.(backend.Waiter); first.Ordered && !ok {
		return errors.New("claims to be Ordered without being a Waiter")
	}
	if r := first.Reach; r != backend.Process && r != backend.Host && r != backend.Network {
		return fmt.Errorf("reach %v is none of process, host and network", r)
	}
	return nil
}

func acquireExcludes(e *env) error {
	a, b := e.open(), e.open()
	c := a.hold(e.h.Long)
	must(b.refused(c.Key))
	a.give(c)
	return b.granted(c.Key)
}

func acquireNotReentrant(e *env) error {
	a := e.open()
	c := a.hold(e.h.Long)
	again := e.claimOf(c.Key, e.h.Long)
	again.Owner = c.Owner
	if _, err := a.acquire(again); err == nil || !errors.Is(err, backend.ErrHeld) {
		return is("acquire again by the same driver and owner with another token", err, backend.ErrHeld)
	}
	a.give(c)
	return a.granted(c.Key)
}

func acquireOneWinner(e *env) error {
	drivers := []*driver{e.open(), e.open(), e.open()}
	key := e.key()
	for round := range 15 {
		var winners atomic.Int32
		cs := make([]backend.Claim, 4*len(drivers))
		won := make([]bool, len(cs))
		start := make(chan struct{})
		time.AfterFunc(time.Millisecond, func() { close(start) })
		err := e.each(len(cs), func(i int) error {
			cs[i] = e.claimOf(key, e.h.Long)
			<-start
			_, err := drivers[i%len(drivers)].acquire(cs[i])
			if err == nil {
				winners.Add(1)
				won[i] = true
			} else if !errors.Is(err, backend.ErrHeld) {
				return fmt.Errorf("one of many attempts: %q, want a grant or ErrHeld", err)
			}
			return nil
		})
		must(err)
		if n := winners.Load(); n > 1 {
			return fmt.Errorf("round %d: %d of %d attempts were granted one key", round, n, len(cs))
		}
		for i := range cs {
			if won[i] {
				drivers[i%len(drivers)].give(cs[i])
			}
		}
	}
	return nil
}

func acquireOneAttempt(e *env) error {
	a, b := e.open(), e.open()
	c := a.hold(e.h.Long)
	ctx, cancel := context.WithTimeout(e.ctx, e.h.Timeout)
	defer cancel()
	return e.within("Acquire of a held key", func() error {
		_, err := b.Acquire(ctx, e.claimOf(c.Key, e.h.Long))
		return is("acquire a held key", err, backend.ErrHeld)
	})
}

func acquireRefusedChangesNothing(e *env) error {
	a, b := e.open(), e.open()
	c, short := e.claim(e.h.Long), e.claim(e.term)
	c.Fenced = e.traits.Fenced
	a.take(short)
	g := a.take(c)
	for range 3 {
		must(b.refused(c.Key))
		must(a.refused(c.Key))
	}
	if e.inspector {
		s := b.inspect(c.Key)
		if !s.Held || s.Owner != "" && s.Owner != c.Owner || c.Fenced && s.Fence != 0 && s.Fence != g.Fence {
			return fmt.Errorf("after attempts that were refused the store says %+v of the hold of %s with fence %d", s, c.Owner, g.Fence)
		}
	}
	mustf(a.renews(c), "renewal by the holder after attempts that were refused")
	mustf(a.release(c), "release by the holder after attempts that were refused")
	// The refused attempts ask for long terms. They must not prolong the hold.
	if _, _, err := b.seize(short.Key, e.h.Long); err != nil {
		return fmt.Errorf("a hold of %v ends though others try for longer terms: %w", e.term, err)
	}
	return nil
}

func acquireHeldDetails(e *env) error {
	a, b := e.open(), e.open()
	c := a.hold(e.h.Long)
	_, err := b.acquire(e.claimOf(c.Key, e.h.Long))
	must(is("acquire a held key", err, backend.ErrHeld))
	var he *backend.HeldError
	if !errors.As(err, &he) {
		return nil
	}
	// A store may count terms in whole seconds.
	if he.RetryAfter < 0 || he.RetryAfter > c.TTL+time.Second {
		return fmt.Errorf("%v left of a term of %v", he.RetryAfter, c.TTL)
	}
	if he.Owner != "" && he.Owner != c.Owner {
		return fmt.Errorf("held by %q, want %q", he.Owner, c.Owner)
	}
	return nil
}

func acquireDeadContext(e *env) error {
	a, b := e.open(), e.open()
	ctx, cancel := context.WithCancel(e.ctx)
	cancel()
	for range 5 {
		c := e.claim(e.h.Long)
		err := e.within("Acquire with a context that has ended", func() error {
			_, err := a.Acquire(ctx, c)
			if errors.Is(err, backend.ErrHeld) || errors.Is(err, backend.ErrLost) || errors.Is(err, backend.ErrInvalid) {
				return fmt.Errorf("acquire a free key with a context that has ended: %q, want its end or a grant", err)
			}
			return nil
		})
		must(err)
		must(e.undone(a, b, c))
	}
	return nil
}

// undone does what the engine does after an attempt of unknown outcome: d releases
// the token, at once and again after the timeout, when every late command has
// arrived. undone returns an error unless other then gets the key.
func (e *env) undone(d, other *driver, c backend.Claim) error {
	var err error
	for n := range 2 {
		if n > 0 {
			e.sleep(e.h.Timeout)
		}
		if err := d.release(c); err != nil && !errors.Is(err, backend.ErrLost) {
			return fmt.Errorf("release of what may have been acquired: %w", err)
		}
		if err = other.granted(c.Key); err == nil || !errors.Is(err, backend.ErrHeld) {
			return err
		}
	}
	return fmt.Errorf("after a call of unknown outcome, Release, and Release again %v later: %w", e.h.Timeout, err)
}
