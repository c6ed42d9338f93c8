package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
	"runtime/metrics"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/fairlock"
	"github.com/hasplock/hasp/internal/clock"
	"github.com/hasplock/hasp/internal/crew"
	"github.com/hasplock/hasp/pubsublock"
	"github.com/hasplock/hasp/spinlock"
)

// order is a message to a client.
type order struct {
	Op string // "start", "touched" or "drain"

	// These fields are for "start".
	URL    string        `json:",omitempty"`
	Passed []string      `json:",omitempty"` // the addresses for a client of Redis that is passed to the strategy
	Plant  string        `json:",omitempty"`
	Owner  string        `json:",omitempty"`
	Seed   uint64        `json:",omitempty"`
	Term   time.Duration `json:",omitempty"`
	Bare   float64       `json:",omitempty"` // share of locks without a fence
}

// report is a message from a client. The comment of a field names the kinds of reports that have
// this field.
type report struct {
	What string // the kind: one of the constants below
	ID   int64  `json:",omitempty"` // the turn's number within the process
	Key  int    `json:",omitempty"`
	T    int64  `json:",omitempty"` // the time by clock.Now; for a touch, when the resource is used

	Fenced  bool   `json:",omitempty"` // asks
	Fence   uint64 `json:",omitempty"` // got, touch
	Plan    int64  `json:",omitempty"` // got: when the caller plans to unlock
	Expires int64  `json:",omitempty"` // got, touch, ended, freed: the time until which the lease is trusted without a renewal
	End     int64  `json:",omitempty"` // ended: when the caller stopped trusting the lease; lossy, thinned: the end of the fault
	Lost    bool   `json:",omitempty"` // ended, freed: the lease was lost
	Left    string `json:",omitempty"` // closed: what is left in the process
	Use     use    `json:",omitzero"`  // used
}

// The kinds of reports.
const (
	asks   = "asks"   // a caller calls Lock
	refuse = "refuse" // Lock returned an error
	got    = "got"    // Lock returned a lease
	touch  = "touch"  // a caller uses the resource; the answer is "touched"
	ended  = "ended"  // the lease was lost, or Unlock is about to be called
	freed  = "freed"  // Unlock has returned
	used   = "used"   // what the process uses
	closed = "closed" // all callers have ended, and the client is closed

	// No client sends these kinds.
	died    = "died"    // the process was killed
	lossy   = "lossy"   // a fault may have taken locks away
	thinned = "thinned" // a fault may have taken locks away on a minority
)

// use is what a process uses: bytes of live objects, goroutines and descriptors.
type use [3]int

func present() use {
	live := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	metrics.Read(live)
	files, _ := os.ReadDir("/proc/self/fd") // none on a system without /proc
	return use{int(live[0].Value.Uint64()), runtime.NumGoroutine(), len(files)}
}

// client is the state of a client process.
type client struct {
	order
	c       *hasp.Client
	close   func() // closes c
	ids     atomic.Int64
	drained atomic.Bool

	parent  *crew.Pipe
	using   sync.Mutex // held by the caller that uses the resource
	touched chan struct{}
}

// work carries out orders until the parent ends.
func work(parent *crew.Pipe) {
	logging.Disable() // go-redis logs servers that are down
	w := &client{parent: parent, touched: make(chan struct{}, 1)}
	for {
		var o order
		if parent.Receive(&o) != nil {
			os.Exit(0)
		}
		switch o.Op {
		case "start":
			w.order = o
			go w.run()
		case "touched":
			w.touched <- struct{}{}
		case "drain":
			w.drained.Store(true)
		}
	}
}

func (w *client) report(r report) {
	_ = w.parent.Send(r) // if the parent has ended, Receive fails and so ends this process
}

