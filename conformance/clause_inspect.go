package conformance

import (
	"slices"

	"github.com/hasplock/hasp/backend"
)

var inspectClauses = []clause{
	{name: "inspect-holder", need: inspector, says: saysInspect, check: pair(inspectHolder),
		why: "Inspect returns whether a key is held, its owner, the remaining term and the fence."},
	{name: "inspect-waiters", need: all(inspector, ordered), says: saysInspect, check: pair(inspectWaiters),
		why: "Inspect returns the waiters of an Ordered driver, in order."},
	{name: "break-frees", need: inspector, says: saysBreak, check: pair(breakFrees),
		why: "Break removes a hold, whichever token has it. Others get the key, and the holder gets ErrLost. Break of a free key is not an error."},
	{name: "break-wakes", need: all(inspector, waiter), says: saysWaitGets, check: pair(breakWakes),
		why: "A waiter gets a key that is broken."},
}

var closeClauses = []clause{
	{name: "close-keeps-holds", says: saysCloseKeeps, check: pair(closeKeepsHolds),
		why: "Close ends what the driver has opened. It frees no key, and no other driver notices."},
	{name: "token-any-driver", says: saysAnyDriver, check: pair(tokenAnyDriver),
		why: "Renew and Release work from any driver, also when the driver that acquired the key is closed."},
	{name: "close-leaves-nothing", says: saysCloseEnds, check: closeLeavesNothing,
		why: "After Close no goroutine of the driver is left."},
}

func inspectHolder(e *env, a, b *driver) {
	c := e.fencedIfCan(e.claim(e.long))
	free := func(s backend.Status) bool { return !s.Held && s.Owner == "" && s.TTL == 0 }
	s := b.inspect(c.Key)
	require(free(s) && len(s.Waiters) == 0, "a key that was never held: %+v", s)

	g := a.take(c)
	b.shows(c, g.Fence)
	s = b.inspect(c.Key)
	require(len(s.Waiters) == 0, "waiters %q, although no caller waits", s.Waiters)

	a.give(c)
	s = b.inspect(c.Key)
	require(free(s), "a key that was released: %+v", s)

	a.take(e.claimOf(c.Key, e.term))
	a.outlast(e.term)
	s = b.inspect(c.Key)
	require(!s.Held, "a key whose hold has expired: %+v", s)
}

func inspectWaiters(e *env, a, b *driver) {
	c := a.hold(e.long)
	owners := e.ownersInLine(c.Key, a, b)
	s := a.inspect(c.Key)
	require(slices.Equal(s.Waiters, owners), "waiters %q, want %q", s.Waiters, owners)
}

func breakFrees(e *env, a, b *driver) {
	c := e.claim(e.long)
	b.breakKey(c.Key)
	a.take(c)
	b.breakKey(c.Key)

	next := e.claimOf(c.Key, e.long)
	mustf(errOf(b.acquire(next)), "acquire a key that was broken")
	a.lost(c, "a hold that was broken")
	mustf(a.refused(c.Key), "after a late release of a hold that was broken")
	b.give(next)

	b.breakKey(c.Key)
	must(a.granted(c.Key))
}

func breakWakes(e *env, a, b *driver) {
	c := a.hold(e.long)
	w := e.queue(c.Key, 1, a, b)[0]
	a.breakKey(c.Key)
	w.served("Wait for a key that was broken")
}

func closeKeepsHolds(e *env, a, b *driver) {
	mine, other := a.hold(e.long), b.hold(e.long)

	must(a.Close())
	mustf(b.refused(mine.Key), "after its holder's driver was closed")
	b.keep(other)
	mustf(b.release(other), "release by a driver after another was closed")
}

func tokenAnyDriver(e *env, a, b *driver) {
	for i, c := range a.holdMany(2, e.long) {
		mustf(b.renews(c), "renewal of a hold of another driver, which is closed: %t", i > 0)
		mustf(b.release(c), "release of a hold of another driver, which is closed: %t", i > 0)
		must(b.granted(c.Key))
		must(a.Close())
	}
}

func closeLeavesNothing(e *env) {
	use := func() {
		d := e.open()
		c := d.hold(e.long)
		if e.waiter {
			w := d.wants(c.Key)
			e.sleep(e.term / 8)
			w.cancel()
		}

		d.keep(c)
		d.give(c)
		must(d.Close())
	}

	// A library may start goroutines once for the whole program. It starts them
	// here.
	use()
	must(e.leaves(func() { use(); use() }))
}
