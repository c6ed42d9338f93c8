package conformance

import (
	"errors"
	"slices"
	"time"

	"github.com/hasplock/hasp/backend"
)

// firstClause names the clause that runs alone, before all others.
const firstClause = "takes-and-releases"

var acquireClauses = []clause{
	{name: firstClause, says: saysGrants, check: takesAndReleases,
		why: "Acquire takes a free key, and Release frees it again."},
	{name: "traits-constant", says: saysTraits, check: pair(traitsConstant),
		why: "Traits never change; Ordered drivers are Waiters, and no driver is both a Waiter and a Waker."},
	{name: "acquire-excludes", says: saysNever, check: pair(acquireExcludes),
		why: "Acquire of a held key returns ErrHeld, even to a token of the same driver and " +
			"owner. After the release the key is granted."},
	{name: "acquire-one-winner", says: saysOneHolder, check: acquireOneWinner,
		why: "At most one of many simultaneous attempts is granted."},
	{name: "acquire-held-details", says: saysRetryAfter, check: pair(acquireHeldDetails),
		why: "A HeldError has the right owner and remaining term, or leaves them empty."},
	{name: "acquire-max-ttl", need: limited, says: saysMaxTTL, check: acquireMaxTTL,
		why: "A term of Traits.MaxTTL is granted. A longer one is ErrInvalid."},
	{name: "acquire-dead-context", says: saysCtx, check: acquireDeadContext,
		why: "If its context has ended, Acquire of a free key does not return ErrHeld. A Release " +
			"of its token removes all that it leaves."},
}

func takesAndReleases(e *env) {
	d := e.open()
	key := e.key()
	for range 2 { // the second attempt finds out whether the first Release has freed the key
		must(d.granted(key))
	}
}

// traitsConstant compares the Traits of several drivers, before and after some calls. It also
// checks that the Traits agree with the driver's methods.
func traitsConstant(e *env, a, b *driver) {
	first := a.Traits()
	a.give(a.hold(e.long))
	for _, t := range []backend.Traits{a.Traits(), b.Traits(), e.traits} {
		require(t == first, "traits %+v, before %+v", t, first)
	}

	_, waits := a.Driver.(backend.Waiter)
	require(waits || !first.Ordered, "Ordered by its Traits, but not a Waiter")
	require(!waits || !e.waker, "both a Waiter and a Waker")
	known := []backend.Reach{backend.Process, backend.Host, backend.Network}
	require(slices.Contains(known, first.Reach),
		"reach %v is none of process, host and network", first.Reach)
}

// acquireExcludes asks for a held key by another driver, and by the holder's driver with the
// holder's owner but another token. After the release the key must be granted.
func acquireExcludes(e *env, a, b *driver) {
	c := a.hold(e.long)
	must(b.refused(c.Key))
	again := e.claimOf(c.Key, e.long)
	again.Owner = c.Owner
	mustf(a.refuses(again), "by the same driver and owner with another token")

	a.give(c)
	must(b.granted(c.Key))
}

// acquireOneWinner makes twelve attempts at the same time, several times. A round may have no
// winner, because attempts may hinder each other in a quorum.
func acquireOneWinner(e *env) {
	drivers := e.drivers()
	key := e.key()
	for round := range 15 {
		// The goroutines begin together, so that their attempts reach the store at the same time.
		start := make(chan struct{})
		time.AfterFunc(time.Millisecond, func() { close(start) })

		winners := make(chan func(), 12) // each function releases one hold
		must(e.each(12, func(i int) {
			d := drivers[i%len(drivers)]
			c := e.claimOf(key, e.long)
			<-start
			_, err := d.acquire(c)
			require(err == nil || errors.Is(err, backend.ErrHeld),
				"one of many attempts: %q, want a grant or ErrHeld", err)
			if err == nil {
				winners <- func() { d.give(c) }
			}
		}))

		n := len(winners)
		require(n <= 1, "round %d: %d of 12 attempts were granted one key", round, n)
		if n == 1 {
			(<-winners)()
		}
	}
}

func acquireHeldDetails(e *env, a, b *driver) {
	c := a.hold(e.long)
	held := b.refusal(c.Key, c.TTL)
	require(held.Owner == "" || held.Owner == c.Owner, "held by %q, want %q", held.Owner, c.Owner)
}

func acquireMaxTTL(e *env) {
	d := e.open()
	_, err := d.acquire(e.claim(e.traits.MaxTTL + time.Millisecond))
	must(is("acquire for longer than Traits.MaxTTL", err, backend.ErrInvalid))
	d.give(d.hold(e.traits.MaxTTL))
}

// acquireDeadContext makes attempts at free keys with a context that has ended. An attempt may fail
// or be granted, but a release of its token must remove all that it leaves.
func acquireDeadContext(e *env) {
	a := e.open()
	b := e.open()
	ctx := e.deadContext()
	for range 5 {
		c := e.claim(e.long)
		err := e.within("Acquire with a context that has ended", func() error {
			return errOf(a.Acquire(ctx, c))
		})
		require(!definite(err), "acquire a free key with a context that has ended: "+
			"%q, want the context's error or a grant", err)
		e.undone(a, b, c, err)
	}
}

// undone cleans up after an attempt that returned err. Like the engine, undone lets d release the
// token at once, and again after the timeout if the key is still held. After an error, a driver
// with Traits.Cleans does the clean-up itself. The try ends unless the driver in the argument other
// then gets the key.
func (e *env) undone(d, other *driver, c backend.Claim, err error) {
	driverCleans := e.traits.Cleans && err != nil
	undo := func() error {
		if !driverCleans {
			d.giveIfHeld(c, "of what may have been acquired")
		}
		return other.granted(c.Key)
	}

	left := undo()
	if errors.Is(left, backend.ErrHeld) {
		e.sleep(e.timeout)
		left = undo()
	}

	mustf(left, "after a call of unknown outcome, and %v for its clean-up", e.timeout)
}
