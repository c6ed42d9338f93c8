package conformance

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

var sharedClauses = append(given(shares, []clause{
	{name: "shared-excludes", says: saysSharedHeld, check: pairOn(sharedExcludes),
		why: "A shared hold refuses a claim that is not shared, and the reverse."},
	{name: "shared-error", says: saysSharedError, check: pairOn(sharedError),
		why: "A refusal by a shared hold is a HeldError that says so. A refusal by another hold does not."},
	{name: "shared-wait", need: waiter, says: saysSharedLast, check: pair(sharedWait),
		why: "A Wait gets a key when its last shared hold ends. A shared Wait gets it when the other hold ends."},
	{name: "shared-terms", says: saysSharedOwn, check: sharedTerms,
		why: "A shared hold ends with its own term, whichever of several begins first or is " +
			"renewed, and the key is free when the last has ended."},
	{name: "shared-writer", says: saysSharedWaiting, check: sharedWriter,
		why: "A Wait that is not shared, or a claim with WillRetry, gets the key although shared " +
			"claims keep coming."},
	{name: "shared-writer-gone", says: saysSharedGone, check: pairOn(sharedWriterGone),
		why: "Shared claims are granted again after a caller that they made wait has left or died."},
	{name: "shared-inspect", need: shown, says: saysSharedStatus, check: pairOn(sharedInspect),
		why: "Inspect and List name the owners of all shared holds, and the longest rest of a term."},
	{name: "shared-renew-raises", says: saysProlongs, check: pair(sharedRenewRaises),
		why: "A renewal of a shared hold with a longer term prolongs it beside others."},
	{name: "shared-keep", says: saysSharedKeep, check: pairOn(sharedKeep),
		why: "A Release of a shared hold frees the key although KeepUntil is set."},
	{name: "shared-wait-together", need: waiter, says: saysTogether, check: sharedWaitTogether,
		why: "Shared Waits of several drivers get a key that is released, and hold it together."},
	{name: "shared-order", need: all(ordered, inspector), says: saysOrdered,
		check: pair(sharedOrder),
		why: "Ordered drivers serve shared Waits and others in order of arrival, and shared " +
			"Waits that follow one another together."},
}),
	clause{name: "shared-unclaimed", need: unshared, says: saysKeepIgnored,
		check: pair(sharedUnclaimed),
		why: "A driver without Shared excludes shared claims from one another, and WithShared " +
			"is errors.ErrUnsupported."})

// shared returns c as a shared claim.
func shared(c backend.Claim) backend.Claim { c.Shared = true; return c }

// waiting returns c as the claim of a caller that asks again if it is refused.
func waiting(c backend.Claim) backend.Claim { c.WillRetry = true; return c }

// joins makes shared attempts at key until one is granted.
func (d *driver) joins(key string) (backend.Claim, error) {
	c, _, err := d.seize(func() backend.Claim { return shared(d.e.claimOf(key, d.e.long)) })
	return c, err
}

// joinsAtLast calls joins, and then releases the hold.
func (d *driver) joinsAtLast(key string) error { return d.givesBack(d.joins(key)) }

// join takes a shared hold of key for ttl. It ends the try if the hold is refused.
func (d *driver) join(key string, ttl time.Duration) backend.Claim {
	c := shared(d.e.claimOf(key, ttl))
	d.take(c)
	return c
}

// refusesShared returns an error unless a shared attempt at key returns ErrHeld.
func (d *driver) refusesShared(key string) error {
	return d.refuses(shared(d.e.claimOf(key, d.e.long)))
}

// sharedExcludes lets driver a hold the key shared, and then not shared. Claims of the other kind
// by the same and by another driver must be refused.
func sharedExcludes(e *env, a, b *driver, key string) {
	for _, d := range []*driver{a, b} {
		reader := a.join(key, e.long)
		mustf(d.refused(key), "a key with a shared hold")
		a.give(reader)

		c := e.claimOf(key, e.long)
		a.take(c)
		must(d.refusesShared(key))
		a.keep(c)
		a.give(c)
	}
}

// sharedError checks that the refusal says whether the key is held shared.
func sharedError(e *env, a, b *driver, key string) {
	for _, isShared := range []bool{true, false} {
		c := e.claimOf(key, e.long)
		c.Shared = isShared
		a.take(c)

		held := b.refusal(key, e.long)
		require(held.Shared == isShared, "a refusal has Shared %v, want %v", held.Shared, isShared)
		require(held.Owner == "" || held.Owner == c.Owner,
			"a refusal names owner %q, want %q", held.Owner, c.Owner)
		a.give(c)
	}
}

