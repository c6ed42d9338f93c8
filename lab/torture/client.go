package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
	"runtime/metrics"
	"slices"
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

// order is the first message to a client. The second message, of any kind, lets its callers end.
type order struct {
	URL     string
	Passed  string // the address for a client of Redis that is passed to the strategy, or empty
	Plant   string
	Owner   string
	Seed    uint64
	Term    time.Duration
	Timeout time.Duration
}

// report is a message from a client: a turn, or the end of the client.
type report struct {
	Turn   *turn  `json:",omitempty"`
	Closed bool   `json:",omitempty"` // all callers have ended, and the Client is closed
	Left   string `json:",omitempty"` // what is left in the process then, or what grew before
}

// use is what a process uses: bytes of live objects, goroutines and descriptors.
type use [3]int

func present() use {
	live := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	metrics.Read(live)
	files, _ := os.ReadDir("/proc/self/fd") // none on a system without /proc
	return use{int(live[0].Value.Uint64()), runtime.NumGoroutine(), len(files)}
}

// growth says by how much what a process uses may grow. A connection needs 10 KiB. go-redis keeps
// references to as many closed connections as were ever idle at the same time, and the connections
// of the largest burst, up to ten for each CPU and server. Slow links make bursts larger.
var growth = use{4 << 20, 20, 10 + 40*runtime.GOMAXPROCS(0)}

// enough is the least number of samples that leftovers compares. One sample is taken each second.
const enough = 40

// leftovers returns a text if a process has more goroutines or descriptors than before it opened
// its Client. It also compares two quarters of the life of the process. It returns a text if the
// least use in the last quarter was more than 1.25 times the least use in the second, plus a slack.
// The least use leaves out bursts, such as hundreds of locks at the same time.
func leftovers(samples []use, before, after use) (text string) {
	if after[1] > before[1] || after[2] > before[2] {
		text = fmt.Sprintf("goroutines and descriptors before %v, after %v; ", before[1:],
			after[1:])
	}
	if len(samples) < enough {
		return text
	}
	quarter := len(samples) / 4
	for i, slack := range growth {
		least := func(n int) int {
			part := samples[n*quarter : (n+1)*quarter]
			return slices.MinFunc(part, func(a, b use) int { return cmp.Compare(a[i], b[i]) })[i]
		}
		before := least(1)
		after := least(3)
		if after > before*5/4+slack {
			text += fmt.Sprintf("%d %s in the second quarter of the run and %d in the last; ",
				before, []string{"bytes", "goroutines", "descriptors"}[i], after)
		}
	}

	return text
}

// client is the state of a client process.
type client struct {
	order
	c       *hasp.Client
	close   func() // closes c
	ids     atomic.Int64
	drained atomic.Bool
	parent  *crew.Pipe
}

// work carries out orders until the parent ends.
func work(parent *crew.Pipe) {
	logging.Disable() // go-redis logs servers that are down
	w := &client{parent: parent}
	if parent.Receive(&w.order) == nil {
		go w.run()
	}
	for parent.Receive(new(order)) == nil {
		w.drained.Store(true)
	}
	os.Exit(0)
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

	var samples []use
	for !w.drained.Load() {
		time.Sleep(time.Second)
		runtime.GC()
		samples = append(samples, present())
	}
	wg.Wait()
	w.close()

	r := report{Closed: true}
	repeatUntil(patience, 20*time.Millisecond, func() bool {
		r.Left = leftovers(samples, before, present())
		return r.Left == ""
	})
	w.report(r)
}

// newDriver returns the driver of a strategy on one Redis over the client that a program passes.
func newDriver(strategy string, rdb *redis.Client) (backend.Driver, error) {
	switch strategy {
	case "spinlock":
		return spinlock.NewDriver(rdb, nil)
	case "pubsublock":
		return pubsublock.NewDriver(rdb, nil)
	}
	return fairlock.NewDriver(rdb, nil)
}

