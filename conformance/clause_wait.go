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
		why:   "Wait for a free key returns with it.",
		says:  saysWait,
		need:  waiter,
		check: waitFree,
	},
	{
		name:  "wait-woken",
		why:   "A waiter gets the key at whatever moment it is released: no release falls between Wait's signal and its attempt.",
		says:  saysSignal,
		need:  waiter,
		check: waitWoken,
	},
	{
		name:  "wait-dead-holder",
		why:   "If the holder has died, a waiter gets the key when the term has ended, and not before.",
		says:  saysWaitGets,
		need:  waiter,
		check: waitDeadHolder,
	},
	{
		name:  "wait-dead-successor",
		why:   "A waiter also gets the key after a holder that got it by waiting and died.",
		says:  saysWaitGets,
		need:  waiter,
		check: waitDeadSuccessor,
	},
	{
		name:  "wait-deadline",
		why:   "The deadline of a grant by Wait is after the release before it, and has passed before another token is granted the key.",
		says:  saysUntil,
		need:  waiter,
		check: waitDeadline,
	},
	{
		name:  "wait-cancelled",
		why:   "If its context ends, a Wait returns ErrHeld. After a release of its token, as after an unknown outcome, no hold and no place in a queue is left.",
		says:  saysWaitHeld,
		need:  waiter,
		check: waitCancelled,
	},
	{
		name:  "wait-dead-context",
		why:   "If its context has ended before, a Wait returns and leaves nothing.",
		says:  saysWaitCtx,
		need:  waiter,
		check: waitDeadContext,
	},
	{
		name:  "wait-cancel-race",
		why:   "If a Wait is cancelled while the key is released, it gets the key or leaves nothing. If its error matches its context's error, the engine cleans up.",
		says:  saysWaitLeaves,
		need:  waiter,
		check: waitCancelRace,
	},
	{
		name:  "wait-everyone",
		why:   "All waiters of several drivers get the key, one at a time.",
		says:  saysOneHolder,
		need:  waiter,
		check: waitEveryone,
	},
	{
		name:  "wait-independent",
		why:   "A Wait for one key does not delay callers that want another key. Its end does not end another Wait for the same key.",
		says:  saysIndependent,
		need:  waiter,
		check: waitIndependent,
	},
	{
		name:  "wait-fence",
		why:   "A hold by Wait has a larger fence than the hold before.",
		says:  saysFence,
		need:  all(waiter, fenced),
		check: waitFence,
	},
}

func waitFree(e *env) error {
	a, b := e.open(), e.open()
	w := a.want(e.claim(e.h.Long))
	must(e.arrives("Wait for a free key", w.done))
	mustf(b.refused(w.c.Key), "after another's Wait")
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
		mustf(e.arrives("Wait for a key that was released", w.done), "round %d", round)
		b.keep(w.c)
		b.give(w.c)
	}
	return nil
}

// moment returns a random time within the first steps of a call, whether these take
// microseconds or milliseconds.
func moment(round int) time.Duration { return rand.N(50 * time.Microsecond << (round % 8)) }

func waitDeadHolder(e *env) error {
	a, b := e.open(), e.open()
	c := e.claim(e.term)
	called := time.Now()
	a.take(c)
	w := b.want(e.claimOf(c.Key, e.h.Long))
	must(e.arrives("Wait for a key whose holder died", w.done))
	if end, now := called.Add(e.term-backend.Drift(e.term)), time.Now(); now.Before(end) {
		return fmt.Errorf("a waiter got the key %v before the end of its holder's term", end.Sub(now))
	}
	must(is("release by the holder that ran out", a.release(c), backend.ErrLost))
	b.keep(w.c)
	return b.release(w.c)
}

func waitDeadSuccessor(e *env) error {
	a, b := e.open(), e.open()
	c := a.hold(e.h.Long)
	w := b.want(e.claimOf(c.Key, e.term))
	e.sleep(e.term / 8)
	a.give(c)
	if err := e.arrives("Wait", w.done); err != nil {
		return slow("%w", err) // it may have run out before it was confirmed
	}
	w = a.want(e.claimOf(c.Key, e.h.Long))
	must(e.arrives("Wait for a key whose holder got it by waiting and died", w.done))
	a.keep(w.c)
	return a.release(w.c)
}

func waitDeadline(e *env) error {
	a, b := e.open(), e.open()
	c := a.hold(e.h.Long)
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
		c := a.hold(e.h.Long)
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
			must(err)
		}
		must(a.release(c))
		mustf(a.grantedAtLast(c.Key), "after a cancelled Wait and the release")
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
		must(err)
	}
	must(a.release(holder))
	for _, c := range []backend.Claim{free, held} {
		mustf(a.grantedAtLast(c.Key), "after a Wait with a context that had ended")
	}
	return nil
}

func waitCancelRace(e *env) error {
	a, b := e.open(), e.open()
	for round := range 60 {
		c := a.hold(e.h.Long)
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
		mustf(a.grantedAtLast(c.Key), "round %d: after a Wait cancelled at the release", round)
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
	must(err)
	a.give(soon)
	must(e.arrives("Wait for one key while others wait for another", next.done))
	stopped.stop()
	if err := e.arrives("a cancelled Wait", stopped.done); err == nil {
		return errors.New("wait for a held key: granted")
	}
	a.give(blocked)
	must(e.arrives("Wait after the end of another for the same key", left.done))
	b.keep(left.c)
	return b.release(left.c)
}

func waitFence(e *env) error {
	a, b := e.open(), e.open()
	f := fences{key: e.key()}
	for range 3 {
		c := fencedClaim(e.claimOf(f.key, e.h.Long))
		must(f.add("by Acquire", a.take(c)))
		w := b.want(fencedClaim(e.claimOf(f.key, e.h.Long)))
		e.sleep(e.term / 8)
		a.give(c)
		must(e.arrives("Wait", w.done))
		must(f.add("by Wait", w.grant))
		b.give(w.c)
	}
	return nil
}
