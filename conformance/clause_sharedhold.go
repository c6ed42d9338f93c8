package conformance

import (
	"errors"
	"fmt"
	"time"

	"github.com/hasplock/hasp/backend"
)

// sharedHoldClauses check the terms of several shared holds of one key, and Waits for
// a shared hold.
var sharedHoldClauses = given(shares, []clause{
	{name: "shared-longer", says: saysSharedLast, check: sharedLonger,
		why: "A shared hold that begins later and lasts longer is not ended with the first one."},
	{name: "shared-renew-raises", says: saysProlongs, check: sharedRenewRaises,
		why: "A renewal of a shared hold with a longer term prolongs it beside others."},
	{name: "shared-renew-never-shortens", says: saysNoShorter, check: sharedRenewNeverShortens,
		why: "A renewal of a shared hold with a short term ends neither this hold nor a longer one sooner."},
	{name: "shared-keep", says: saysSharedKeep, check: sharedKeep,
		why: "A Release of a shared hold frees the key although KeepUntil is set."},
	{name: "shared-wait-together", need: waiter, says: saysTogether, check: sharedWaitTogether,
		why: "Shared Waits of several drivers get a key that is released, and hold it together."},
	{name: "shared-wait-cancelled", need: waiter, says: saysWaitLeaves, check: sharedWaitCancelled,
		why: "If a shared Wait is cancelled while the key is released, it gets the key or leaves nothing."},
	{name: "shared-order", need: all(ordered, inspector), says: saysOrdered, check: sharedOrder,
		why: "Ordered drivers serve shared Waits and others in order of arrival, and shared Waits that follow one another together."},
	{name: "shared-no-barging", need: ordered, says: saysBarge, check: sharedNoBarging,
		why: "Ordered drivers refuse a shared Acquire while any caller waits, although the key has a shared hold."},
	{name: "shared-sent-once", need: link, says: saysOnce, check: sharedSentOnce,
		why: "If the reply to a shared call is lost, the call reports an unknown outcome. A Release with its token undoes it, and no other hold."},
	{name: "shared-cut-writer", need: all(link, waiter), says: saysSharedGone, check: sharedCutWriter,
		why: "Shared claims are granted again while a caller that waits for their end is cut off."},
})

func sharedLonger(e *env) {
	a, b, key := e.open(), e.open(), e.key()
	short := a.join(key, e.term)
	long := b.join(key, e.long)
	a.outlast(e.term)

	mustf(a.refused(key), "after the end of the first and shorter of two shared holds")
	a.lost(short, "the first shared hold, which has expired beside a longer one")
	b.keep(long)
	b.give(long)
	must(a.granted(key))
}

func sharedRenewRaises(e *env) {
	a, b, key := e.open(), e.open(), e.key()
	c := a.join(key, e.term)
	other := b.join(key, e.long)
	c.TTL = e.long
	mustInTime(a.renews(c), "renewal of a shared hold of %v", e.term)

	a.outlast(e.term)
	b.give(other)
	mustf(b.refused(key), "after a renewal of a shared hold with a longer term")
	a.keep(c)
	a.give(c)
}

func sharedRenewNeverShortens(e *env) {
	a, b, key := e.open(), e.open(), e.key()
	long := a.join(key, e.long)
	short := b.join(key, e.term)
	mustInTime(b.renews(short), "renewal of a shared hold of %v", e.term)

	// The long hold also asks for a short term once.
	once := long
	once.TTL = e.term
	a.keep(once)

	b.outlast(e.term)
	b.lost(short, "a renewed shared hold that has expired beside a longer one")
	mustf(b.refused(key), "after renewals with a short term")
	a.keep(long)
	a.give(long)
}

func sharedKeep(e *env) {
	a, b, key := e.open(), e.open(), e.key()
	for range 2 {
		one, two := a.join(key, e.long), b.join(key, e.long)
		mustf(a.release(keptFor(one, e.long)), "release of a shared hold with KeepUntil")
		mustf(b.refused(key), "after the release of one of two shared holds")
		mustf(b.release(keptFor(two, e.long)), "release of a shared hold with KeepUntil")
		mustf(a.granted(key), "after the release of all shared holds with KeepUntil")
	}
}

func sharedWaitTogether(e *env) {
	drivers := []*driver{e.open(), e.open()}
	a := e.open()
	c := a.hold(e.long)
	ws := make([]*wanted, 4)
	for i := range ws {
		ws[i] = drivers[i%2].want(shared(e.claimOf(c.Key, e.long)))
		e.queued(a, c.Key, i+1)
	}

	a.give(c)
	for _, w := range ws {
		w.granted("one of several shared Waits")
	}
	for _, w := range ws {
		mustf(a.refused(c.Key), "while shared Waits hold the key")
		w.use()
	}
	must(a.granted(c.Key))
}

