package conformance

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
)

var waitClauses = []clause{
	{
		name:  "wait-free",
		why:   "Wait for a key that nobody holds returns with it.",
		says:  saysWait,
		need:  waiter,
		check: waitFree,
	},
	{
		name:  "wait-woken",
		why:   "No release falls between Wait's attempt and its signal: a waiter gets a key that is released at any moment.",
		says:  saysSignal,
		need:  waiter,
		check: waitWoken,
	},
	{
		name:  "wait-dead-holder",
		why:   "A waiter takes over from a holder that died, when the term has run out and not before.",
		says:  saysWaitGets,
		need:  waiter,
		check: waitDeadHolder,
	},
	{
		name:  "wait-dead-successor",
		why:   "A waiter takes over also from one that got the key by waiting and died.",
		says:  saysWaitGets,
		need:  waiter,
		check: waitDeadSuccessor,
	},
	{
		name:  "wait-deadline",
		why:   "The deadline of a grant that came of waiting is that of the hold: after the release that made way for it, and before anybody else gets the key.",
		says:  saysUntil,
		need:  waiter,
		check: waitDeadline,
	},
	{
		name:  "wait-cancelled",
		why:   "A Wait that its context ends returns ErrHeld. Once the token has been released as after an unknown outcome, no hold and no place in a queue is left.",
		says:  saysWaitHeld,
		need:  waiter,
		check: waitCancelled,
	},
	{
		name:  "wait-dead-context",
		why:   "A Wait whose context has ended before returns and leaves nothing.",
		says:  saysWaitCtx,
		need:  waiter,
		check: waitDeadContext,
	},
	{
		name:  "wait-cancel-race",
		why:   "A Wait that is cancelled while the key is released either gets the key or leaves nothing. If its error matches its context's, the engine cleans up.",
		says:  saysWaitLeaves,
		need:  waiter,
		check: waitCancelRace,
	},
	{
		name:  "wait-everyone",
		why:   "Many waiters on several drivers all get the key, one at a time.",
		says:  saysOneHolder,
		need:  waiter,
		check: waitEveryone,
	},
	{
		name:  "wait-independent",
		why:   "Who waits for one key is in nobody's way who wants another, and the end of one Wait does not end another for the same key.",
		says:  saysIndependent,
		need:  waiter,
		check: waitIndependent,
	},
	{
		name:  "wait-fence",
		why:   "A hold that came of waiting has a larger fence than the one before.",
		says:  saysFence,
		need:  all(waiter, fenced),
		check: waitFence,
	},
}

func waitFree(e *env) error {
	a, b := e.open(), e.open()
	w := a.want(e.claim(e.h.Long))
	if err := e.arrives("Wait for a free key", w.done); err != nil {
		return err
	}
	if err := b.refused(w.c.Key); err != nil {
		return fmt.Errorf("after another's Wait: %w", err)
	}
	a.keep(w.c)
	a.give(w.c)
	return b.granted(w.c.Key)
}

func waitWoken(e *env) error {
	a, b := e.open(), e.open()
	key := e.key()
	for round := range 60 {
		c := e.claimOf(key, e.h.Long)
		a.take(c)
		w := b.want(e.claimOf(key, e.h.Long))
		e.sleep(moment(round))
		a.give(c)
		if err := e.arrives("Wait for a key that was released", w.done); err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
		b.keep(w.c)
		b.give(w.c)
	}
	return nil
}

// moment is a random one within the first steps of a call, whether these take
// microseconds or milliseconds.
func moment(round int) time.Duration { return rand.N(50 * time.Microsecond << (round % 8)) }

func waitDeadHolder(e *env) error {
	a, b := e.open(), e.open()
	c := e.claim(e.term)
	called := time.Now()
	a.take(c)
	w := b.want(e.claimOf(c.Key, e.h.Long))
	if err := e.arrives("Wait for a key whose holder died", w.done); err != nil {
		return err
	}
	if end, now := called.Add(e.term-backend.Drift(e.term)), time.Now(); now.Before(end) {
		return fmt.Errorf("a waiter got the key %v before the end of its holder's term", end.Sub(now))
	}
	if err := is("release by the holder that ran out", a.release(c), backend.ErrLost); err != nil {
		return err
	}
	b.keep(w.c)
	return b.release(w.c)
}

func waitDeadSuccessor(e *env) error {
	a, b := e.open(), e.open()
	c := e.claim(e.h.Long)
	a.take(c)
	w := b.want(e.claimOf(c.Key, e.term))
	e.sleep(e.term / 8)
	a.give(c)
	if err := e.arrives("Wait", w.done); err != nil {
		return slow("%w", err) // it may have run out before it was confirmed
	}
	w = a.want(e.claimOf(c.Key, e.h.Long))
	if err := e.arrives("Wait for a key whose holder got it by waiting and died", w.done); err != nil {
		return err
	}
	a.keep(w.c)
	return a.release(w.c)
}

func waitDeadline(e *env) error {
	a, b := e.open(), e.open()
	c := e.claim(e.h.Long)
	a.take(c)
	called := time.Now()
	w := b.want(e.claimOf(c.Key, e.term))
	a.outlast(e.term)
	released := time.Now()
	a.give(c)
	if err := e.arrives("Wait", w.done); err != nil {
		return slow("%w", err)
	}
	s := succession{until: until(w.grant, w.c, called)}
	if !s.until.After(released) {
		return slow("the deadline of a grant is %v before the release that made way for it", released.Sub(s.until))
	}
	var err error
	if _, s.seized, err = a.seize(c.Key, e.h.Long); err != nil {
		return err
	}
	return s.inTime()
}