// run runs all callers until they have ended. Then it closes the Client, and reports the goroutines
// and descriptors that are left.
func (w *client) run() {
	// The runtime opens descriptors with the first listener, and never closes them.
	if l, err := net.Listen("tcp", "127.0.0.1:0"); err == nil {
		l.Close()
	}
	go w.watch()
	before := present()
	// the store may be in the middle of a fault
	repeatUntil(patience, 20*time.Millisecond, func() (ok bool) {
		w.c, w.close, ok = w.open(patience)
		return ok
	})

	var wg sync.WaitGroup
	for i := range callers {
		r := rand.New(rand.NewPCG(w.Seed, uint64(i)))
		wg.Go(func() { w.call(r) })
	}

	wg.Wait()

	w.close()
	r := report{What: closed}
	gone := repeatUntil(patience, 20*time.Millisecond, func() bool {
		after := present()
		r.Left = fmt.Sprintf("goroutines and descriptors before %v, after %v", before[1:],
			after[1:])
		return after[1] <= before[1] && after[2] <= before[2]
	})

	if gone {
		r.Left = ""
	}
	w.report(r)
}

// watch reports once a second what the process uses.
func (w *client) watch() {
	for range time.Tick(time.Second) {
		runtime.GC()
		w.report(report{What: used, Use: present()})
	}
}

type newDriver func(redis.UniversalClient) (backend.Driver, error)

func over[O any](f func(redis.UniversalClient, *O) (backend.Driver, error)) newDriver {
	return func(rdb redis.UniversalClient) (backend.Driver, error) { return f(rdb, nil) }
}

// newDrivers has the strategies whose drivers a program may pass a client of Redis to.
var newDrivers = map[string]newDriver{
	"spinlock":   over(spinlock.NewDriver),
	"pubsublock": over(pubsublock.NewDriver),
	"fairlock":   over(fairlock.NewDriver),
}

// open opens a Client whose driver has the bug w.Plant, by URL, or over a client of go-redis, as a
// program passes it. The pool of that client is small, so it runs out.
func (w *client) open(limit time.Duration) (c *hasp.Client, closeAll func(), ok bool) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	config, err := hasp.ParseURL(w.URL)
	var d backend.Driver
	end := func() {}
	if len(w.Passed) > 0 {
		rdb := redis.NewClient(&redis.Options{Addr: w.Passed[0], PoolSize: 3})
		end = func() { rdb.Close() }
		d, err = newDrivers[config.Strategy](rdb)
	} else if err == nil {
		d, err = config.Driver(ctx)
	}
	if err != nil {
		end()
		return nil, nil, false
	}

	// The Timeouts of the clients differ, because redlock once relied on that of the caller. The seed
	// contains the number of the client above bit 32.
	parts := time.Duration(1 + (w.Seed>>32+w.Seed)%4)
	o := &hasp.Options{TTL: w.Term, Timeout: w.Term / parts, Owner: w.Owner}
	if c, err = hasp.New(plant(w.Plant, d), o); err != nil {
		panic(err)
	}
	return c, func() { c.Close(); end() }, true
}

// call acts as one caller. After an error it pauses, so that other callers go first. The random
// numbers of a round do not depend on the results of earlier rounds.
func (w *client) call(r *rand.Rand) {
	for !w.drained.Load() {
		if !w.round(rand.New(rand.NewPCG(r.Uint64(), 0))) {
			time.Sleep(w.Term/20 + rand.N(w.Term/3))
		}
		time.Sleep(time.Duration(r.IntN(3000)) * time.Microsecond)
	}
}

// round uses locks once, as a program does.
func (w *client) round(r *rand.Rand) (had bool) {
	key := r.IntN(keys)
	switch x := r.IntN(60); {
	case x == 0:
		return w.many(r)
	case x < 5: // a Client for one Lock, as in "hasp run"
		c, end, ok := w.open(2 * time.Second)
		if !ok {
			return false
		}
		defer end()
		return w.turn(c, r, key)
	}

	return w.turn(w.c, r, key)
}

// many locks hundreds of keys at the same time.
func (w *client) many(r *rand.Rand) (had bool) {
	var wg sync.WaitGroup
	for k := range cold {
		own := rand.New(rand.NewPCG(r.Uint64(), 0))
		wg.Go(func() { w.turn(w.c, own, keys+k) })
	}
	wg.Wait()
	return true
}

// hold is a lease of a turn.
type hold struct {
	id    int64
	lease *hasp.Lease
	lost  chan int64  // receives the time when the lease's context ended
	stop  func() bool // ends the wait for the end of the lease's context
}

