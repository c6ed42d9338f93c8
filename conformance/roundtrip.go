package conformance

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hasplock/hasp/backend"
)

// A call may take several round trips, and the first may only read. So the
// clauses of this file disturb each round trip of a call in turn.

// maxReplies is how many replies of one call are disturbed in turn. A new
// connection takes some of them.
const maxReplies = 32

// disturb puts l into state s after it has carried n replies to the next call. If
// n is negative, it does so before the store gets the call.
func (l *Link) disturb(n int, s LinkState) {
	switch {
	case n < 0, n == 0 && s == Deaf:
		l.Set(s)
	case l.SetAfter != nil:
		l.SetAfter(n, s)
	default:
		must(&skipError{"Link.SetAfter is nil, and a call may take several round trips"})
	}
}

// lostReply is a call whose reply is lost after the store has carried it out.
type lostReply struct {
	what   string
	begin  func() (c backend.Claim, call func() error) // a new one for each try
	landed func(c backend.Claim) bool                  // the store has carried it out
	again  bool                                        // the call may be repeated
}

// loses disturbs the replies to a call in turn, until the store has carried out a
// call whose caller did not get the reply. It returns the claim of that call, and
// the error that the call returned once the link was up again.
func (e *env) loses(l *Link, d, b *driver, r lostReply) (backend.Claim, error) {
	for n := range maxReplies {
		c, call := r.begin()
		l.disturb(n, Deaf)
		done := make(chan error, 1)
		go func() { done <- e.try(call) }()
		landed := e.lands(done, func() bool { return r.landed(c) })
		ended := len(done) > 0

		// If the driver repeats the call, the repeat gets through now.
		l.Set(Up)
		err := e.arrives(r.what, done)
		switch {
		case err == nil && ended:
			must(slow("%s: it succeeded after %d replies; the store was never seen to carry it out while its reply was lost", r.what, n))
		case err == nil && (r.again || !landed):
			// The driver repeated a call that was not carried out, or one that it may
			// repeat.
		case err == nil:
			// The driver repeated the call, or the reply was not lost but late.
			must(slow("%s: no error, want one of unknown outcome", r.what))
		case errors.Is(err, backend.ErrHeld) && !landed && !e.inspector:
			must(slow("%s: %w", r.what, err)) // our own attempt was in its way
		default:
			must(unknown(r.what, err))
		}
		must(e.recovers(d))
		if landed {
			return c, err
		}
		must(e.undone(d, b, c))
	}
	must(slow("%s: after %d round trips the store has not carried it out", r.what, maxReplies))
	panic("unreachable")
}

// lands reports whether the store carries out a call within a term. The call's
// outcome comes through done.
func (e *env) lands(done <-chan error, landed func() bool) bool {
	e.sleep(e.term / 8) // landed may itself make an attempt, which would interfere with the call
	for began := time.Now(); time.Since(began) < e.term; e.sleep(e.term / 32) {
		if landed() {
			return true
		}
		if len(done) > 0 {
			return landed()
		}
	}
	return false
}

// holds reports whether any token holds key.
func (d *driver) holds(key string) bool {
	if d.e.inspector {
		return d.inspect(key).Held
	}
	c := d.e.claimOf(key, d.e.h.Long)
	_, err := d.acquire(c)
	if err == nil {
		d.give(c)
	}
	return errors.Is(err, backend.ErrHeld)
}

// linkSentOnce loses replies. A driver that repeats a call is refused because of
// its own first call.
func linkSentOnce(e *env) error {
	l := e.cable()
	d := e.openAt(l.Store)
	b := e.open()
	must(e.recovers(d)) // connections are made
	for _, r := range []lostReply{
		{
			what: "Acquire whose reply is lost",
			begin: func() (backend.Claim, func() error) {
				c := e.claim(e.h.Long)
				return c, func() error { _, err := d.acquire(c); return err }
			},
			landed: func(c backend.Claim) bool { return b.holds(c.Key) },
		},
		{
			what: "Release whose reply is lost",
			begin: func() (backend.Claim, func() error) {
				c := d.hold(e.h.Long)
				return c, func() error { return d.release(c) }
			},
			landed: func(c backend.Claim) bool { return !b.holds(c.Key) },
		},
	} {
		c, _ := e.loses(l, d, b, r)
		if err := d.release(c); err != nil && !errors.Is(err, backend.ErrLost) {
			return fmt.Errorf("%s: Release, afterwards: %w", r.what, err)
		}
		mustf(b.granted(c.Key), "%s: after Release", r.what)
	}
	return nil
}

// linkWaitReply does the same for a Wait, which may repeat a call with its token.
func linkWaitReply(e *env) error {
	l := e.cable()
	d := e.openAt(l.Store)
	b := e.open()
	must(e.recovers(d))
	c, err := e.loses(l, d, b, lostReply{
		what: "Wait whose reply is lost",
		begin: func() (backend.Claim, func() error) {
			w := d.want(e.claim(e.h.Long))
			return w.c, func() error { return e.arrives("Wait whose reply is lost", w.done) }
		},
		landed: func(c backend.Claim) bool { return b.holds(c.Key) },
		again:  true,
	})
	if err == nil {
		d.keep(c)
		d.give(c)
	}
	return e.undone(d, b, c)
}

