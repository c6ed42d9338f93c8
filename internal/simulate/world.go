package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/hostclock"
)

const (
	keyCount = 2
	longTerm = time.Minute      // of leases whose records stay until they are released, since a run is shorter
	shortMax = 2 * time.Second  // max_ttl of redlock, if there are no long terms
	day      = 24 * time.Hour   // max_ttl of redlock under a leader
	stuck    = 5 * time.Minute  // of real time, for one seed
	settled  = 12 * time.Second // the clean-up ends within this time after the faults; some Timeouts
)

func key(i int) string { return fmt.Sprintf("key%d", i) }

// world is some Clients of one store in a bubble, and callers that use them.
type world struct {
	t     *testing.T
	kind  string
	seed  uint64
	store store
	book  *book
	calls calls
	r     *rand.Rand // of the goroutine that runs the world
	// breaks means that callers break keys. It is set before they start.
	breaks bool

	suspends bool         // the host of the Clients sleeps now and then
	asleep   atomic.Int64 // how long it has slept, as a time.Duration

	mu      sync.Mutex // guards all below
	clients int
	quiet   map[*client][]span // when a Client's link was silent
	away    []span             // when a majority of the store answered no Client
}

// span is a time of silence. Its end is zero while the silence lasts.
type span struct{ from, to time.Time }

// simulate runs one seed of one kind of store. It reports errors to t, and returns
// how many holds were granted. It calls synctest.Test, so t has no bubble yet.
func simulate(t *testing.T, kind string, seed uint64) (granted int) {
	return simulateCalls(t, kind, seed, sound, nil)
}

// simulateCalls is simulate with other calls. If found is not nil, it gets the errors
// instead of t.
func simulateCalls(t *testing.T, kind string, seed uint64, calls calls, found func(string)) (granted int) {
	// The time of a bubble stands still while a goroutine computes. So a timer
	// outside the bubble ends a seed that computes without end.
	name := fmt.Sprintf("-kind %s -from %d", kind, seed)
	defer time.AfterFunc(stuck, func() { panic(name + ": no end after " + stuck.String()) }).Stop()
	defer func() {
		if p := recover(); p != nil {
			panic(fmt.Sprint(name, ": ", p)) // a goroutine is left
		}
	}()
	synctest.Test(t, func(t *testing.T) {
		r := rand.New(rand.NewPCG(seed, 0))
		w := &world{t: t, kind: kind, seed: seed, calls: calls, r: r, quiet: map[*client][]span{}}
		w.book = newBook(t, name)
		w.book.found = found
		w.book.same = strings.HasPrefix(kind, "redlock")
		w.store = kinds[kind](t, r)
		if kind == "leader" {
			w.lead()
		} else {
			w.live()
		}
		granted = w.book.granted
	})
	return granted
}

// live runs callers and faults together. Then it heals all faults and checks what
// is left.
func (w *world) live() {
	var stay []*client
	for range 2 + w.r.IntN(4) {
		stay = append(stay, w.client(w.r))
	}
	w.breaks = w.r.IntN(2) == 0
	w.suspends = w.r.IntN(2) == 0
	closeEarly := w.r.IntN(5) == 0
	for i, c := range stay {
		// Close leaves the holds of its Client to their terms.
		c.long = w.store.longest() >= longTerm && !(closeEarly && i == 0)
	}
	over := w.start(stay)
	if closeEarly {
		time.Sleep(time.Duration(w.r.Int64N(int64(2 * time.Second))))
		w.close(stay[0])
		stay = stay[1:]
	}
	select {
	case <-over:
	case <-time.After(10 * time.Minute):
		w.book.errorf("callers are stuck")
		<-over
	}

	w.book.checkAll()
	w.store.heal()
	// Short terms end meanwhile. Leases with long terms were unlocked or lost. Their
	// Clients are open, and this time is enough to remove what is left of them.
	time.Sleep(settled)
	w.overtake(stay)
	w.succeed(stay)
	time.Sleep(settled)
	for _, l := range w.store.left() {
		w.book.errorf("left: %s", l)
	}
	for _, c := range stay {
		w.close(c)
	}
	w.programs()
	w.book.audit()
	time.Sleep(time.Hour) // for calls that the network holds; synctest reports a goroutine that stays
}

// start starts callers and faults. It closes over when they have ended.
func (w *world) start(stay []*client) (over chan struct{}) {
	var all sync.WaitGroup
	for i := range 6 + w.r.IntN(6) {
		a := &caller{w: w, c: stay[w.r.IntN(len(stay))], r: rand.New(rand.NewPCG(w.seed, uint64(i)+1))}
		all.Go(a.run)
	}
	all.Go(func() { w.faults(rand.New(rand.NewPCG(w.seed, 1<<32)), stay) })
	over = make(chan struct{})
	go func() {
		all.Wait()
		close(over)
	}()
	return over
}

