package conformance

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/hasplock/hasp/backend"
)

var orderClauses = []clause{
	{
		name:  "order-of-arrival",
		why:   "Ordered drivers serve the waiters of all drivers in order of arrival.",
		says:  saysOrdered,
		need:  ordered,
		check: func(e *env) error { return e.orderly(nil) },
	},
	{
		name:  "order-kept",
		why:   "Waiters that give up leave the order of the others as it was.",
		says:  saysGivesUp,
		need:  ordered,
		check: func(e *env) error { return e.orderly([]int{0, 3}) },
	},
	{
		name:  "order-no-barging",
		why:   "Ordered drivers refuse an Acquire while any caller waits.",
		says:  saysBarge,
		need:  ordered,
		check: orderNoBarging,
	},
	{
		name:  "place-stays",
		why:   "With Claim.Stays a place in the queue outlives its Wait. The next Wait has it, and Release removes it.",
		says:  saysStays,
		need:  all(turns, inspector),
		check: placeStays,
	},
	{
		name:  "order-not-claimed",
		why:   "A driver that always keeps the order of arrival is Ordered by its Traits.",
		says:  saysClaims,
		need:  unordered,
		check: orderNotClaimed,
	},
}

// queued waits until n waiters for key are in the queue. If Inspect does not report
// them, it only gives them time.
func (e *env) queued(d *driver, key string, n int) {
	if !e.inspector || !e.traits.Ordered {
		e.sleep(e.term / 8)
		return
	}
	must(e.poll(fmt.Sprintf("%d waiters in the result of Inspect", n), func() (bool, error) { return len(d.inspect(key).Waiters) >= n, nil }))
}

// line lets n waiters of several drivers queue for a held key. Those of quit give
// up. Then the holder releases the key. line returns the order in which the others
// get it.
func (e *env) line(n int, quit []int) (got []int, err error) {
	a := e.open()
	drivers := []*driver{e.open(), e.open(), e.open()}
	c := a.hold(e.h.Long)
	ws := make([]*wanted, n)
	for i := range ws {
		ws[i] = drivers[i%len(drivers)].want(e.claimOf(c.Key, e.h.Long))
		e.queued(a, c.Key, i+1)
	}
	for _, i := range quit {
		ws[i].stop()
		if err := e.arrives("a cancelled Wait", ws[i].done); err == nil {
			return nil, errors.New("wait for a held key: granted")
		}
	}
	a.give(c)
	var mu sync.Mutex // guards got
	return got, e.each(n, func(i int) error {
		if slices.Contains(quit, i) {
			return nil
		}
		if err := e.arrives("one of the waiters in a line", ws[i].done); err != nil {
			return err
		}
		mu.Lock()
		got = append(got, i)
		mu.Unlock()
		return drivers[i%len(drivers)].release(ws[i].c)
	})
}

func (e *env) orderly(quit []int) error {
	const n = 6
	got, err := e.line(n, quit)
	if err != nil {
		return err
	}
	if !slices.IsSorted(got) {
		err := fmt.Errorf("%d waiters got the key in order %v", n, got)
		if !e.inspector {
			// The waiters may have arrived in that order.
			return slow("%w", err)
		}
		return err
	}
	return nil
}

// orderNoBarging makes attempts all the time while waiters are served.
func orderNoBarging(e *env) error {
	a, b, stranger := e.open(), e.open(), e.open()
	c := a.hold(e.h.Long)
	ws := make([]*wanted, 4)
	for i := range ws {
		ws[i] = b.want(e.claimOf(c.Key, e.h.Long))
		e.queued(a, c.Key, i+1)
	}
	quit, barged := make(chan struct{}), make(chan error, 1)
	go func() {
		barged <- e.each(4, func(int) error {
			for {
				select {
				case <-quit:
					return nil
				default:
				}
				if err := stranger.refused(c.Key); err != nil {
					return err
				}
				e.sleep(rand.N(200 * time.Microsecond))
			}
		})
	}()
	a.give(c)
	last := len(ws) - 1
	err := e.each(len(ws), func(i int) error {
		if err := e.arrives("a waiter", ws[i].done); err != nil {
			return err
		}
		e.sleep(e.term / 40)
		if i < last {
			return b.release(ws[i].c)
		}
		return nil
	})
	close(quit)
	mustf(<-barged, "while others waited")
	must(err)
	b.keep(ws[last].c)
	return b.release(ws[last].c)
}

// placeStays stops the first of three waiters, which then waits again, and the last
// one, which then releases its place.
func placeStays(e *env) error {
	a, b := e.open(), e.open()
	c := a.hold(e.h.Long)
	first, last := e.claimOf(c.Key, e.h.Long), e.claimOf(c.Key, e.h.Long)
	first.Stays, last.Stays = true, true
	w := b.want(first)
	e.queued(a, c.Key, 1)
	second := a.want(e.claimOf(c.Key, e.h.Long))
	e.queued(a, c.Key, 2)
	x := b.want(last)
	e.queued(a, c.Key, 3)
	e.sleep(e.term / 4)
	for _, stopped := range []*wanted{w, x} {
		stopped.stop()
		switch err := e.arrives("a cancelled Wait", stopped.done); {
		case errors.Is(err, context.Canceled) && !errors.Is(err, backend.ErrHeld):
			return slow("a cancelled Wait had no answer of the store in %v, or did not tell: %w", e.term/4, err)
		case !errors.Is(err, backend.ErrHeld):
			return is("a cancelled Wait for a held key", err, backend.ErrHeld)
		}
	}
	e.sleep(e.term / 4)
	if n := len(a.inspect(c.Key).Waiters); n != 3 {
		return fmt.Errorf("%d waiters when two have stopped whose places stay, want 3", n)
	}
	must(is("release of a place", b.release(last), backend.ErrLost))
	err := e.poll("the end of a place that was given up", func() (bool, error) { return len(a.inspect(c.Key).Waiters) == 2, nil })
	must(err)
	a.give(c)
	w = b.want(first)
	must(e.arrives("the second Wait of a place that stays", w.done))
	b.give(first)
	must(e.arrives("the waiter behind a place that stayed", second.done))
	return a.release(second.c)
}

// orderNotClaimed gives a driver many chances to break the order. A driver that
// never does so keeps the order.
func orderNotClaimed(e *env) error {
	a, b := e.open(), e.open()
	for range 30 {
		c := a.hold(e.h.Long)
		w := b.want(e.claimOf(c.Key, e.h.Long))
		e.sleep(e.term / 40)
		a.give(c)
		barge := e.claimOf(c.Key, e.h.Long)
		_, err := a.acquire(barge)
		if err == nil {
			a.give(barge)
		}
		must(e.arrives("a waiter", w.done))
		b.give(w.c)
		if err == nil {
			return nil
		}
		if !errors.Is(err, backend.ErrHeld) {
			return err
		}
	}
	for range 6 {
		got, err := e.line(6, nil)
		if err != nil || !slices.IsSorted(got) {
			return err
		}
	}
	return errors.New("in 30 tries no Acquire got a key before a waiter, and 6 times 6 waiters got it in order of arrival: claim Ordered")
}
