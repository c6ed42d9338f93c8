package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

const (
	keyCount = 2
	longTerm = time.Minute      // of a lease whose record nothing but a release removes while a run lasts
	shortMax = 2 * time.Second  // max_ttl of redlock, if there are no long terms
	month    = 24 * time.Hour   // max_ttl of redlock under a leader
	stuck    = 5 * time.Minute  // of real time, for one seed
	settled  = 12 * time.Second // until all clean-up has ended once faults are over: some Timeouts
)

func key(i int) string { return fmt.Sprintf("key%d", i) }

// world is some Clients of one store in a bubble, and callers that use them.
type world struct {
	t     *testing.T
	kind  string
	seed  uint64
	store store
	book  *book

	mu      sync.Mutex // guards all below
	r       *rand.Rand
	clients int
	quiet   map[*client][]span
	away    []span // in which a majority of the store did not answer anybody
	breaks  bool   // callers break keys
}

// span is a time in which a link was silent. The end is zero while it is.
type span struct{ from, to time.Time }

// simulate runs one seed of one kind of store, and reports what went wrong with
// t. It calls synctest.Test, so t has no bubble yet.
func simulate(t *testing.T, kind string, seed uint64) (granted int) {
	// The time of a bubble stands still while a goroutine computes. So a seed that
	// computes for ever is ended from without.
	name := fmt.Sprintf("-kind %s -from %d", kind, seed)
	defer time.AfterFunc(stuck, func() { panic(name + ": no end after " + stuck.String()) }).Stop()
	defer func() {
		if p := recover(); p != nil {
			panic(fmt.Sprint(name, ": ", p)) // a goroutine that is left
		}
	}()
	synctest.Test(t, func(t *testing.T) {
		r := rand.New(rand.NewPCG(seed, 0))
		w := &world{t: t, kind: kind, seed: seed, r: r, quiet: map[*client][]span{}}
		w.book = newBook(t, name)
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

// live lets callers and faults meet, then lets all faults heal and looks what
// is left.
func (w *world) live() {
	var stay []*client
	for range 2 + w.r.IntN(4) {
		stay = append(stay, w.client(w.r))
	}
	w.breaks = w.r.IntN(2) == 0
	closeEarly := w.r.IntN(5) == 0
	for i, c := range stay {
		// What a Client still holds at Close is left to its term.
		c.long = w.store.longest() >= longTerm && !(closeEarly && i == 0)
	}
	var callers sync.WaitGroup
	for i := range 6 + w.r.IntN(6) {
		a := &caller{w: w, c: stay[w.r.IntN(len(stay))], r: rand.New(rand.NewPCG(w.seed, uint64(i)+1))}
		callers.Go(a.run)
	}
	nemesis := rand.New(rand.NewPCG(w.seed, 1<<32))
	faults := make(chan struct{})
	go func(stay []*client) { // stay changes below
		defer close(faults)
		w.faults(nemesis, stay)
	}(stay)
	if closeEarly {
		time.Sleep(time.Duration(w.r.Int64N(int64(2 * time.Second))))
		w.close(stay[0])
		stay = stay[1:]
	}

	done := make(chan struct{})
	go func() {
		callers.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(10 * time.Minute):
		w.book.errorf("callers are stuck")
		<-done
	}
	<-faults
	w.book.look()
	w.store.heal()
	// Short terms end meanwhile. Long ones were unlocked or lost, and their Clients
	// are open and have all this time to remove what is left of them.
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

// programs are Clients that are opened for one lock, one after another, as hasp
// run does, while the servers are well and the links to some of them slow. What
// a Client leaves at Close would be in the way of others for a term.
func (w *world) programs() {
	s, ok := w.store.(*servers)
	if !ok {
		return // the model's links lose what they like
	}
	// Servers that were restarted vote when somebody has waited for them.
	first := w.client(w.r)
	err := errors.New("not asked")
	for range 10 + int(w.store.longest().Seconds()) {
		var l *hasp.Lease
		if l, err = first.Lock(context.Background(), key(0)); err == nil {
			_ = l.Unlock(context.Background())
			break
		}
		time.Sleep(time.Second)
	}
	w.close(first)
	if err != nil {
		w.book.errorf("Lock, while all is well: %v", err)
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
			w.book.errorf("Lock, while all is well: %v", err)
			continue
		}
		w.book.took(l, 0, began)
		err = l.Unlock(context.Background())
		w.close(c)
		synctest.Wait() // a server hears that a connection is closed
		for _, rest := range w.store.left() {
			w.book.errorf("left at Close, after an Unlock that returned %v: %s", err, rest)
		}
	}
}

// lead is a leader that renews for a month or longer, while nobody else comes.
// Then one server cannot be reached, another loses its data, and others come
// before the leader's term has ended. The leader is
// a driver: a Client looks at its clock each second, which takes too long here.
func (w *world) lead() {
	s := w.store.(*servers)
	d, _ := s.link(nil, 0)
	defer d.Close()
	claim := backend.Claim{Key: key(0), Token: "leader", TTL: month / 2, Timeout: time.Second, Fenced: true}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if _, err := d.Acquire(ctx, claim); err != nil {
		w.book.errorf("the leader: %v", err)
		return
	}
	renew := func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		d.Renew(ctx, []backend.Claim{claim}, func(_ int, _ backend.Grant, err error) {
			if err != nil {
				w.book.errorf("the leader: %v", err)
			}
		})
	}
	for range (30 + w.r.IntN(10)) * 6 {
		time.Sleep(month / 6)
		renew()
	}
	// The leader keeps a bare quorum, of which one server then loses its data.
	order := w.r.Perm(len(s.nodes))
	s.links[0].proxies[order[0]].Stall()
	for range 4 {
		time.Sleep(month / 6)
		renew()
	}
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
	ctx, cancel = context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = d.Release(ctx, claim) // of which too few servers have a record
	w.book.granted++
}

// client opens one more Client.
func (w *world) client(r *rand.Rand) *client {
	timeout := 50*time.Millisecond + time.Duration(r.IntN(300))*time.Millisecond
	if r.IntN(4) == 0 {
		timeout *= 5 // longer than many callers wait
	}
	return w.open(r, timeout)
}

// open is client with a Timeout.
func (w *world) open(r *rand.Rand, timeout time.Duration) *client {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.clients++
	c := &client{w: w, name: fmt.Sprintf("client%d", w.clients), timeout: timeout}
	own := rand.New(rand.NewPCG(w.seed, 1<<33+uint64(w.clients)))
	driver, link := w.store.link(own, c.timeout)
	c.link = link
	t := timed{driver.(backend.Inspector), &c.slowest}
	if waiter, ok := driver.(backend.Waiter); ok {
		driver, c.waits = timedWaiter{t, waiter}, true
	} else {
		driver = t
	}
	c.Client = hasp.New(driver, &hasp.Options{
		TTL: hasp.MinTTL + time.Duration(r.IntN(400))*time.Millisecond, Timeout: c.timeout,
		Owner: c.name, Observe: w.book.observe(c.name),
	})
	return c
}

// close closes a Client and reports a Close that takes too long.
func (w *world) close(c *client) {
	began := time.Now()
	_ = c.Close()
	if d := time.Since(began); d > c.timeout+4*time.Second { // drivers wait for calls under way
		w.book.errorf("Close of %s took %v", c.name, d)
	}
}

// faults strikes a while, and heals all.
func (w *world) faults(r *rand.Rand, stay []*client) {
	for range r.IntN(12) {
		time.Sleep(time.Duration(r.Int64N(int64(300 * time.Millisecond))))
		if s, ok := w.store.(*servers); ok && len(s.nodes) > 1 && r.IntN(8) == 0 {
			w.majority(s, r)
			continue
		}
		if r.IntN(4) == 0 {
			c := stay[r.IntN(len(stay))]
			heal := w.silence(c)
			most := 800 * time.Millisecond
			if r.IntN(3) == 0 {
				most = 6 * time.Second // until nothing that the store has said counts any more
			}
			time.Sleep(time.Duration(r.Int64N(int64(most))))
			heal()
			continue
		}
		w.mu.Lock() // no link is added meanwhile
		_, heal := w.store.strike(r, w.book.forget)
		w.mu.Unlock()
		if heal != nil {
			time.Sleep(time.Duration(r.Int64N(int64(500 * time.Millisecond))))
			heal()
		}
	}
}

// silence lets nothing of c through until heal is called, and notes when.
func (w *world) silence(c *client) (heal func()) {
	end := c.link.silence()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.quiet[c] = append(w.quiet[c], span{from: time.Now()})
	return func() {
		w.mu.Lock()
		spans := w.quiet[c]
		spans[len(spans)-1].to = time.Now()
		w.mu.Unlock()
		end() // after that, since an answer takes no time
	}
}

// majority has a majority of the servers be down for a while. On the others are
// the records of a stranger.
func (w *world) majority(s *servers, r *rand.Rand) {
	order := r.Perm(len(s.nodes))
	k := len(s.nodes)/2 + 1
	for _, i := range order[:k] {
		s.nodes[i].Kill()
	}
	w.mu.Lock()
	w.away = append(w.away, span{from: time.Now()})
	w.mu.Unlock()
	for _, i := range order[k:] {
		s.strangers(s.nodes[i], true)
	}
	time.Sleep(time.Duration(r.Int64N(int64(4 * time.Second))))
	w.mu.Lock()
	w.away[len(w.away)-1].to = time.Now()
	w.mu.Unlock()
	for _, i := range order[k:] {
		s.strangers(s.nodes[i], false)
	}
	for _, i := range order[:k] {
		s.nodes[i].Start(true)
	}
}

// unheard reports whether the store has told c nothing from since until now: c's
// link is silent, or a majority of the servers is away.
func (w *world) unheard(c *client, since time.Time) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, all := range [][]span{w.quiet[c], w.away} {
		for _, s := range all {
			if s.from.Before(since) && (s.to.IsZero() || time.Now().Before(s.to)) {
				return true
			}
		}
	}
	return false
}