// programs opens Clients for one lock each, one after another, as "hasp run" does.
// The servers are well, and some links are slow. Anything that a Client leaves at
// Close would block others for a term.
func (w *world) programs() {
	s, ok := w.store.(*servers)
	if !ok {
		return // a link of the model may lose the release
	}
	first := w.client(w.r)
	well := w.well(first)
	w.close(first)
	if !well {
		return
	}

	for range 4 {
		c := w.open(w.r, hasp.DefaultTimeout)
		for _, p := range s.links[len(s.links)-1].proxies {
			p.Delay(time.Duration(w.r.IntN(40)) * time.Millisecond)
		}
		began := time.Now()
		l, err := c.Lock(context.Background(), key(0))
		if err != nil {
			w.book.errorf("Lock without a fault: %v", err)
			continue
		}
		w.book.took(l, 0, began)
		err = l.Unlock(context.Background())
		w.close(c)
		synctest.Wait() // until the servers learn that the connections are closed
		for _, rest := range w.store.left() {
			w.book.errorf("left at Close, after an Unlock that returned %v: %s", err, rest)
		}
	}
}

// well reports whether c can lock a key, without a fault. A server that was restarted
// votes only after a while.
func (w *world) well(c *client) bool {
	err := errors.New("not asked")
	for range 10 + int(w.store.longest().Seconds()) {
		var l *hasp.Lease
		if l, err = c.Lock(context.Background(), key(0)); err == nil {
			_ = l.Unlock(context.Background())
			return true
		}
		time.Sleep(time.Second)
	}
	w.book.errorf("Lock without a fault: %v", err)
	return false
}

// overtakes is how long a caller may wait for a key that shared callers keep taking.
const overtakes = 2 * time.Second

// overtake runs shared callers that never leave a key free, and an exclusive caller that
// must get it nevertheless. No fault happens.
func (w *world) overtake(stay []*client) {
	if w.kind == "polled" || len(stay) == 0 || !stay[0].shares || !w.well(stay[0]) {
		return // a store of memlock has no queue for callers that poll
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var readers sync.WaitGroup
	over := make(chan struct{})
	for i := range 5 {
		c, length := stay[w.r.IntN(len(stay))], time.Duration(20+w.r.IntN(100))*time.Millisecond
		time.Sleep(time.Duration(i) * 5 * time.Millisecond)
		readers.Go(func() {
			for {
				select {
				case <-over:
					return
				default:
				}
				began := time.Now()
				l, err := c.Lock(ctx, key(0), hasp.WithShared())
				if err != nil {
					w.book.errorf("a shared Lock without a fault: %v", err)
					return
				}
				w.book.take(l, 0, group{began, true})
				time.Sleep(length)
				_ = l.Unlock(ctx)
			}
		})
	}
	time.Sleep(200 * time.Millisecond)

	began := time.Now()
	l, err := stay[w.r.IntN(len(stay))].Lock(ctx, key(0))
	if d := time.Since(began); err != nil || d > overtakes {
		w.book.errorf("an exclusive Lock beside shared ones: %v after %v", err, d)
	}
	if err == nil {
		w.book.took(l, 0, began)
		_ = l.Unlock(ctx)
	}
	close(over)
	readers.Wait()
}

// succession is what is known of callers that hold a key one after another.
type succession struct {
	w     *world
	mu    sync.Mutex // guards all below
	taken bool
	freed time.Time // when the last one was about to free the key
}

// hold holds the key for a while, then ends the context of its call, and cleans up. Without
// a fault it keeps the key meanwhile.
func (s *succession) hold(cancel func(), lasts, cleans time.Duration, held func() error) {
	s.mu.Lock()
	if d := time.Since(s.freed); s.taken || d > overtakes {
		s.w.book.errorf("without a fault, a holder came %v after the last one; that one still held the key: %v", d, s.taken)
	}
	s.taken = true
	s.mu.Unlock()

	time.Sleep(lasts)
	cancel()
	time.Sleep(cleans)
	if err := held(); err != nil {
		s.w.book.errorf("without a fault, a holder that cleaned up for %v: %v", cleans, err)
	}

	s.mu.Lock()
	defer s.mu.Unlock()
	s.taken, s.freed = false, time.Now()
}

// succeed runs two leaders and a DoAll that hold a key one after another, and clean up for
// longer than a term after the end of their contexts. No fault happens.
func (w *world) succeed(stay []*client) {
	if len(stay) == 0 || !w.well(stay[0]) {
		return
	}
	var all sync.WaitGroup
	s := succession{w: w, freed: time.Now()}
	for i := range 3 {
		t := &tracked{client: stay[w.r.IntN(len(stay))]}
		lasts, cleans := time.Duration(w.r.IntN(200))*time.Millisecond, time.Duration(w.r.IntN(1500))*time.Millisecond
		all.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			var err error
			if i == 0 {
				err = w.calls.doAll(ctx, t, []string{key(0), key(1)}, func(_ context.Context, ls *hasp.Leases) error {
					for i, l := range ls.All() {
						w.book.took(l, 0, t.began[i])
					}
					s.hold(cancel, lasts, cleans, ls.Err)
					return nil
				})
			} else {
				err = w.calls.lead(ctx, t, key(0), func(_ context.Context, l *hasp.Lease) error {
					w.book.took(l, 0, t.began[len(t.began)-1])
					s.hold(cancel, lasts, cleans, l.Err)
					return nil
				})
			}
			if err != nil {
				w.book.errorf("Lead or DoAll without a fault: %v", err)
			}
		})
	}
	all.Wait()
}

