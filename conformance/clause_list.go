package conformance

import (
	"context"
	"fmt"
	"iter"
	"slices"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

var listClauses = given(lister, []clause{
	{name: "list-prefix", says: saysListPrefix, check: listPrefix,
		why: "List yields the keys that begin with the prefix, whatever bytes it has, and no others."},
	{name: "list-foreign", need: all(inspector, others), says: saysListOurs, check: listForeign,
		why: "List yields the hold of another strategy with its owner, or not at all."},
	{name: "list-pages", alone: true, says: saysListHeld, check: listPages,
		why: "List yields every held key, also of more than 1,000."},
	{name: "list-stops", says: saysListLazy, check: listStops,
		why: "The loop may end a List early. The driver works as before."},
	{name: "list-lazy", need: commands, alone: true, says: saysListLazy, check: listLazy,
		why: "List sends nothing if the loop asks for no entry."},
	{name: "list-cancelled", says: saysListCtx, check: listCancelled,
		why: "If the context has ended, List yields one error, which matches the context's."},
	{name: "list-client", says: saysHasp, check: listClient,
		why: "Client.List takes Options.Prefix off the keys. Each slot is a key of its own."},
})

// listing begins a list. Each call of the list to the store may take ten timeouts, because a call
// may read hundreds of records.
func (d *driver) listing(ctx context.Context, prefix string) iter.Seq2[backend.Entry, error] {
	return d.Driver.(backend.Lister).List(ctx, prefix, 10*d.e.timeout)
}

// list returns the status of each key with the prefix. It ends the try if the list fails.
func (d *driver) list(prefix string) map[string]backend.Status {
	byKey, err := listed(d.listing(d.e.ctx, prefix))
	mustf(err, "list")
	return byKey
}

// statuses returns what Inspect and List report on key, if the driver has these methods. The names
// of the calls are "inspect" and "list". If List does not yield the key, its status is empty.
func (d *driver) statuses(key string) map[string]backend.Status {
	byCall := map[string]backend.Status{}
	if d.e.inspector {
		byCall["inspect"] = d.inspect(key)
	}
	if d.e.lister {
		byCall["list"] = d.list(key)[key]
	}
	return byCall
}

// listed runs a loop over a list. It returns the status of each key, and the error of the list. It
// ends the try if the list goes on after an error.
func listed(list iter.Seq2[backend.Entry, error]) (map[string]backend.Status, error) {
	byKey := map[string]backend.Status{}
	var last error
	for entry, err := range list {
		require(last == nil, "List goes on after an error: %v", last)
		last = err
		if err == nil {
			byKey[entry.Key] = entry.Status
		} else {
			require(entry.Key == "" && !entry.Held, "List yields %+v with an error", entry)
		}
	}

	return byKey, last
}

// keysFor returns n new keys, and the prefix that they share.
func (e *env) keysFor(n int) (prefix string, keys []string) {
	prefix = e.key() + "-"
	for i := range n {
		keys = append(keys, fmt.Sprint(prefix, i))
	}
	return prefix, keys
}

// listPrefix lists keys by prefixes that look like patterns, and counts the keys.
func listPrefix(e *env) {
	d := e.open()
	base := e.key()

	// If a driver mistook a prefix for a pattern, it would also list some keys without the prefix.
	for _, name := range []string{
		"*", "?", "[a-z]", "x", `\*`, "x/y", "", "hasp:{x}:lock:y", " \x00\xff", "%",
	} {
		d.take(e.claimOf(base+name, e.long))
	}

	// Each prefix has the number of the keys above that begin with it.
	for prefix, want := range map[string]int{
		"": 10, "*": 1, "?": 1, "[": 1, "[a-z]": 1, "x": 2, "x/": 1, `\`: 1, `\*`: 1, "hasp:{": 1,
		" ": 1, "%": 1, "y": 0,
	} {
		got := d.list(base + prefix)
		require(len(got) == want, "list by the prefix KEY%s: %d keys, want %d: %+v", prefix,
			len(got), want, got)
	}

	// On Redis, the records of these two keys have names of different forms, because the first key
	// has a }.
	odd := "hasp:{" + base
	d.take(e.claimOf(odd+"}:lock:1", e.long))
	d.take(e.claimOf(odd, e.long))
	got := d.list(odd)
	require(len(got) == 2 && got[odd].Held, "list by the prefix %q: %+v, want 2 keys", odd, got)
}

// listForeign lists a key that another strategy holds. List must yield the key with its owner if
// Inspect shows the owner. Otherwise the driver cannot read the owner, and List may omit the key.
func listForeign(e *env) {
	this := e.open()
	for _, o := range e.others() {
		other := e.openBy(o.open, e.store)
		prefix, keys := e.keysFor(1)
		c := e.claimOf(keys[0], e.long)
		other.take(c)
		shows := this.inspect(c.Key).Owner != ""
		got := this.list(prefix)
		mayOmit := len(got) == 0 && !shows
		require(mayOmit || len(got) == 1 && got[c.Key].Owner == c.Owner,
			"list of a key that %q holds with %s, and that Inspect shows with its owner: %t: %+v",
			c.Owner, o.name, shows, got)
	}
}

// listPages lists so many keys that the driver needs several calls to the store.
func listPages(e *env) {
	const n = 1100
	const goroutines = 8 // which take and release the keys
	d := e.open()
	prefix, keys := e.keysFor(n)
	cs := make([]backend.Claim, n)
	must(e.each(goroutines, func(first int) {
		for i := first; i < n; i += goroutines {
			cs[i] = e.claimOf(keys[i], e.long)
			d.take(cs[i])
		}
	}))

	got := d.list(prefix)
	for _, key := range keys {
		require(got[key].Held, "list of %d held keys: %q is missing", n, key)
	}

	require(len(got) == n, "list of %d held keys: %d keys", n, len(got))
	must(e.each(goroutines, func(first int) {
		for i := first; i < n; i += goroutines {
			d.give(cs[i])
		}
	}))
}

// listStops ends the loops over some lists after the first entry. The driver must work after that.
func listStops(e *env) {
	d := e.open()
	prefix, keys := e.keysFor(3)
	for _, key := range keys {
		d.take(e.claimOf(key, e.long))
	}
	for range 3 {
		for _, err := range d.listing(e.ctx, prefix) {
			mustf(err, "list")
			break
		}
	}

	must(d.granted(e.key()))
	got := d.list(prefix)
	require(len(got) == 3, "list of 3 held keys, after a loop that ended early: %+v", got)
}

func listLazy(e *env) {
	d := e.open()
	prefix, keys := e.keysFor(1)
	d.take(e.claimOf(keys[0], e.long))
	d.list(prefix) // loads scripts and makes connections, so that these calls are not counted
	e.costs("List without a loop", 40, 0, func(int) { d.listing(e.ctx, prefix) })
}

func listCancelled(e *env) {
	d := e.open()
	prefix, keys := e.keysFor(1)
	d.take(e.claimOf(keys[0], e.long))
	got, err := listed(d.listing(e.deadContext(), prefix))
	must(is("List with a context that was cancelled", err, context.Canceled))
	require(len(got) == 0, "List with a context that was cancelled yields %+v", got)
}

// listClient lists a lock and a slot of another lock by a Client with a prefix.
func listClient(e *env) {
	prefix, keys := e.keysFor(2)
	c := e.client(e.openOwn(e.h.Open, e.store), hasp.Options{Prefix: prefix})
	defer e.lock(c, keys[0]).Unlock(e.ctx)
	slot, err := c.TryLock(e.ctx, keys[1], hasp.WithSlots(1)) // Lock would also hold KEY#queue
	must(err)
	defer slot.Unlock(e.ctx)
	var got []string
	for entry, err := range c.List(e.ctx, "") {
		must(err)
		if !slices.Contains(got, entry.Key) { // List may yield a key twice
			got = append(got, entry.Key)
		}
	}

	slices.Sort(got)
	want := []string{keys[0], keys[1] + "#0"}
	require(slices.Equal(got, want), "Client.List: %q, want %q", got, want)
}

var inspectClauses = []clause{
	{name: "inspect-holder", need: shown, says: saysInspect, check: pair(inspectHolder),
		why: "Inspect and List return whether a key is held, its owner, the remaining term and " +
			"the fence. List does not yield a key that was released or whose hold has expired."},
	{name: "inspect-waiters", need: all(shown, ordered), says: saysInspect,
		check: pair(inspectWaiters),
		why:   "Inspect and List return the waiters of an Ordered driver, in order."},
	{name: "break-frees", need: inspector, says: saysBreak, check: pair(breakFrees),
		why: "Break removes a hold, whichever token has it. Others get the key, and the holder " +
			"gets ErrLost. Break of a free key is not an error. Break ends all shared holds."},
	{name: "break-wakes", need: all(inspector, waiter), says: saysWaitGets, check: pair(breakWakes),
		why: "A waiter gets a key that is broken."},
}

var closeClauses = []clause{
	{name: "close-leaves-nothing", says: saysCloseEnds, check: closeLeavesNothing,
		why: "After Close no goroutine of the driver is left."},
}

// inspectHolder compares what Inspect and List report on a key before its first hold, during the
// hold, after the release, and after the end of a later hold's term.
func inspectHolder(e *env, a, b *driver) {
	c := e.fencedIfCan(e.claim(e.long))
	mustBeFree := func(when string) {
		for call, s := range b.statuses(c.Key) {
			require(!s.Held, "%s of a key that %s: %+v", call, when, s)
		}
		require(!e.lister || len(b.list(c.Key)) == 0, "list has a key that %s", when)
	}
	mustBeBlank := func(when string) {
		mustBeFree(when)
		for call, s := range b.statuses(c.Key) {
			require(s.Owner == "" && s.TTL == 0 && len(s.Waiters) == 0,
				"%s of a key that %s: %+v", call, when, s)
		}
	}

	mustBeBlank("was never held")
	g := a.take(c)
	for call, s := range b.statuses(c.Key) {
		matches(call, s, c, g.Fence)
		require(len(s.Waiters) == 0 && len(s.Shared) == 0,
			"%s of a key that no other caller wants: %+v", call, s)

		// Inspect may leave out the owner and the fence, but List may not.
		isComplete := s.Owner == c.Owner && s.Fence == g.Fence
		require(isComplete || call != "list", "list: %+v, want owner %q and fence %d", s, c.Owner,
			g.Fence)
	}

	a.give(c)
	mustBeBlank("was released")
	a.take(e.claimOf(c.Key, e.term))
	a.outlast(e.term)
	mustBeFree("has expired") // but may still have an owner, until the store removes the record
}

// inspectWaiters compares the owners of three waiters with the waiters that Inspect and List
// return.
func inspectWaiters(e *env, a, b *driver) {
	c := a.hold(e.long)
	var owners []string
	for _, w := range e.queue(c.Key, 3, a, b) {
		owners = append(owners, w.c.Owner)
	}
	for call, s := range a.statuses(c.Key) {
		require(slices.Equal(s.Waiters, owners), "%s: waiters %q, want %q", call, s.Waiters, owners)
	}
}

// breakFrees breaks keys that are free, held, and held shared. The holders must get ErrLost, and
// other tokens must get the keys.
func breakFrees(e *env, a, b *driver) {
	c := e.claim(e.long)
	b.breakKey(c.Key) // the key is free, which is not an error
	a.take(c)
	b.breakKey(c.Key)

	next := e.claimOf(c.Key, e.long)
	mustf(errOf(b.acquire(next)), "acquire a key that was broken")
	a.lost(c, "a hold that was broken")
	mustf(a.refused(c.Key), "after a late release of a hold that was broken")
	b.give(next)

	b.breakKey(c.Key) // the key is free again
	must(a.granted(c.Key))
	if !e.traits.Shared {
		return
	}

	one := a.join(e.key(), e.long)
	two := a.join(one.Key, e.long)
	b.breakKey(one.Key)
	a.lost(one, "a shared hold that was broken")
	a.lost(two, "a shared hold that was broken")
	must(b.granted(one.Key))
}

func breakWakes(e *env, a, b *driver) {
	c := a.hold(e.long)
	w := e.queue(c.Key, 1, a, b)[0]
	a.breakKey(c.Key)
	w.served("Wait for a key that was broken")
}

// closeLeavesNothing opens, uses and closes a driver. The goroutines that this starts must end.
func closeLeavesNothing(e *env) {
	use := func() {
		d := e.open()
		c := d.hold(e.long)
		if e.waiter {
			w := d.wants(c.Key)
			e.sleep(e.term / 8) // so that the Wait has asked for the key
			w.cancel()
		}

		d.keep(c)
		d.give(c)
		must(d.Close())
	}

	// Some libraries start goroutines once that last as long as the program. This first use starts
	// these, so that they do not count as left behind.
	use()
	must(e.leaves(use))
}
