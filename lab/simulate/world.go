package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/clock"
)

// KeyCount is the number of keys that most callers choose from.
const KeyCount = 2

// LongTerm is longer than a run. So a record with this term stays until it is released.
const LongTerm = time.Minute

// stuck is the real time after which a seed counts as stuck.
const stuck = 5 * time.Minute

// Key returns the key with the number i.
func Key(i int) string { return fmt.Sprintf("key%d", i) }

// World is the Clients of one store in a synctest bubble, and the callers of these Clients.
type World struct {
	*book
	Store Store
	R     *rand.Rand // only for the goroutine that runs the world

	t     *testing.T
	kind  Kind
	seed  uint64
	calls calls
	real  bool // the links are wires
	// breaks means that callers break keys. It is set before the callers start.
	breaks bool

	suspends bool         // the host of the Clients sleeps now and then
	asleep   atomic.Int64 // how long the host has slept, as a time.Duration

	mu      sync.Mutex // guards all fields below
	clients int
	// when a Client's link was silent; under nil, when a majority of the store answered no Client
	quiet map[*client][]span
}

// span is a period of silence. Its end, the field to, is zero while the silence lasts.
type span struct{ from, to time.Time }

// find runs seeds until one of them reports an error that contains the string text, and fails the
// test if no seed does. The kind's store or the calls contain a planted bug.
func find(t *testing.T, kind Kind, calls calls, text string) {
	t.Helper()
	var mu sync.Mutex
	var all []string
	found := false
	seed := uint64(0)
	for seed < 300 && !found {
		seed++
		run(t, kind, seed, calls, func(err string) {
			mu.Lock()
			defer mu.Unlock()
			all = append(all, err)
			found = found || strings.Contains(err, text)
		})
	}

	if !found {
		t.Errorf("not found; %d other errors: %.1000q", len(all), all)
		return
	}

	t.Logf("seed %d, %d errors", seed, len(all))
}

// run runs one seed of a kind of store, and returns the number of holds. It reports errors to t, or
// to the function found if that is set. It calls synctest.Test, so t must not be in a bubble.
func run(t *testing.T, kind Kind, seed uint64, calls calls, found func(string)) (granted int) {
	// The time of a bubble stands still while a goroutine computes. So a timer
	// outside the bubble ends a seed that computes without end.
	name := fmt.Sprintf("-kind %s -from %d", kind.Name, seed)
	defer time.AfterFunc(stuck, func() { panic(name + ": no end after " + stuck.String()) }).Stop()
	defer func() {
		if p := recover(); p != nil {
			panic(fmt.Sprint(name, ": ", p)) // synctest panics if a goroutine is left
		}
	}()

	synctest.Test(t, func(t *testing.T) {
		r := rand.New(rand.NewPCG(seed, 0))
		w := &World{t: t, kind: kind, seed: seed, calls: calls, R: r, quiet: map[*client][]span{}}
		w.book = newBook(t, name)
		w.found = found
		w.same = kind.SameFences
		w.Store = kind.Open(t, r)
		_, inMemory := w.Store.(*model)
		w.real = !inMemory
		w.live()
		granted = w.granted
	})

	return granted
}