// open opens a Client whose driver has the bug w.Plant, by URL, or over a client of go-redis, as a
// program passes it. The pool of that client is small, so it runs out.
func (w *client) open(limit time.Duration) (c *hasp.Client, closeAll func(), ok bool) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	config, err := hasp.ParseURL(w.URL)
	var d backend.Driver
	end := func() {}
	if w.Passed != "" {
		rdb := redis.NewClient(&redis.Options{Addr: w.Passed, PoolSize: 3})
		end = func() { rdb.Close() }
		d, err = newDriver(config.Strategy, rdb)
	} else if err == nil {
		d, err = config.Driver(ctx)
	}
	if err != nil {
		end()
		return nil, nil, false
	}

	o := &hasp.Options{TTL: w.Term, Timeout: w.Timeout, Owner: w.Owner}
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
	case x == 0: // hundreds of keys at the same time
		var wg sync.WaitGroup
		for k := range cold {
			own := rand.New(rand.NewPCG(r.Uint64(), 0))
			wg.Go(func() { w.turn(w.c, own, keys+k) })
		}
		wg.Wait()
		return true
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

// turn carries out one Lock, and then acts as the holder.
func (w *client) turn(c *hasp.Client, r *rand.Rand, key int) (had bool) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	t := &turn{ID: w.ids.Add(1), Key: key, Fenced: r.IntN(10) >= 3}
	opts := w.options(r, t.Fenced)
	length := time.Duration(r.IntN(20)) * time.Millisecond
	if r.IntN(10) == 0 {
		length = w.terms(r, 0.5, 2)
	}
	blind := r.IntN(3) == 0
	if r.IntN(10) == 0 {
		defer time.AfterFunc(w.terms(r, 0, 2), cancel).Stop()
	}

	t.Asked = clock.Now()
	w.report(report{Turn: t})
	l, err := c.Lock(ctx, names[key], opts...)
	t.Got = clock.Now()
	if err != nil {
		t.Refused = true
		w.report(report{Turn: t})
		return false
	}

	ended := make(chan int64, 1) // receives the time when the lease's context ended
	stop := context.AfterFunc(l.Context(), func() { ended <- clock.Now() })
	t.Fence = l.Fence()
	t.Plan = t.Got + int64(length)
	t.Expires = expires(l)
	w.report(report{Turn: t})
	for clock.Now() < t.Plan && l.Err() == nil {
		w.use(t, l)
		time.Sleep(time.Duration(3+r.IntN(10)) * time.Millisecond)
	}
	if blind {
		w.use(t, l) // without a check whether the lease is still held
	}

	t.End = clock.Now()
	if !stop() {
		t.End = min(t.End, <-ended)
	}
	if errors.Is(l.Err(), hasp.ErrLost) {
		t.Lost = clock.Now()
	}
	t.Expires = expires(l)
	t.End = min(t.End, t.Expires)
	w.report(report{Turn: t})
	w.unlock(t, l)
	return true
}

// use uses the resource.
func (w *client) use(t *turn, l *hasp.Lease) {
	t.Used[1] = clock.Now()
	if t.Used[0] == 0 {
		t.Used[0] = t.Used[1]
	}
	t.Expires = expires(l)
	w.report(report{Turn: t})
}

// unlock unlocks a lease, and tries again after an outage.
func (w *client) unlock(t *turn, l *hasp.Lease) {
	repeatUntil(3*time.Second, 10*time.Millisecond, func() bool {
		err := l.Unlock(context.Background())
		lost := errors.Is(err, hasp.ErrLost)
		if lost && t.Lost == 0 {
			t.Lost = clock.Now()
		}
		return err == nil || lost || errors.Is(err, hasp.ErrReleased)
	})
	t.Expires = expires(l)
	w.report(report{Turn: t})
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

// expires returns the time of clock.Now until which a lease is trusted, or a time up to a
// millisecond earlier. expires reads both clocks again if the process was stopped between the two
// readings.
func expires(l *hasp.Lease) int64 {
	for {
		t := clock.Now()
		left := time.Until(l.Expires())
		if clock.Now()-t < int64(time.Millisecond) {
			return t + int64(left)
		}
	}
}