// sharedWait waits for a key with two shared holds. The first is released. Then the second is also
// released, or it expires. A shared Wait for the same key follows.
func sharedWait(e *env, a, b *driver) {
	for _, ttl := range []time.Duration{e.long, e.term} {
		key := e.key()
		one := a.join(key, e.long)
		two := a.join(key, ttl)
		w := e.queue(key, 1, a, b)[0]
		a.give(one)
		if ttl == e.long { // a hold with the shorter term ends by itself
			w.stillWaits("Wait for a key with a shared hold")
			a.give(two)
		}

		w.granted("Wait for a key that was held shared")

		reader := a.want(shared(e.claimOf(key, e.long)))
		e.queued(a, key, 1)
		reader.stillWaits("shared Wait for a key that is held")
		w.use()
		reader.served("shared Wait for a key that was released")
	}
}

// stillWaits sleeps for a moment. If the Wait has ended by then, the try ends.
func (w *pendingWait) stillWaits(what string) {
	w.d.e.sleep(w.d.e.term / 8)
	select {
	case err := <-w.done:
		fail("%s: ended with %v", what, err)
	default:
	}
}

// readersOf lets two drivers hold key together, until the function stop is called or the try ends.
// A driver asks for its next hold before it releases one, so that the key is never free while
// shared claims are granted. If the next hold is refused, because a writer waits, the driver asks
// again until it gets the hold. The function stop returns the errors of both drivers.
func (e *env) readersOf(key string) (stop func() error) {
	ctx, cancel := context.WithCancel(e.ctx)
	var ends []<-chan error
	for _, d := range []*driver{e.open(), e.open()} {
		c := d.join(key, e.long)
		ends = append(ends, e.begin(func() error {
			for ctx.Err() == nil {
				e.sleep(e.term / 40)
				next := shared(e.claimOf(key, e.long))
				_, err := d.acquire(next)
				d.give(c)
				if errors.Is(err, backend.ErrHeld) {
					next, err = d.joins(key)
				}

				must(err)
				c = next
			}

			return d.release(c)
		}))
	}

	return func() error {
		cancel()
		var errs []error
		for _, end := range ends {
			errs = append(errs, e.arrives("the end of the readers", end))
		}

		return errors.Join(errs...)
	}
}

// sharedWriter lets a writer ask for a key while readers keep coming. The writer waits or, if the
// driver cannot wait, asks again with a new token each time, as the engine does.
func sharedWriter(e *env) {
	a := e.open()
	key := e.key()
	stop := e.readersOf(key)
	if e.waiter {
		a.wants(key).served("Wait while readers keep coming")
	} else {
		c := waiting(e.claimOf(key, e.long))
		_, _, err := a.seize(func() backend.Claim {
			c.Token = e.claimOf(key, e.long).Token
			return c
		})
		mustf(err, "acquire with WillRetry while readers keep coming")
		a.keep(c)
		a.give(c)
	}
	must(stop())
}

// sharedWriterGone checks that a writer that has gone does not keep new readers out. One reader
// keeps its hold, so that no writer is granted the key. A grant would remove what the first writer
// has left in the store.
func sharedWriterGone(e *env, a, b *driver, key string) {
	a.join(key, e.long)
	if !e.traits.Ordered { // the callers of an Ordered driver use Wait, so it may ignore WillRetry
		must(b.refuses(waiting(e.claimOf(key, e.long))))
		mustf(b.joinsAtLast(key), "after a caller with WillRetry died")
	}

	if e.waiter {
		w := e.queue(key, 1, a, b)[0]
		w.abandon(w.cancel())
		mustf(b.joinsAtLast(key), "after a Wait was cancelled")
	}
}

// sharedInspect compares what Inspect and List report on a key with three shared holds, and again
// after the release of each.
func sharedInspect(e *env, a, b *driver, key string) {
	cs := []backend.Claim{a.join(key, e.long), b.join(key, e.long/2), a.join(key, e.long/2)}
	for len(cs) > 0 {
		var want []string // the owners of the present holds
		for _, c := range cs {
			want = append(want, c.Owner)
		}

		slices.Sort(want)
		for call, s := range b.statuses(key) {
			got := slices.Sorted(slices.Values(s.Shared))
			require(s.Held && slices.Equal(got, want),
				"%s of a key with shared holds of %q: %+v", call, want, s)
			require(s.Owner == "" && s.Since.IsZero(),
				"%s of a key with shared holds: owner %q, since %v", call, s.Owner, s.Since)

			// The longest term is always e.long, because its hold is released last.
			require(s.TTL > e.long/2+time.Second && s.TTL <= e.long+time.Second,
				"%s of a key with shared holds: %v left, want the longest term, which began with %v",
				call, s.TTL, e.long)
		}

		last := len(cs) - 1
		a.give(cs[last])
		cs = cs[:last]
	}

	for call, s := range b.statuses(key) {
		require(!s.Held && len(s.Shared) == 0,
			"%s of a key whose shared holds were released: %+v", call, s)
	}
}