// live runs callers and faults together. Then it heals all faults and checks what is left.
func (w *World) live() {
	var stay []*client
	for range 2 + w.R.IntN(4) {
		stay = append(stay, w.client(w.R))
	}
	w.breaks = w.R.IntN(2) == 0
	w.suspends = w.R.IntN(2) == 0
	closeEarly := w.R.IntN(5) == 0
	for i, c := range stay {
		// After Close, holds of the Client stay until their terms end. So their terms must be
		// short.
		c.long = w.Store.Longest() >= LongTerm && !(closeEarly && i == 0)
	}

	fast := w.kind.Fast
	if r := rand.New(rand.NewPCG(w.seed, 1<<34)); fast == 0 && r.IntN(2) == 0 {
		fast = 0.009 * r.Float64()
	}
	w.early = time.Duration(fast * float64(maxMinHold))
	over := w.startCallers(stay)
	go w.hurry(fast, over)
	if closeEarly {
		time.Sleep(time.Duration(w.R.Int64N(int64(2 * time.Second))))
		w.close(stay[0])
		stay = stay[1:]
	}

	select {
	case <-over:
	case <-time.After(10 * time.Minute):
		w.errorf("callers are stuck")
		<-over
	}

	w.checkAll()
	w.Store.Heal()
	// Short terms end during this sleep. Leases with long terms were unlocked or lost. Their
	// Clients are still open, and have enough time to remove what is left of these leases.
	time.Sleep(settled)
	w.succeed(stay)
	time.Sleep(settled)
	for _, l := range w.Store.Left() {
		w.errorf("left: %s", l)
	}
	for _, c := range stay {
		w.close(c)
	}
	w.programs()
	w.audit()
	// let calls that hang in the network end; synctest reports a goroutine that stays
	time.Sleep(time.Hour)
}

// startCallers starts callers and faults. When these have ended, it closes the channel over.
func (w *World) startCallers(stay []*client) (over chan struct{}) {
	var all sync.WaitGroup
	for i := range 6 + w.R.IntN(6) {
		a := &caller{World: w, c: stay[w.R.IntN(len(stay))],
			r: rand.New(rand.NewPCG(w.seed, uint64(i)+1))}
		all.Go(a.run)
	}

	all.Go(func() { w.faults(rand.New(rand.NewPCG(w.seed, 1<<32)), stay) })
	over = make(chan struct{})
	go func() { all.Wait(); close(over) }()
	return over
}

// programs opens Clients for one lock each, one after another, as "hasp run" does. No server fails,
// but some links are slow. A record left at Close would block other callers for a term.
func (w *World) programs() {
	if !w.real {
		return // a link of the model may lose the release
	}
	first := w.client(w.R)
	well := w.canLock(first)
	w.close(first)
	if !well {
		return
	}

	for range 4 {
		c := w.open(w.R, hasp.DefaultTimeout)
		c.link.(*wires).Slow(w.R)
		began := time.Now()
		l, err := c.Lock(context.Background(), Key(0))
		if err != nil {
			w.errorf("Lock without a fault: %v", err)
			continue
		}
		w.took(l, 0, began)
		err = l.Unlock(context.Background())
		w.close(c)
		synctest.Wait() // the servers learn that the connections are closed
		for _, rest := range w.Store.Left() {
			w.errorf("left at Close, after an Unlock that returned %v: %s", err, rest)
		}
	}
}

// canLock reports whether c can lock a key when there is no fault. It asks again for some time,
// because a server that was restarted does not vote immediately.
func (w *World) canLock(c *client) bool {
	err := errors.New("not asked")
	for range 10 + int(w.Store.Longest().Seconds()) {
		var l *hasp.Lease
		if l, err = c.Lock(context.Background(), Key(0)); err == nil {
			_ = l.Unlock(context.Background())
			return true
		}
		time.Sleep(time.Second)
	}

	w.errorf("Lock without a fault: %v", err)
	return false
}

// handOver is the longest time until a free key has its next holder, if there is no fault.
const handOver = 2 * time.Second

// succession checks callers that hold a key one after another.
type succession struct {
	w     *World
	mu    sync.Mutex // guards all fields below
	taken bool
	freed time.Time // when the last holder was about to free the key
}

