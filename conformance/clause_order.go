package conformance

import (
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
)

var orderClauses = []clause{
	{name: "order-of-arrival", need: ordered, says: saysOrdered, check: orderOfArrival,
		why: "Ordered drivers serve the waiters of all drivers in order of arrival."},
	{name: "order-kept", need: ordered, says: saysGivesUp, check: orderKept,
		why: "Waiters that give up leave the order of the others as it was."},
	{name: "order-no-barging", need: ordered, says: saysBarge, check: orderNoBarging,
		why: "Ordered drivers refuse an Acquire while any caller waits."},
	{name: "order-not-claimed", need: unordered, says: saysClaims, check: pair(orderNotClaimed),
		why: "A driver that always keeps the order of arrival is Ordered by its Traits."},
}

// line lets n waiters of several drivers queue for a held key. The waiters in quit
// give up. Then the holder releases the key. line returns the order in which the
// others get it.
func (e *env) line(n int, quit ...int) []int {
	a := e.open()
	drivers := e.drivers()
	c := a.hold(e.long)
	ws := e.queue(c.Key, n, a, drivers...)
	for _, i := range quit {
		ws[i].abandon(ws[i].cancel()) // as the engine does: otherwise its place is still served
	}

	a.give(c)
	return e.served(n, func(i int) func() {
		if slices.Contains(quit, i) {
			return nil
		}
		ws[i].granted("one of the waiters in a line")
		return func() { ws[i].d.give(ws[i].c) }
	})
}

// queue lets n waiters of several drivers queue for a held key, one after another. It
// watches the queue through the driver a.
func (e *env) queue(key string, n int, a *driver, drivers ...*driver) []*wanted {
	ws := make([]*wanted, n)
	for i := range ws {
		ws[i] = drivers[i%len(drivers)].wants(key)
		e.queued(a, key, i+1)
	}
	return ws
}

// ownersInLine lets three waiters queue for a held key, and returns their owners.
func (e *env) ownersInLine(key string, a, b *driver) (owners []string) {
	for _, w := range e.queue(key, 3, a, b) {
		owners = append(owners, w.c.Owner)
	}
	return owners
}

// served returns the order in which n waiters get a key. get waits for the grant of
// waiter i and returns the function that releases it, or nil if i does not wait.
func (e *env) served(n int, get func(i int) (release func())) (order []int) {
	var mu sync.Mutex // guards order
	must(e.each(n, func(i int) {
		release := get(i)
		if release == nil {
			return
		}
		mu.Lock()
		order = append(order, i)
		mu.Unlock()
		release()
	}))
	return order
}

// inOrder ends the try unless waiters were served in the order in which they began.
func (e *env) inOrder(got []int) {
	verdict := require
	if !e.inspector {
		verdict = requireInTime // they may have arrived in that order
	}
	verdict(slices.IsSorted(got), "waiters got the key in order %v", got)
}

func orderOfArrival(e *env) { e.inOrder(e.line(6)) }

func orderKept(e *env) { e.inOrder(e.line(6, 0, 3)) }

// orderNoBarging makes attempts all the time while waiters are served.
func orderNoBarging(e *env) {
	a, b, stranger := e.open(), e.open(), e.open()
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

	a.give(c)
	last := ws[len(ws)-1]
	err := e.each(len(ws), func(i int) {
		ws[i].granted("a waiter")
		e.sleep(e.term / 40)
		if ws[i] != last {
			b.give(ws[i].c)
		}
	})

	quit.Store(true)
	mustf(<-barged, "while others waited")
	must(err)
	last.use()
}

// orderNotClaimed gives a driver many chances to break the order. A driver that
// never does so keeps the order.
func orderNotClaimed(e *env, a, b *driver) {
	for i := range 30 {
		c := a.hold(e.long)
		w := b.wants(c.Key)
		e.sleep(e.term / 40)

		// A driver may know from its release that others wait. A new driver does not.
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
			return
		}
		must(is("acquire a key that a waiter wants", err, backend.ErrHeld))
	}

	for range 6 {
		if !slices.IsSorted(e.line(6)) {
			return
		}
	}

	fail("in 30 tries no Acquire got a key before a waiter, and 6 times 6 waiters got it in order of arrival: claim Ordered")
}
