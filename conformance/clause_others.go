package conformance

import (
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

// otherClauses check strategies that keep their locks under the same keys of one store. Because
// these strategies exclude each other, users can change from one to another while programs run.
var otherClauses = given(others, []clause{
	{name: "others-exclude", says: saysShared, check: func(e *env) { e.pairs(othersExclude) },
		why: "Strategies that share keys exclude each other. If one holds a key, another's " +
			"Acquire returns ErrHeld, and its Renew and Release return ErrLost. After the hold " +
			"it gets the key."},
	{name: "others-break", says: saysBreak, check: func(e *env) { e.pairs(othersBreak) },
		why: "Inspect reports the hold of another strategy, and Break ends it. Its holder gets " +
			"ErrLost, and a waiter of either strategy gets the key."},
	{name: "others-shared", need: shares, says: saysShared,
		check: func(e *env) { e.pairs(othersShared) },
		why: "A shared hold excludes other strategies' claims that are not shared, and the " +
			"reverse. Strategies that share one record may hold a key shared together."},
	{name: "others-history", says: saysShared, check: othersHistory,
		why: "Simultaneous callers of all strategies that share keys hold a key one at a time, " +
			"and their fences grow."},
})

// other is a strategy, by its name in the messages.
type other struct {
	name string
	open opener
}

// others returns the strategies in Harness.Others, in the order of their names.
func (e *env) others() (all []other) {
	for _, name := range slices.Sorted(maps.Keys(e.h.Others)) {
		all = append(all, other{name, e.h.Others[name]})
	}
	return all
}

// strategies returns the strategy under test and the others.
func (e *env) strategies() []other {
	return append([]other{{"this strategy", e.h.Open}}, e.others()...)
}

// pairs runs f for each pair of the strategy under test and another strategy, in both orders. All
// calls of f run at the same time.
func (e *env) pairs(f func(e *env, a, b other)) {
	this := e.strategies()[0]
	var pairs [][2]other
	for _, o := range e.others() {
		pairs = append(pairs, [2]other{this, o}, [2]other{o, this})
	}
	must(e.each(len(pairs), func(i int) {
		a := pairs[i][0]
		b := pairs[i][1]
		mustf(e.try(func() { f(e, a, b) }), "%s with %s", a.name, b.name)
	}))
}

// othersExclude checks that the second strategy does not get a key that the first one holds. After
// a release and after the end of a term it gets the key, and then keeps out the first one.
func othersExclude(e *env, first, second other) {
	a := e.openBy(first.open, e.store)
	b := e.openBy(second.open, e.store)
	c := e.claim(e.long)
	c.Fenced = a.Traits().Fenced
	a.take(c)
	b.shutOut(c.Key)
	a.keep(c)
	a.give(c)
	mustf(b.granted(c.Key), "after a release")

	old := e.claimOf(c.Key, e.term)
	a.take(old)
	next, err := b.seizes(c.Key, e.long)
	mustf(err, "a key whose holder died")

	a.lost(old, "a hold that has expired")
	a.shutOut(c.Key)
	b.keep(next)
	b.give(next)
}

// shutOut lets d renew, release and acquire key, with a fence if d has fences, and without. It ends
// the try unless all these calls are refused.
func (d *driver) shutOut(key string) {
	c := d.e.claimOf(key, d.e.long)
	d.lost(c, "another's hold")
	if d.Traits().Fenced {
		must(d.refuses(fencedClaim(d.e.claimOf(key, d.e.long))))
	}
	must(d.refused(key))
}

// othersBreak lets the second strategy break a hold of the first, while callers of both wait for
// the key.
func othersBreak(e *env, first, second other) {
	a := e.openBy(first.open, e.store)
	b := e.openBy(second.open, e.store)
	if _, ok := b.Driver.(backend.Inspector); !ok {
		return // the second strategy has no Break
	}

	c := a.hold(e.long)
	b.shows(c, 0)

	waits := []<-chan error{e.locks(e.clientBy(first.open), c.Key),
		e.locks(e.clientBy(second.open), c.Key)}
	e.sleep(e.term / 8) // so that both callers have asked for the key
	b.breakKey(c.Key)
	for _, done := range waits {
		must(e.arrives("Lock of a key that was broken by another strategy", done))
	}

	a.lost(c, "a hold that was broken")
	must(errors.Join(a.grantedAtLast(c.Key), b.grantedAtLast(c.Key)))
}

// othersShared checks that holds of two strategies exclude each other unless both are shared.
func othersShared(e *env, first, second other) {
	a := e.openBy(first.open, e.store)
	b := e.openBy(second.open, e.store)
	key := e.key()
	for _, isShared := range []bool{true, false} {
		if isShared && !a.Traits().Shared {
			continue
		}

		c := e.claimOf(key, e.long)
		c.Shared = isShared
		a.take(c)
		mustf(b.refused(key), "a key of %s, shared: %t", first.name, isShared)
		stranger := e.claimOf(key, e.long)
		b.lost(stranger, "another's hold")

		if b.Traits().Shared {
			b.lost(shared(stranger), "another's hold")

			// Strategies that share one record may hold the key shared together. Others may not.
			joined := e.joinsOther(a, b, c)
			require(isShared || !joined, "a shared hold of %s beside %s", second.name, first.name)
		}

		a.keep(c)
		a.give(c)
		mustf(b.granted(key), "after the release of %s", first.name)
	}
}

// joinsOther reports whether driver b, of another strategy, gets a shared hold beside c, which
// driver a holds. If so, joinsOther checks that exclusive claims are refused, and releases the hold
// of b. The caller must then check that c still has its hold.
func (e *env) joinsOther(a, b *driver, c backend.Claim) bool {
	next := shared(e.claimOf(c.Key, e.long))
	if err := errOf(b.acquire(next)); err != nil {
		must(is("acquire shared a key that another strategy holds", err, backend.ErrHeld))
		return false
	}
	mustf(a.refused(c.Key), "a key with shared holds of two strategies")
	b.keep(next)
	b.give(next)
	return true
}

// othersHistory lets callers of all strategies use two keys. They ask for fences only if all
// strategies have fences.
func othersHistory(e *env) {
	var drivers []*driver
	var clients []*hasp.Client
	u := e.users(false)
	u.keep = 4 * time.Millisecond // so that other strategies find the key held
	for _, o := range e.strategies() {
		d := e.openBy(o.open, e.store)
		drivers = append(drivers, d)
		clients = append(clients, e.clientBy(o.open))
		u.fenced = u.fenced && d.Traits().Fenced
	}

	u.byDrivers(drivers)
	u.byClients(clients)
}
