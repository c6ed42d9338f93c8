package conformance

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
)

var waitClauses = given(waiter, []clause{
	{name: "wait-woken", says: saysSignal, check: pairOn(waitWoken),
		why: "Wait for a free key returns with it. A waiter gets the key at whatever moment it is " +
			"released: no release falls between Wait's signal and its attempt."},
	{name: "wait-deadline", says: saysUntil, check: pair(waitDeadline),
		why: "The deadline of a grant by Wait is after the release before it, and has passed " +
			"before another waiter is granted the key."},
	{name: "wait-seen", says: saysUntil, check: waitSeen,
		why: "A driver that has seen a caller wait for longer than a term does not take the key " +
			"before the deadline of that caller's hold."},
	{name: "wait-cancelled", says: saysWaitHeld, check: pair(waitCancelled),
		why: "If its context ends, a Wait returns ErrHeld. After a release of its token, as " +
			"after an unknown outcome, no hold and no place in a queue is left."},
	{name: "wait-dead-context", says: saysWaitCtx, check: waitDeadContext,
		why: "If its context has ended before, a Wait returns and leaves nothing."},
	{name: "wait-cancel-race", says: saysWaitLeaves, check: pair(waitCancelRace),
		why: "If a Wait is cancelled while the key is released, it gets the key or leaves " +
			"nothing. If its error matches its context's error, the engine cleans up."},
	{name: "wait-independent", says: saysIndependent, check: pair(waitIndependent),
		why: "A Wait for one key does not delay callers that want another key. Its end does not " +
			"end another Wait for the same key."},
})

// waitWoken waits for a free key, and then again and again for a key that is released a moment
// later. The pause varies, so that the release meets each step of the Wait.
func waitWoken(e *env, a, b *driver, key string) {
	first := a.wants(key)
	first.granted("Wait for a free key")
	mustf(b.refused(key), "after another's Wait")
	first.use()

	for round := range 60 {
		c := e.claimOf(key, e.long)
		a.take(c)
		w := b.wants(key)
		e.sleep(moment(round))
		a.give(c)
		w.served(fmt.Sprintf("Wait for a key that was released, in round %d,", round))
	}
}

// moment returns a random pause. Over eight rounds the maximum grows from 50 µs to 6.4 ms, so that
// some pauses end within the first steps of a fast driver, and some within those of a slow one.
func moment(round int) time.Duration { return rand.N(50 * time.Microsecond << (round % 8)) }

// waitDeadline lets a Wait last for longer than the term of its own claim. The term must begin with
// the grant, not with the call.
func waitDeadline(e *env, a, b *driver) {
	c := a.hold(e.long)
	called := time.Now()
	w := b.want(e.claimOf(c.Key, e.term))

	a.outlast(e.term)
	released := time.Now()
	a.give(c)
	mustInTime(e.arrives("Wait", w.done), "a hold by Wait for %v", e.term)

	deadline := deadlineOf(w.grant, w.c, called)
	requireInTime(deadline.After(released),
		"the deadline of a grant is %v before the release of the previous hold",
		released.Sub(deadline))
	next := a.wants(c.Key)
	next.granted("Wait for a key whose holder got it by waiting and died")
	require(!deadline.After(time.Now()),
		"the deadline of a hold by Wait is %v after the grant to the next waiter",
		time.Until(deadline))
	next.use()
}

// waitSeen lets a driver see a waiter, which gets the key more than a term later. A driver that
// measures a term from the time at which it first saw a token must then begin again.
func waitSeen(e *env) {
	must(e.each(2, func(i int) {
		a := e.open()
		b := e.open()
		observer := e.open()
		c := e.claim(e.long)
		c.Shared = i == 1 && e.traits.Shared // the second waiter waits for a shared hold
		a.take(c)
		called := time.Now()
		w := b.want(e.claimOf(c.Key, e.term))
		e.queued(observer, c.Key, 1)
		must(observer.refused(c.Key))

		e.sleep(e.term) // now the observer has known of the waiter for longer than a term
		a.give(c)
		mustInTime(e.arrives("Wait", w.done), "a hold by Wait for %v", e.term)
		must(errOf(observer.succeedsAfter(deadlineOf(w.grant, w.c, called), c.Key)))
	}))
}

