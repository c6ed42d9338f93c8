package conformance

import (
	"context"
	"errors"
	"time"

	"github.com/hasplock/hasp/backend"
)

// A call may take several round trips, and the first may only read. So the clauses of this file
// disturb the first round trip of a call, then the second of another call, and so on.

// maxReplies bounds how many replies of a call are disturbed, including those for a new connection.
const maxReplies = 32

// disturb puts l into state s when l has carried n replies to the next call. If n is negative, the
// state begins before the call, so that it also applies to the first request.
func (l *Link) disturb(n int, s LinkState) {
	switch {
	case n < 0, n == 0 && s == Deaf: // a Deaf link carries requests, so it may be Deaf at once
		l.Set(s)
	case l.SetAfter != nil:
		l.SetAfter(n, s)
	default:
		must(&skipError{"Link.SetAfter is nil, and a call may take several round trips"})
	}
}

// lostReply describes a call whose reply is dropped by the method loses.
type lostReply struct {
	what   string
	claim  func() backend.Claim // returns a new claim for each call
	call   func(c backend.Claim) error
	landed func(c backend.Claim) bool // reports whether the store has carried out the call
	again  bool                       // the driver may send the call again
}

// loses lets driver d make calls over link l. It drops the replies to the first call from its first
// reply on, the replies to the second call from its second reply on, and so on. It stops when the
// store has carried out a call whose reply was lost. It returns the claim of that call, and the
// error that the call returns once the link is up again. Driver b has a path of its own.
func (e *env) loses(l *Link, d, b *driver, r lostReply) (backend.Claim, error) {
	for n := range maxReplies {
		c := r.claim()
		l.disturb(n, Deaf)
		done := e.begin(func() error { return r.call(c) })
		carriedOut := e.lands(done, func() bool { return r.landed(c) })
		endedDeaf := len(done) > 0

		// If the driver repeats the call, the repeat arrives now.
		l.Set(Up)
		err := e.arrives(r.what, done)
		switch {
		case err == nil:
			// A call that succeeds while the link is Deaf needs only n replies. So every reply was
			// lost in turn, and none of these calls was seen to be carried out.
			requireInTime(!endedDeaf, "%s: it succeeded after %d replies; the store was never seen "+
				"to carry it out while its reply was lost", r.what, n)

			// The call may succeed if the driver may send it again. It may also succeed if the
			// store had not carried it out, because then only the reply of an earlier round trip
			// was lost. Otherwise the reply was late, which only a slow machine explains.
			requireInTime(r.again || !carriedOut, "%s: no error, want one of unknown outcome",
				r.what)
		case errors.Is(err, backend.ErrHeld) && !carriedOut && !e.inspector:
			// Without Inspect, r.landed makes attempts. One of these may have held the key when the
			// call arrived, but only on a slow machine.
			mustInTime(err, "%s", r.what)
		default:
			must(unknown(r.what, err))
		}

		e.recovers(d)
		if carriedOut {
			return c, err
		}

		e.undone(d, b, c, err)
	}

	requireInTime(false, "%s: after %d round trips the store has not carried it out", r.what,
		maxReplies)
	panic("unreachable")
}