// hold acts as a holder that no fault disturbs. It ends the context of the holder's call, and then
// cleans up. The holder must have the key until the method hold returns.
func (s *succession) hold(cancel func(), lasts, cleans time.Duration, held func() error) {
	s.mu.Lock()
	if d := time.Since(s.freed); s.taken || d > handOver {
		s.w.errorf("without a fault, a holder came %v after the last one; that one still held the key: %v", d, s.taken)
	}
	s.taken = true
	s.mu.Unlock()

	time.Sleep(lasts)
	cancel()
	time.Sleep(cleans)
	if err := held(); err != nil {
		s.w.errorf("without a fault, a holder that cleaned up for %v: %v", cleans, err)
	}

	s.mu.Lock()
	defer s.mu.Unlock()
	s.taken = false
	s.freed = time.Now()
}

// succeed runs two leaders and a DoAll, without faults. They hold a key one after another, and
// clean up after the end of their contexts, often for longer than a term.
func (w *World) succeed(stay []*client) {
	if len(stay) == 0 || !w.canLock(stay[0]) {
		return
	}
	var all sync.WaitGroup
	s := succession{w: w, freed: time.Now()}
	for i := range 3 {
		t := track(stay[w.R.IntN(len(stay))])
		lasts := time.Duration(w.R.IntN(200)) * time.Millisecond
		cleans := time.Duration(w.R.IntN(1500)) * time.Millisecond
		all.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			var err error
			if i == 0 {
				err = w.calls.doAll(ctx, t, []string{Key(0), Key(1)},
					func(_ context.Context, ls *hasp.Leases) error {
						for _, l := range ls.All() {
							w.took(l, 0, t.began[l])
						}
						s.hold(cancel, lasts, cleans, ls.Err)
						return nil
					})
			} else {
				err = w.calls.lead(ctx, t, Key(0), func(_ context.Context, l *hasp.Lease) error {
					w.took(l, 0, t.began[l])
					s.hold(cancel, lasts, cleans, l.Err)
					return nil
				})
			}
			// Before go-redis uses a TCP connection, it checks that the connection works. It checks
			// no pipe. So earlier faults may leave a Client with dead pipes to a majority.
			if err != nil && !errors.Is(err, io.ErrClosedPipe) {
				w.errorf("Lead or DoAll without a fault: %v", err)
			}
		})
	}

	all.Wait()
}

// settled is the longest time of the clean-up after the faults. It is the sum of some Timeouts and
// terms.
const settled = 12 * time.Second

// client opens a Client with a random Timeout.
func (w *World) client(r *rand.Rand) *client {
	timeout := 50*time.Millisecond + time.Duration(r.IntN(300))*time.Millisecond
	if r.IntN(4) == 0 {
		timeout *= 5 // longer than many callers wait
	}
	return w.open(r, timeout)
}

func (w *World) open(r *rand.Rand, timeout time.Duration) *client {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.clients++
	c := &client{w: w, name: fmt.Sprintf("client%d", w.clients), timeout: timeout}
	own := rand.New(rand.NewPCG(w.seed, 1<<33+uint64(w.clients)))

	// A driver or a Client stores the value that clock.Suspended has at its creation. Worlds of
	// other seeds set this variable too.
	sleepy.Lock()
	defer sleepy.Unlock()
	clock.Suspended = func() time.Duration { return time.Duration(w.asleep.Load()) }
	driver, link := w.Store.Link(own, c.timeout)
	c.link = link
	c.shares = driver.Traits().Shared
	switch driver.(type) {
	case backend.Waiter, backend.Waker:
		c.waits = true
	}

	opts := &hasp.Options{
		TTL: backend.MinTTL + time.Duration(r.IntN(400))*time.Millisecond, Timeout: c.timeout,
		Owner: c.name, Observe: w.observe(c.name),
	}

	c.Client = await.Value(hasp.New(driver, opts))
	return c
}

// sleepy guards clock.Suspended, which all worlds share.
var sleepy sync.Mutex

// close closes a Client and reports a Close that takes too long.
func (w *World) close(c *client) {
	began := time.Now()
	_ = c.Close()
	if d := time.Since(began); d > c.timeout+4*time.Second { // drivers wait for calls in flight
		w.errorf("Close of %s took %v", c.name, d)
	}
}