// sharedOrder lets two readers, a writer and two more readers wait.
func sharedOrder(e *env) {
	a, b := e.open(), e.open()
	c := a.hold(e.long)
	ws := make([]*wanted, 5)
	const writer = 2
	for i := range ws {
		claim := e.claimOf(c.Key, e.long)
		claim.Shared = i != writer
		ws[i] = b.want(claim)
		e.queued(a, c.Key, i+1)
	}
	a.give(c)

	for i, w := range ws {
		w.granted("one of readers and a writer in a line")
		if i == 0 {
			continue // the second reader gets the key beside the first
		}
		if i < writer {
			b.give(ws[0].c)
		}
		if i <= writer {
			ws[i+1].stillWaits("Wait behind another that cannot share the key")
			w.use()
		}
	}
	b.give(ws[3].c, ws[4].c)
}

func sharedNoBarging(e *env) {
	a, b, key := e.open(), e.open(), e.key()
	r := a.join(key, e.long)
	w := b.wants(key)
	e.queued(a, key, 1)
	for _, d := range []*driver{a, b} {
		mustf(d.refusesShared(key), "while a caller waits")
	}
	w.stillWaits("Wait for a key with a shared hold")
	a.give(r)
	w.served("Wait for a key whose shared hold was released")
}

func sharedWaitCancelled(e *env) {
	a, b := e.open(), e.open()
	for round := range 40 {
		c := a.hold(e.long)
		w := b.want(shared(e.claimOf(c.Key, e.long)))
		e.sleep(moment(round / 8))
		if round%2 == 0 {
			a.give(c)
			e.sleep(moment(round / 2))
			w.stop()
		} else {
			time.AfterFunc(moment(round/2), w.stop)
			a.give(c)
		}

		err := e.arrives("a shared Wait cancelled at the release", w.done)
		w.abandon(err)
		if err == nil {
			mustf(b.renews(w.c), "renewal of a grant to a shared Wait that was cancelled at the release")
			b.give(w.c)
		}
		mustf(a.grantedAtLast(c.Key), "round %d: after a shared Wait cancelled at the release", round)
	}
}

// sharedSentOnce loses replies. Another reader holds the key when the token is released.
func sharedSentOnce(e *env) {
	l := e.cable()
	d, b := e.openAt(l.Store), e.open()
	e.recovers(d) // connections are made
	c, _ := e.loses(l, d, b, lostReply{
		what: "shared Acquire whose reply is lost",
		begin: func() (backend.Claim, func() error) {
			c := shared(e.claim(e.long))
			return c, func() error { return errOf(d.acquire(c)) }
		},
		landed: func(c backend.Claim) bool { return b.holds(c.Key) },
	})
	other := b.join(c.Key, e.long)
	d.giveIfHeld(c, "after a shared Acquire whose reply is lost")
	b.keep(other)
	b.give(other)
	mustf(b.granted(c.Key), "after the releases")

	c, _ = e.loses(l, d, b, lostReply{
		what: "Release of a shared hold whose reply is lost",
		begin: func() (backend.Claim, func() error) {
			c := shared(e.claim(e.long))
			d.take(c)
			return c, func() error { return d.release(c) }
		},
		landed: func(c backend.Claim) bool { return !b.holds(c.Key) },
	})
	other = b.join(c.Key, e.long)
	d.giveIfHeld(c, "after a Release whose reply is lost")
	b.keep(other)
	b.give(other)
	mustf(b.granted(c.Key), "after the releases")
}

// sharedCutWriter lets a writer wait whose link then loses everything. A reader stays,
// so that the key is never free for the writer.
func sharedCutWriter(e *env) {
	l := e.cable()
	d := e.openAt(l.Store)
	a, b, key := e.open(), e.open(), e.key()
	stays := a.join(key, e.long)
	cut := d.wants(key)
	e.queued(a, key, 1)

	l.Set(Hung)
	e.until(fmt.Sprintf("a shared grant of %s while a writer is cut off", brief(key)), func() bool {
		c := shared(e.claimOf(key, e.long))
		_, err := b.acquire(c)
		if errors.Is(err, backend.ErrHeld) {
			return false
		}
		must(err)
		b.give(c)
		return true
	})

	// The Wait may have ended by its timeout, or by the server's. A request of it that the link
	// has held up may still take the key.
	l.Set(Up)
	a.give(stays)
	switch err := e.arrives("Wait that was cut off", cut.done); {
	case err == nil:
		cut.use()
	case !errors.Is(err, backend.ErrHeld):
		must(unknown("Wait that was cut off", err))
		cut.abandon(err)
	}
	must(b.grantedAtLast(key))
}