func waitCancelled(e *env) error {
	a, b := e.open(), e.open()
	for range 3 {
		c := e.claim(e.h.Long)
		a.take(c)
		w := b.want(e.claimOf(c.Key, e.h.Long))
		e.sleep(e.term / 4)
		w.stop()
		err := e.arrives("a cancelled Wait", w.done)
		b.abandon(w.c, err)
		switch {
		case errors.Is(err, backend.ErrHeld):
		case errors.Is(err, context.Canceled):
			return slow("a cancelled Wait had no answer of the store in %v, or did not tell: %w", e.term/4, err)
		default:
			return is("a cancelled Wait for a held key", err, backend.ErrHeld)
		}
		if e.traits.Ordered && e.inspector {
			err := e.poll("the end of a cancelled waiter's place", func() (bool, error) { return len(a.inspect(c.Key).Waiters) == 0, nil })
			if err != nil {
				return err
			}
		}
		if err := a.release(c); err != nil {
			return err
		}
		if err := a.grantedAtLast(c.Key); err != nil {
			return fmt.Errorf("after a cancelled Wait and the release: %w", err)
		}
	}
	return nil
}

func waitDeadContext(e *env) error {
	a, b := e.open(), e.open()
	ctx, cancel := context.WithCancel(e.ctx)
	cancel()
	free, held := e.claim(e.h.Long), e.claim(e.h.Long)
	holder := e.claimOf(held.Key, e.h.Long)
	a.take(holder)
	for _, c := range []backend.Claim{free, held} {
		err := e.within("Wait with a context that has ended", func() error {
			switch _, err := b.wait(ctx, c); {
			case err == nil && c.Key == held.Key:
				return errors.New("wait for a held key: granted")
			case err == nil:
				return b.release(c)
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	if err := a.release(holder); err != nil {
		return err
	}
	for _, c := range []backend.Claim{free, held} {
		if err := a.grantedAtLast(c.Key); err != nil {
			return fmt.Errorf("after a Wait with a context that had ended: %w", err)
		}
	}
	return nil
}

func waitCancelRace(e *env) error {
	a, b := e.open(), e.open()
	for round := range 60 {
		c := e.claim(e.h.Long)
		a.take(c)
		w := b.want(e.claimOf(c.Key, e.h.Long))
		e.sleep(moment(round / 8))
		if round%2 == 0 {
			a.give(c)
			e.sleep(moment(round / 2))
			w.stop()
		} else {
			time.AfterFunc(moment(round/2), w.stop)
			a.give(c)
		}
		err := e.arrives("a Wait cancelled at the release", w.done)
		b.abandon(w.c, err)
		if err == nil {
			if _, err := b.renew(w.c); err != nil {
				return fmt.Errorf("a Wait cancelled at the release was granted, but: %w", err)
			}
			b.give(w.c)
		} else if w.grant != (backend.Grant{}) {
			return fmt.Errorf("a Wait that says %q returned a grant", err)
		}
		if err := a.grantedAtLast(c.Key); err != nil {
			return fmt.Errorf("round %d: after a Wait cancelled at the release: %w", round, err)
		}
	}
	return nil
}

func waitEveryone(e *env) error {
	drivers := []*driver{e.open(), e.open(), e.open()}
	key := e.key()
	var inside atomic.Int32
	return e.each(12, func(i int) error {
		d := drivers[i%len(drivers)]
		w := d.want(e.claimOf(key, e.h.Long))
		if err := e.arrives("one of many waiters", w.done); err != nil {
			return err
		}
		if n := inside.Add(1); n != 1 {
			return fmt.Errorf("%d waiters have one key", n)
		}
		d.keep(w.c)
		inside.Add(-1)
		return d.release(w.c)
	})
}

func waitIndependent(e *env) error {
	a, b := e.open(), e.open()
	blocked, soon := e.claim(e.h.Long), e.claim(e.h.Long)
	a.take(blocked)
	a.take(soon)
	left, stopped := b.want(e.claimOf(blocked.Key, e.h.Long)), b.want(e.claimOf(blocked.Key, e.h.Long))
	e.sleep(e.term / 8)
	next := b.want(e.claimOf(soon.Key, e.h.Long))
	e.sleep(e.term / 8)
	err := e.within("Acquire of one key while others wait for another", func() error { return b.granted(e.key()) })
	if err != nil {
		return err
	}
	a.give(soon)
	if err := e.arrives("Wait for one key while others wait for another", next.done); err != nil {
		return err
	}
	stopped.stop()
	if err := e.arrives("a cancelled Wait", stopped.done); err == nil {
		return errors.New("wait for a held key: granted")
	}
	a.give(blocked)
	if err := e.arrives("Wait after the end of another for the same key", left.done); err != nil {
		return err
	}
	b.keep(left.c)
	return b.release(left.c)
}

func waitFence(e *env) error {
	a, b := e.open(), e.open()
	f := fences{key: e.key()}
	for range 3 {
		c := fencedClaim(e.claimOf(f.key, e.h.Long))
		if err := f.add("by Acquire", a.take(c)); err != nil {
			return err
		}
		w := b.want(fencedClaim(e.claimOf(f.key, e.h.Long)))
		e.sleep(e.term / 8)
		a.give(c)
		if err := e.arrives("Wait", w.done); err != nil {
			return err
		}
		if err := f.add("by Wait", w.grant); err != nil {
			return err
		}
		b.give(w.c)
	}
	return nil
}