// sharedUnclaimed makes shared claims with a driver that is not Shared by its Traits. Such a driver
// must treat them as exclusive.
func sharedUnclaimed(e *env, a, b *driver) {
	c := shared(e.claim(e.long))
	a.take(c)
	mustf(b.refusesShared(c.Key), "a driver without Shared")
	must(b.refused(c.Key))
	a.keep(c)
	a.give(c)

	for _, lock := range []func(context.Context, string, ...hasp.Option) (*hasp.Lease, error){
		e.newClient().TryLock, e.newClient().Lock,
	} {
		err := e.within("a Lock WithShared", func() error {
			return errOf(lock(e.ctx, e.key(), hasp.WithShared()))
		})
		must(is("a Lock WithShared over a driver without Shared", err, errors.ErrUnsupported))
	}
}

// sharedTerms lets a shared hold end beside a longer one. In the first case the short hold begins
// first. In the second case the long hold begins first. In the third case both holds are renewed
// for the short term, which must not shorten the long hold.
func sharedTerms(e *env) {
	must(e.each(3, func(n int) {
		a := e.open()
		b := e.open()
		key := e.key()
		var long, short backend.Claim
		if n == 0 {
			short = b.join(key, e.term)
			long = a.join(key, e.long)
		} else {
			long = a.join(key, e.long)
			short = b.join(key, e.term)
		}

		if n == 2 {
			a.keep(long)
			mustInTime(b.renews(short), "renewal of a shared hold of %v", e.term)
			once := long
			once.TTL = e.term
			a.keep(once) // must not shorten the term
		}

		a.outlast(e.term)
		mustf(b.refused(key), "after the end of the shorter of two shared holds")
		b.lost(short, "a shared hold that has expired beside a longer one")
		a.keep(long)

		// After the longer hold is released, the key must become free when the next short hold ends,
		// although that hold began beside a longer one.
		b.join(key, e.term)
		a.give(long)
		must(b.grantedAtLast(key))
	}))
}

// sharedRenewRaises renews a short hold for a long term while a longer hold exists, and releases
// the longer hold after the short term.
func sharedRenewRaises(e *env, a, b *driver) {
	c := a.join(e.key(), e.term)
	other := b.join(c.Key, e.long)
	c.TTL = e.long
	mustInTime(a.renews(c), "renewal right after the grant")

	a.outlast(e.term)
	b.give(other)
	mustf(b.refused(c.Key), "a term of %v after a renewal for %v", e.term, e.long)
	a.keep(c)
	a.give(c)
}

// sharedKeep releases two shared holds with a KeepUntil, which must have no effect.
func sharedKeep(e *env, a, b *driver, key string) {
	for range 2 {
		one := a.join(key, e.long)
		two := b.join(key, e.long)
		mustf(a.release(keptFor(one, e.long)), "release of a shared hold with KeepUntil")
		mustf(b.refused(key), "after the release of one of two shared holds")
		mustf(b.release(keptFor(two, e.long)), "release of a shared hold with KeepUntil")
		mustf(a.granted(key), "after the release of all shared holds with KeepUntil")
	}
}

// sharedWaitTogether lets four shared Waits wait for one key. After its release all must get it,
// and the key must be refused to others until the last has released it.
func sharedWaitTogether(e *env) {
	drivers := []*driver{e.open(), e.open()}
	a := e.open()
	c := a.hold(e.long)
	ws := make([]*pendingWait, 4)
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

// sharedOrder lets two readers, a writer and two more readers wait. Each group of readers must get
// the key together, and the writer must get it between the groups.
func sharedOrder(e *env, a, b *driver) {
	c := a.hold(e.long)
	ws := make([]*pendingWait, 5)
	const writer = 2
	for i := range ws {
		claim := e.claimOf(c.Key, e.long)
		claim.Shared = i != writer
		ws[i] = b.want(claim)
		e.queued(a, c.Key, i+1)
	}

	const granted = "one of readers and a writer in a line"
	const behind = "Wait behind another that cannot share the key"
	a.give(c)
	ws[0].granted(granted)
	ws[1].granted(granted)
	b.give(ws[0].c)
	ws[writer].stillWaits(behind)
	ws[1].use()

	ws[writer].granted(granted)
	ws[3].stillWaits(behind)
	ws[writer].use()

	ws[3].granted(granted)
	ws[4].granted(granted)
	b.give(ws[3].c, ws[4].c)
}