// turn carries out one Lock, and then acts as the holder.
func (w *client) turn(c *hasp.Client, r *rand.Rand, key int) (had bool) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	ask := report{What: asks, ID: w.ids.Add(1), Key: key, Fenced: r.Float64() >= w.Bare}
	opts := w.options(r, ask.Fenced)
	length := time.Duration(r.IntN(20)) * time.Millisecond
	if r.IntN(10) == 0 {
		length = w.terms(r, 0.5, 2)
	}
	blind := r.IntN(3) == 0
	if r.IntN(10) == 0 {
		defer time.AfterFunc(w.terms(r, 0, 2), cancel).Stop()
	}

	ask.T = clock.Now()
	w.report(ask)
	l, err := c.Lock(ctx, names[key], opts...)
	t := clock.Now()
	if err != nil {
		w.report(report{What: refuse, ID: ask.ID})
		return false
	}

	planned := t + int64(length)
	h := &hold{id: ask.ID, lease: l, lost: make(chan int64, 1)}
	w.report(report{What: got, ID: h.id, T: t, Fence: l.Fence(), Plan: planned,
		Expires: expires(l)})
	h.stop = context.AfterFunc(l.Context(), func() { h.lost <- clock.Now() })

	for clock.Now() < planned && l.Err() == nil {
		w.use(h)
		time.Sleep(time.Duration(3+r.IntN(10)) * time.Millisecond)
	}

	if blind {
		w.use(h) // do not check whether the lease is still held
	}
	w.unlock(h)
	return true
}

// terms draws a duration between two multiples of the term.
func (w *client) terms(r *rand.Rand, least, most float64) time.Duration {
	return time.Duration((least + r.Float64()*(most-least)) * float64(w.Term))
}

// options draws the options of a Lock.
func (w *client) options(r *rand.Rand, fenced bool) (opts []hasp.Option) {
	if fenced {
		opts = append(opts, hasp.WithFence())
	}
	for _, o := range []hasp.Option{
		hasp.WithMaxWait(w.terms(r, 0, 2)),
		hasp.WithMaxWait(w.terms(r, 0, 0.1)),
		hasp.WithTTL(w.terms(r, 0.7, 1.7)),
		hasp.WithMinHold(w.terms(r, 0, 0.2)),
		hasp.WithLinger(),
	} {
		if r.IntN(6) == 0 {
			opts = append(opts, o)
		}
	}

	return opts
}

// unlock reports the time until which a lease was trusted. Then it unlocks the lease, and tries
// again after an outage.
func (w *client) unlock(h *hold) {
	end := clock.Now()
	if !h.stop() {
		end = min(end, <-h.lost)
	}
	gone := errors.Is(h.lease.Err(), hasp.ErrLost)
	t := clock.Now()
	until := expires(h.lease)
	w.report(report{What: ended, ID: h.id, T: t, End: min(end, until), Expires: until, Lost: gone})

	done := report{What: freed, ID: h.id}
	repeatUntil(3*time.Second, 10*time.Millisecond, func() bool {
		err := h.lease.Unlock(context.Background())
		done.T = clock.Now()
		done.Lost = errors.Is(err, hasp.ErrLost)
		return err == nil || done.Lost || errors.Is(err, hasp.ErrReleased)
	})

	done.Expires = expires(h.lease)
	w.report(done)
}

// expires returns the time of clock.Now until which a lease is trusted, or a time up to a millisecond
// earlier. expires reads both clocks again if the process was stopped between the two readings.
func expires(l *hasp.Lease) int64 {
	for {
		t := clock.Now()
		left := time.Until(l.Expires())
		if clock.Now()-t < int64(time.Millisecond) {
			return t + int64(left)
		}
	}
}

// use uses the resource, and waits until the resource has answered.
func (w *client) use(h *hold) {
	w.using.Lock()
	defer w.using.Unlock()
	w.report(report{What: touch, ID: h.id, Fence: h.lease.Fence(), Expires: expires(h.lease)})
	<-w.touched
}
