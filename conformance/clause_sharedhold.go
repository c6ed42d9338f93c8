package conformance

import (
	"errors"

	"github.com/hasplock/hasp/backend"
)

// sharedHoldClauses check the terms of several shared holds of one key, and Waits for
// a shared hold.
var sharedHoldClauses = given(shares, []clause{
	{name: "shared-longer", says: saysSharedLast, check: sharedLonger,
		why: "A shared hold that begins later and lasts longer is not ended with the first one."},
	{name: "shared-renew-raises", says: saysProlongs, check: func(e *env) { e.renewRaises(true) },
		why: "A renewal of a shared hold with a longer term prolongs it beside others."},
	{name: "shared-renew-never-shortens", says: saysNoShorter, check: sharedRenewNeverShortens,
		why: "A renewal of a shared hold with a short term ends neither this hold nor a longer one sooner."},
	{name: "shared-keep", says: saysSharedKeep, check: sharedKeep,
		why: "A Release of a shared hold frees the key although KeepUntil is set."},
	{name: "shared-wait-together", need: waiter, says: saysTogether, check: sharedWaitTogether,
		why: "Shared Waits of several drivers get a key that is released, and hold it together."},
	{name: "shared-wait-cancelled", need: waiter, says: saysWaitLeaves, check: func(e *env) { e.cancelRace(true) },
		why: "If a shared Wait is cancelled while the key is released, it gets the key or leaves nothing."},
	{name: "shared-order", need: all(ordered, inspector), says: saysOrdered, check: sharedOrder,
		why: "Ordered drivers serve shared Waits and others in order of arrival, and shared Waits that follow one another together."},
	{name: "shared-no-barging", need: ordered, says: saysBarge, check: sharedNoBarging,
		why: "Ordered drivers refuse a shared Acquire while any caller waits, although the key has a shared hold."},
	{name: "shared-sent-once", need: link, says: saysOnce, check: func(e *env) { e.sentOnce(true) },
		why: "If the reply to a shared call is lost, the call reports an unknown outcome. A Release with its token undoes it, and no other hold."},
	{name: "shared-cut-writer", need: all(link, waiter), says: saysSharedGone, check: sharedCutWriter,
		why: "Shared claims are granted again while a caller that waits for their end is cut off."},
})

// sharedShorter lets a shared hold end beside a longer one, which begins later if
// longLast. Before that it runs meanwhile.
func (e *env) sharedShorter(longLast bool, meanwhile func(a, b *driver, long, short backend.Claim)) {
	a, b, key := e.open(), e.open(), e.key()
	var long, short backend.Claim
	if longLast {
		short = b.join(key, e.term)
		long = a.join(key, e.long)
	} else {
		long = a.join(key, e.long)
		short = b.join(key, e.term)
	}
	meanwhile(a, b, long, short)

	a.outlast(e.term)
	mustf(b.refused(key), "after the end of the shorter of two shared holds")
	b.lost(short, "a shared hold that has expired beside a longer one")
	a.keep(long)

	// The release of the longer hold leaves the key to the end of the next short one.
	b.join(key, e.term)
	a.give(long)
	must(b.grantedAtLast(key))
}

func sharedLonger(e *env) {
	e.sharedShorter(true, func(_, _ *driver, _, _ backend.Claim) {})
}

func sharedRenewNeverShortens(e *env) {
	e.sharedShorter(false, func(a, b *driver, long, short backend.Claim) {
		mustInTime(b.renews(short), "renewal of a shared hold of %v", e.term)
		long.TTL = e.term // the long hold also asks for a short term once
		a.keep(long)
	})
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
	mustf(b.joinsAtLast(key), "while a writer is cut off")

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