// outlives disturbs the round trips of a call in turn. It holds each back until
// the holds of the call have ended and successors hold the keys for the given
// terms. check returns an error if the call has harmed the successors.
func (e *env) outlives(what string, terms []time.Duration, call func(d *driver, cs []backend.Claim) error,
	check func(b *driver, next []backend.Claim) error) error {
	l := e.cable()
	d := e.openAt(l.Store)
	b := e.open()
	for n := -1; n < maxReplies; n++ {
		must(e.recovers(d)) // connections are made
		cs, next := make([]backend.Claim, len(terms)), make([]backend.Claim, len(terms))
		for i := range cs {
			cs[i] = e.claim(e.h.Long)
			d.take(cs[i])
		}

		l.disturb(n, Hung)
		done := make(chan error, 1)
		go func() { done <- e.try(func() error { return call(d, cs) }) }()
		e.sleep(e.term / 8) // for round trips that are not held back
		for i, c := range cs {
			err := b.release(c)
			if err == nil || errors.Is(err, backend.ErrLost) {
				next[i], _, err = b.seize(c.Key, terms[i])
			}
			if err != nil {
				return err
			}
		}
		ended := len(done) > 0

		// The round trip that was held back is carried out now.
		l.Set(Up)
		err := e.arrives(what, done)
		if err == nil && n < 0 {
			return fmt.Errorf("%s: succeeded, although it reached the store when others had the key", what)
		}
		if err := check(b, next); err != nil {
			return fmt.Errorf("%s, carried out when another had the key: %w", what, err)
		}
		if err == nil && ended {
			return nil // none of its replies was held back
		}
	}
	return slow("%s: %d of its replies were carried, and it did not succeed", what, maxReplies)
}

func linkLateRelease(e *env) error {
	return e.outlives("a late Release", []time.Duration{e.h.Long},
		func(d *driver, cs []backend.Claim) error { return d.release(cs[0]) },
		func(b *driver, next []backend.Claim) error {
			if err := b.renews(next[0]); err != nil {
				return fmt.Errorf("renewal by the successor: %w", err)
			}
			return b.release(next[0])
		})
}

func linkLateRenew(e *env) error {
	return e.outlives("a late renewal", []time.Duration{e.h.Long, e.term},
		func(d *driver, cs []backend.Claim) error {
			ctx, cancel := context.WithTimeout(e.ctx, patience)
			defer cancel()
			return errors.Join(renewAll(ctx, d, cs).errs...)
		},
		func(b *driver, next []backend.Claim) error {
			if err := b.renews(next[0]); err != nil {
				return fmt.Errorf("renewal by the successor: %w", err)
			}
			if err := b.release(next[0]); err != nil {
				return fmt.Errorf("release by the successor: %w", err)
			}
			if err := b.grantedAtLast(next[1].Key); err != nil {
				return fmt.Errorf("the successor's term of %v: %w", e.term, err)
			}
			return nil
		})
}

// linkEnds disturbs each round trip in turn. It measures each several times and
// keeps the shortest time, because the machine may be slow.
func linkEnds(e *env) error {
	l := e.cable()
	d := e.openAt(l.Store)
	held := d.hold(e.h.Long)
	for what, call := range map[string]func(ctx context.Context) error{
		"Acquire": func(ctx context.Context) error {
			c := e.claim(e.h.Long)
			d.mine(c) // it may be in the store, whatever Acquire returns
			_, err := d.Acquire(ctx, c)
			return err
		},
		"Release": func(ctx context.Context) error { return d.Release(ctx, e.claimOf(held.Key, e.h.Long)) },
	} {
		for n := -1; ; n++ {
			if n == maxReplies {
				return slow("%s: %d of its replies were carried, and it did not succeed", what, n)
			}
			more, err := e.endsInTime(l, n, what+" of a store that hangs", call)
			must(err)
			if !more {
				break
			}
			must(e.recovers(d))
		}
	}
	return nil
}

// endsInTime lets the store hang after n replies of a call. It reports whether
// the call needs more replies than that.
func (e *env) endsInTime(l *Link, n int, what string, call func(ctx context.Context) error) (more bool, err error) {
	best := time.Duration(1<<63 - 1)
	for range 4 {
		l.Set(Up)
		end := time.Now().Add(e.term / 4)
		ctx, cancel := context.WithDeadline(e.ctx, end)
		if e.traits.Ends == backend.EndsPromptly {
			cancel()
			ctx, cancel = context.WithTimeout(e.ctx, e.h.Long)
			time.AfterFunc(e.term/4, cancel)
		}
		l.disturb(n, Hung)
		err := e.within(what, func() error { return call(ctx) })
		cancel()
		best = min(best, time.Since(end))
		if definite := unknown(what, err); definite != nil {
			l.Set(Up)
			if n < 0 {
				return false, definite
			}
			return false, nil // all its replies were carried
		}
	}
	l.Set(Up)
	if best > promptly {
		return false, slow("of several calls of %s the fastest ended %v after its context", what, best)
	}
	return true, nil
}