// lands reports whether the store carries out a call within a term, as the function landed sees it.
// The channel done receives the error of the call. If the call ends sooner, lands stops asking.
func (e *env) lands(done <-chan error, landed func() bool) bool {
	// The function landed may make an attempt, which must not come before the call.
	e.sleep(e.term / 8)
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

// holds reports whether any token holds key. Without Inspect it makes an attempt to find out.
func (d *driver) holds(key string) bool {
	if d.e.inspector {
		return d.inspect(key).Held
	}
	c := d.e.claimOf(key, d.e.long)
	err := errOf(d.acquire(c))
	if err == nil {
		d.give(c)
	}
	return errors.Is(err, backend.ErrHeld)
}

// linkSentOnce loses the reply of a call. If the driver sent the call again, the store would refuse
// the repeat, and the driver would return a definite error.
func linkSentOnce(e *env) {
	l := e.cable()
	d := e.openAt(l.Store)
	b := e.open()
	e.recovers(d) // makes connections

	claim := func() backend.Claim { return e.claim(e.long) }
	hold := func() backend.Claim { return d.hold(e.long) }
	acquire := func(c backend.Claim) error { return errOf(d.acquire(c)) }
	held := func(c backend.Claim) bool { return b.holds(c.Key) }
	free := func(c backend.Claim) bool { return !b.holds(c.Key) }

	for _, r := range []lostReply{
		{what: "Acquire whose reply is lost", claim: claim, call: acquire, landed: held},
		{what: "Release whose reply is lost", claim: hold, call: d.release, landed: free},
	} {
		c, _ := e.loses(l, d, b, r)

		// A Release with the token must undo the call, even if Traits.Cleans is set. With an error
		// the method undone would leave that to the driver, so pass nil.
		e.undone(d, b, c, nil)
	}
}

// linkWaitReply loses the reply of a Wait. The Wait may then still get the key, because a driver
// may send a Wait again.
func linkWaitReply(e *env) {
	l := e.cable()
	d := e.openAt(l.Store)
	b := e.open()
	e.recovers(d)
	c, err := e.loses(l, d, b, lostReply{
		what:  "Wait whose reply is lost",
		claim: func() backend.Claim { return e.claim(e.long) },
		call: func(c backend.Claim) error {
			return e.arrives("Wait whose reply is lost", d.want(c).done)
		},
		landed: func(c backend.Claim) bool { return b.holds(c.Key) },
		again:  true,
	})

	if err == nil {
		d.keep(c)
		d.give(c)
	}

	e.undone(d, b, c, err)
}

// outlives holds back a round trip of a call, until the call's holds have ended and successors hold
// the keys for the given terms. It does that for each round trip in turn, with a new call and new
// holds each time. The function check ends the try if the late round trip has affected the
// successors.
func (e *env) outlives(what string, terms []time.Duration,
	call func(d *driver, cs []backend.Claim) error,
	check func(b *driver, next []backend.Claim)) {
	l := e.cable()
	d := e.openAt(l.Store)
	b := e.open()
	for n := -1; n < maxReplies; n++ { // if n is -1, the first request is held back
		e.recovers(d) // makes connections
		cs := d.holdMany(len(terms), e.long)
		next := make([]backend.Claim, len(terms))

		l.disturb(n, Hung)
		done := e.begin(func() error { return call(d, cs) })
		e.sleep(e.term / 8) // so that the other round trips end

		// The holds end now, and others get the keys.
		for i, c := range cs {
			b.giveIfHeld(c, "by another driver")
			next[i] = b.succeed(c.Key, terms[i])
		}
		endedHung := len(done) > 0

		// The round trip that was held back is carried out now.
		l.Set(Up)
		err := e.arrives(what, done)

		// If a reply was carried, the store may have carried the call out in time. So the call may
		// succeed then.
		require(err != nil || n >= 0,
			"%s: succeeded, although it reached the store when others had the key", what)
		mustf(e.try(func() { check(b, next) }), "%s, carried out when another had the key", what)
		if err == nil && endedHung {
			return // it needs only n replies, so each of its round trips was held back in turn
		}
	}
	requireInTime(false, "%s: %d of its replies were carried, and it did not succeed", what,
		maxReplies)
}

// linkLateAcquire holds back each round trip of an attempt in turn, until another driver has taken
// the key and has renewed its hold.
func linkLateAcquire(e *env) {
	l := e.cable()
	d := e.openAt(l.Store)
	b := e.open()
	for n := -1; n < maxReplies; n++ { // if n is -1, the first request is held back
		e.recovers(d) // makes connections
		c := e.claim(e.long)
		next := e.claimOf(c.Key, e.long)

		l.disturb(n, Hung)
		done := e.begin(func() error { return errOf(d.acquire(c)) })
		e.sleep(e.term / 8) // so that the other round trips end
		endedHung := len(done) > 0

		// If only the last reply is held back, the attempt already holds the key.
		_, nextErr := b.acquire(next)
		if nextErr == nil {
			b.keep(next)
		} else {
			must(is("acquire a key that an attempt may hold", nextErr, backend.ErrHeld))
		}

		l.Set(Up)
		err := e.arrives("an attempt that arrives late", done)
		if nextErr == nil {
			require(err != nil,
				"an attempt that was held back was granted a key that another holds")
			b.keep(next)
			b.give(next)
		}

		e.undone(d, b, c, err)
		if endedHung {
			return // it needs only n replies, so each of its round trips was held back in turn
		}
	}

	requireInTime(false, "an attempt: %d of its replies were carried, and it did not end",
		maxReplies)
}

// linkLateRelease holds back each round trip of a Release in turn, until a successor has the key.
func linkLateRelease(e *env) {
	e.outlives("a late Release", []time.Duration{e.long},
		func(d *driver, cs []backend.Claim) error { return d.release(cs[0]) },
		func(b *driver, next []backend.Claim) {
			mustf(b.renews(next[0]), "renewal by the successor")
			must(b.release(next[0]))
		})
}

// linkLateRenew does the same as linkLateRelease, with one Renew for two keys. The successor of the
// first key has a long term, which the late Renew must not end. The successor of the second key has
// a short term, which the late Renew must not prolong.
func linkLateRenew(e *env) {
	e.outlives("a late renewal", []time.Duration{e.long, e.term},
		func(d *driver, cs []backend.Claim) error {
			return errors.Join(renewAll(e.endingAfter(e.patience), d, cs).errs...)
		},
		func(b *driver, next []backend.Claim) {
			mustf(b.renews(next[0]), "renewal by the successor")
			mustf(b.release(next[0]), "release by the successor")
			mustf(b.grantedAtLast(next[1].Key), "the successor's term of %v", e.term)
		})
}

// linkEnds lets the store hang during each round trip of a call in turn, and ends the call's
// context. The first call that needs no further round trip is the last.
func linkEnds(e *env) {
	l := e.cable()
	d := e.openAt(l.Store)
	held := d.hold(e.long)

	for what, call := range map[string]func(ctx context.Context) error{
		"Acquire": func(ctx context.Context) error {
			c := e.claim(e.long)
			d.mine(c) // c may be in the store, whatever Acquire returns
			return errOf(d.Acquire(ctx, c))
		},
		"Release": func(ctx context.Context) error {
			// The answer is ErrLost, because this is another token.
			return d.Release(ctx, e.claimOf(held.Key, e.long))
		},
	} {
		more := true
		for n := -1; more; n++ { // if n is -1, the first request does not arrive
			requireInTime(n < maxReplies,
				"%s: %d of its replies were carried, and it did not succeed", what, n)
			more = e.endsInTime(l, n, what+" of a store that hangs", call)
			e.recovers(d)
		}
	}
}

// endsInTime lets the store hang after n replies of a call, and ends the call's context. The call
// must then return promptly. endsInTime makes several calls and judges the fastest, because the
// machine may be slow. The result more reports whether the call needs more than n replies. If the
// call needs no more, it has ended before the store hung, and endsInTime judges nothing.
func (e *env) endsInTime(
	l *Link, n int, what string, call func(ctx context.Context) error,
) (more bool) {
	defer l.Set(Up)
	best := e.patience
	for range 4 {
		l.Set(Up)
		// The pause must not grow from try to try as e.term does, because a driver may itself end a
		// call after some seconds.
		pause := e.h.Term / 4
		end := time.Now().Add(pause)

		// End the context by its deadline, or by a cancellation if the driver also observes that.
		ctx, cancel := context.WithDeadline(e.ctx, end)
		if e.traits.Cancellation == backend.CancelPrompt {
			cancel()
			ctx, cancel = context.WithTimeout(e.ctx, e.long)
			time.AfterFunc(pause, cancel)
		}

		l.disturb(n, Hung)
		err := e.within(what, func() error { return call(ctx) })
		cancel()
		best = min(best, time.Since(end))

		// If n is negative, no request arrives, so the store cannot have answered.
		answered := err == nil || definite(err)
		if answered && n >= 0 {
			return false
		}
		must(unknown(what, err))
	}

	requireInTime(best <= e.promptly,
		"of several calls of %s the fastest ended %v after its context", what, best)
	return true
}