// waitCancelled cancels a Wait for a held key. The error must match ErrHeld, and nothing may be
// left after the clean-up.
func waitCancelled(e *env, a, b *driver) {
	for range 3 {
		c := a.hold(e.long)
		w := b.wants(c.Key)
		e.sleep(e.term / 4)

		err := w.cancel()
		w.abandon(err)

		// On a slow machine the store may not have answered yet. Then err is only the context's.
		requireInTime(errors.Is(err, backend.ErrHeld) || !errors.Is(err, context.Canceled),
			"a cancelled Wait had no answer of the store in %v, or did not report it: %w", e.term/4,
			err)
		must(is("a cancelled Wait for a held key", err, backend.ErrHeld))
		if e.traits.Ordered && e.inspector {
			e.until("the end of a cancelled waiter's place", func() bool {
				return len(a.inspect(c.Key).Waiters) == 0
			})
		}

		a.give(c)
		e.sleep(e.term / 8) // so that a Wait that goes on by mistake takes the key
		mustf(a.grantedAtLast(c.Key), "after a cancelled Wait and the release")
	}
}

// waitDeadContext begins Waits with a context that has ended. A Wait for a free key may still be
// granted. If it is not, nothing may be left in the store.
func waitDeadContext(e *env) {
	a := e.open()
	b := e.open()
	ctx := e.deadContext()
	holder := a.hold(e.long)
	free := e.claim(e.long)
	held := e.claimOf(holder.Key, e.long)

	for _, c := range []backend.Claim{free, held} {
		err := e.within("Wait with a context that has ended", func() error {
			return errOf(b.wait(ctx, c))
		})

		require(err != nil || c.Key != held.Key, "wait for a held key: granted")
		if err == nil {
			b.give(c)
		}
	}

	a.give(holder)
	for _, c := range []backend.Claim{free, held} {
		mustf(a.grantedAtLast(c.Key), "after a Wait with a context that had ended")
	}
}

// waitCancelRace cancels a Wait and releases the key at almost the same time. The maximum of the
// first pause grows every 8 rounds, and that of the second pause every 2 rounds. So over the rounds
// many pairs of short and long pauses occur.
func waitCancelRace(e *env, a, b *driver) {
	for round := range 60 {
		c := a.hold(e.long)
		w := b.wants(c.Key)
		e.sleep(moment(round / 8))

		// In even rounds, cancel after the release. In odd rounds, cancel before, during or after
		// the release.
		if round%2 == 0 {
			a.give(c)
			e.sleep(moment(round / 2))
			w.stop()
		} else {
			time.AfterFunc(moment(round/2), w.stop)
			a.give(c)
		}

		err := e.arrives("a Wait cancelled at the release", w.done)
		w.abandon(err)
		if err == nil {
			mustf(b.renews(w.c), "renewal of a grant to a Wait that was cancelled at the release")
			b.give(w.c)
		} else {
			require(w.grant == backend.Grant{}, "a Wait returned a grant with the error %q", err)
		}

		mustf(a.grantedAtLast(c.Key), "round %d: after a Wait cancelled at the release", round)
	}
}

// waitIndependent lets two Waits block on one key. Meanwhile another key must be granted to a Wait,
// and a third key to an Acquire. Then one of the two Waits is cancelled, and the other must go on.
func waitIndependent(e *env, a, b *driver) {
	blocked := a.hold(e.long)
	soon := a.hold(e.long)
	first := b.wants(blocked.Key)
	second := b.wants(blocked.Key)
	e.sleep(e.term / 8)

	next := b.wants(soon.Key)
	e.sleep(e.term / 8)

	must(e.within("Acquire of one key while others wait for another", func() error {
		return b.granted(e.key())
	}))
	a.give(soon)
	next.granted("Wait for one key while others wait for another")

	second.abandon(second.cancel())
	a.give(blocked)
	first.served("Wait after the end of another for the same key")
}

var orderClauses = []clause{
	{name: "order-of-arrival", need: ordered, says: saysGivesUp, check: orderOfArrival,
		why: "Ordered drivers serve the waiters of all drivers in order of arrival. Waiters that " +
			"give up leave the order of the others as it was."},
	{name: "order-no-barging", need: ordered, says: saysBarge, check: orderNoBarging,
		why: "Ordered drivers refuse an Acquire while any caller waits."},
	{name: "order-not-claimed", need: all(waiter, notOrdered), says: saysClaims,
		check: pair(orderNotClaimed),
		why:   "A driver that always keeps the order of arrival is Ordered by its Traits."},
}