// leader is a driver that keeps a key. The engine of a Client checks its clock each
// second, which would take too long here.
type leader struct {
	backend.Driver
	w     *world
	claim backend.Claim
}

// ask makes a call to the store, and reports its error.
func (l leader) ask(call func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	err := call(ctx)
	if err != nil {
		l.w.book.errorf("the leader: %v", err)
	}
	return err
}

// renew renews the claim some times, each after a sixth of a day.
func (l leader) renew(times int) {
	for range times {
		time.Sleep(day / 6)
		_ = l.ask(func(ctx context.Context) (err error) {
			l.Renew(ctx, []backend.Claim{l.claim}, func(_ int, _ backend.Grant, e error) { err = e })
			return err
		})
	}
}

// lead runs a leader that renews for a month or longer, without other callers.
// Then one server is unreachable to it, and another loses its data. Others come
// before the leader's term has ended, and must not get the key.
func (w *world) lead() {
	s := w.store.(*servers)
	d, _ := s.link(nil, 0)
	defer d.Close()
	l := leader{d, w, backend.Claim{Key: key(0), Token: "leader", TTL: day / 2, Timeout: time.Second, Fenced: true}}
	if l.ask(func(ctx context.Context) error { _, err := d.Acquire(ctx, l.claim); return err }) != nil {
		return
	}
	l.renew((30 + w.r.IntN(10)) * 6)

	// The leader keeps a bare quorum. Then one of its servers loses its data.
	order := w.r.Perm(len(s.nodes))
	s.links[0].proxies[order[0]].Stall()
	l.renew(4)
	s.nodes[order[1]].Restart(false)
	for range 4 {
		time.Sleep(time.Duration(w.r.IntN(60)) * time.Minute)
		c := w.client(w.r)
		if l, err := c.TryLock(context.Background(), key(0)); err == nil {
			w.book.errorf("two holders of %s", l.Key())
		}
		w.close(c)
	}

	s.links[0].proxies[order[0]].Flow()
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = d.Release(ctx, l.claim) // too few servers have a record
	w.book.granted++
}

// client opens a Client.
func (w *world) client(r *rand.Rand) *client {
	timeout := 50*time.Millisecond + time.Duration(r.IntN(300))*time.Millisecond
	if r.IntN(4) == 0 {
		timeout *= 5 // longer than many callers wait
	}
	return w.open(r, timeout)
}

// open opens a Client with a Timeout.
func (w *world) open(r *rand.Rand, timeout time.Duration) *client {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.clients++
	c := &client{w: w, name: fmt.Sprintf("client%d", w.clients), timeout: timeout}
	own := rand.New(rand.NewPCG(w.seed, 1<<33+uint64(w.clients)))
	driver, link := w.store.link(own, c.timeout)
	c.link, c.shares = link, driver.Traits().Shared
	t := timed{driver.(backend.Inspector), &c.slowest}
	if waiter, ok := driver.(backend.Waiter); ok {
		driver, c.waits = timedWaiter{t, waiter}, true
	} else {
		driver = t
	}
	opts := &hasp.Options{
		TTL: hasp.MinTTL + time.Duration(r.IntN(400))*time.Millisecond, Timeout: c.timeout,
		Owner: c.name, Observe: w.book.observe(c.name),
	}

	// Worlds of other seeds make Clients meanwhile.
	sleepy.Lock()
	defer sleepy.Unlock()
	hostclock.Suspended = func() time.Duration { return time.Duration(w.asleep.Load()) }
	c.Client = hasp.New(driver, opts)
	return c
}

// sleepy guards hostclock.Suspended, which is one for the process.
var sleepy sync.Mutex

// close closes a Client and reports a Close that takes too long.
func (w *world) close(c *client) {
	began := time.Now()
	_ = c.Close()
	if d := time.Since(began); d > c.timeout+4*time.Second { // drivers wait for calls in flight
		w.book.errorf("Close of %s took %v", c.name, d)
	}
}