// line lets n waiters of several drivers queue for a held key. The argument quit has the indexes of
// the waiters that give up. Then the holder releases the key. The result has the indexes of the
// others, in the order in which they get the key.
func (e *env) line(n int, quit ...int) (order []int) {
	a := e.open()
	c := a.hold(e.long)
	ws := e.queue(c.Key, n, a, e.drivers()...)
	for _, i := range quit {
		// Clean up, as the engine does. Otherwise this waiter's place could still get the key.
		ws[i].abandon(ws[i].cancel())
	}

	a.give(c)
	var mu sync.Mutex // guards order
	must(e.each(n, func(i int) {
		if slices.Contains(quit, i) {
			return
		}

		ws[i].granted("one of the waiters in a line")
		mu.Lock()
		order = append(order, i)
		mu.Unlock()
		ws[i].d.give(ws[i].c)
	}))
	return order
}

// queue lets the drivers in turn begin n Waits for a held key. After it has begun a Wait, queue
// blocks until driver a reports the new waiter.
func (e *env) queue(key string, n int, a *driver, drivers ...*driver) []*pendingWait {
	ws := make([]*pendingWait, n)
	for i := range ws {
		ws[i] = drivers[i%len(drivers)].wants(key)
		e.queued(a, key, i+1)
	}
	return ws
}

// inOrder ends the try unless the waiters got the key in the order in which they began.
func (e *env) inOrder(got []int) {
	verdict := require
	if !e.inspector {
		// On a slow machine the Waits may have joined the queue in another order, because the
		// method queued only sleeps without Inspect.
		verdict = requireInTime
	}
	verdict(slices.IsSorted(got), "waiters got the key in order %v", got)
}

// orderOfArrival lets six waiters queue. The first and the fourth give up.
func orderOfArrival(e *env) { e.inOrder(e.line(6, 0, 3)) }

// orderNoBarging makes attempts, which must all be refused while waiters get the key.
func orderNoBarging(e *env) {
	a := e.open()
	b := e.open()
	stranger := e.open()
	c := a.hold(e.long)
	ws := e.queue(c.Key, 4, a, b)
	var quit atomic.Bool
	barged := e.begin(func() error {
		return e.each(4, func(int) {
			for !quit.Load() {
				must(stranger.refused(c.Key))
				e.sleep(rand.N(200 * time.Microsecond))
			}
		})
	})

	// The last waiter keeps the key until the attempts have ended. Otherwise the key would be free.
	a.give(c)
	last := ws[len(ws)-1]
	err := e.each(len(ws), func(i int) {
		ws[i].granted("a waiter")
		e.sleep(e.term / 40)
		if ws[i] != last {
			b.give(ws[i].c)
		}
	})

	// Report an attempt that got the key before err, which may be a consequence.
	quit.Store(true)
	mustf(<-barged, "while others waited")
	must(err)
	last.use()
}

// orderNotClaimed gives a driver many chances to break the order, and returns when the driver has
// broken it once. A driver that never breaks the order must be Ordered by its Traits.
func orderNotClaimed(e *env, a, b *driver) {
	// First, an Acquire competes with a waiter.
	for i := range 30 {
		c := a.hold(e.long)
		w := b.wants(c.Key)
		e.sleep(e.term / 40)

		// In odd rounds use a new driver, because driver a may have learned from its own release
		// that callers wait.
		by := a
		if i%2 == 1 {
			by = e.open()
		}

		a.give(c)

		barge := e.claimOf(c.Key, e.long)
		_, err := by.acquire(barge)
		if err == nil {
			by.give(barge)
		}

		w.granted("a waiter")
		b.give(w.c)

		if err == nil {
			return // the Acquire got the key before the waiter
		}

		must(is("acquire a key that a waiter wants", err, backend.ErrHeld))
	}

	// Then waiters compete with one another.
	for range 6 {
		if !slices.IsSorted(e.line(6)) {
			return
		}
	}

	fail("in 30 tries no Acquire got a key before a waiter, " +
		"and 6 times 6 waiters got it in order of arrival: claim Ordered")
}
