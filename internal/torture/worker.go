package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
	"runtime/metrics"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9/logging"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/hostclock"
	"github.com/hasplock/hasp/internal/walljump"
)

// role is the environment variable that makes this program a client.
const role = "HASP_TORTURE_CLIENT"

// order is what a client is told, a line each on standard input.
type order struct {
	Op string // "start", "touched", "clock", "fragile", "drain" or "close"

	// For start.
	URL     string        `json:",omitempty"`
	Plant   string        `json:",omitempty"`
	Direct  []string      `json:",omitempty"` // addresses of the servers, for planted bugs
	Dir     string        `json:",omitempty"` // of the files, for planted bugs
	Owner   string        `json:",omitempty"`
	Seed    uint64        `json:",omitempty"`
	Keys    []string      `json:",omitempty"`
	Callers int           `json:",omitempty"`
	Term    time.Duration `json:",omitempty"`
	Timeout time.Duration `json:",omitempty"`
	Bare    float64       `json:",omitempty"` // share of locks without a fence

	// For start and clock.
	Ahead time.Duration `json:",omitempty"` // of the wall clock

	// For touched.
	ID      int64 `json:",omitempty"`
	Refused bool  `json:",omitempty"`
}

// report is what a client tells, a line each on standard output.
type report struct {
	What string // see the constants
	ID   int64  `json:",omitempty"` // of the turn, within the process
	Key  int    `json:",omitempty"`
	T    int64  `json:",omitempty"` // when, by hostclock
	Wall int64  `json:",omitempty"` // when, by the wall, in Unix nanoseconds

	Fenced  bool   `json:",omitempty"` // asks
	Fence   uint64 `json:",omitempty"` // got, touch
	Plan    int64  `json:",omitempty"` // got: until when it means to hold
	Expires int64  `json:",omitempty"` // got, touch, ended: until when the lease is trusted without a renewal
	End     int64  `json:",omitempty"` // ended: until when it was trusted at the latest, or was about to be unlocked
	Lost    bool   `json:",omitempty"` // ended, freed: the lease was lost
	Err     string `json:",omitempty"` // failed, freed

	Goroutines, Files [2]int // closed: before and after
	Use               *use   `json:",omitempty"` // used
}

// use is what a process takes of the machine.
type use struct {
	Heap       uint64 // bytes of what lives
	Goroutines int
	Files      int // descriptors
}

// What a report tells of.
const (
	began  = "began"  // the client is open
	asks   = "asks"   // a caller calls Lock
	failed = "failed" // Lock returned an error
	got    = "got"    // Lock returned a lease
	touch  = "touch"  // the resource is to be used; wants an answer
	ended  = "ended"  // the lease was lost, or Unlock is about to be called
	freed  = "freed"  // Unlock has returned
	used   = "used"   // what the process takes of the machine
	idle   = "idle"   // all callers have ended
	closed = "closed" // the client is closed
	broke  = "broke"  // the client itself failed
)

// client is one process.
type client struct {
	order
	c       *hasp.Client
	ids     atomic.Int64
	drained atomic.Bool

	mu      sync.Mutex // guards all below
	out     *json.Encoder
	answers map[int64]chan order
}

// work does what in says and ends when in does: then whoever gave the orders
// is gone.
func work(in io.Reader, out io.Writer) {
	bearLimits()
	logging.Disable() // go-redis', of servers that are down
	w := &client{out: json.NewEncoder(out), answers: map[int64]chan order{}}
	orders := json.NewDecoder(bufio.NewReader(in))
	var before, files = 0, 0
	for {
		var o order
		if orders.Decode(&o) != nil {
			os.Exit(0)
		}
		switch o.Op {
		case "start":
			walljump.Set(o.Ahead)
			warm()
			go w.watch()
			before, files = runtime.NumGoroutine(), openFiles()
			w.order = o
			if err := w.open(); err != nil {
				w.tell(report{What: broke, Err: err.Error()})
				continue
			}
			w.tell(report{What: began})
			go w.run()
		case "touched":
			w.mu.Lock()
			answer := w.answers[o.ID]
			delete(w.answers, o.ID)
			w.mu.Unlock()
			answer <- o
		case "clock":
			walljump.Set(o.Ahead)
		case "fragile":
			if err := dieOfLimits(); err != nil {
				w.tell(report{What: broke, Err: err.Error()})
			}
		case "drain":
			w.drained.Store(true)
		case "close":
			go w.close(before, files)
		}
	}
}

func (w *client) open() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	config, err := hasp.ParseURL(w.URL)
	if err != nil {
		return err
	}
	// The store may be in the middle of a fault.
	for {
		d, err := config.Driver(ctx)
		if err == nil {
			d, err = plant(w.Plant, w.Direct, w.Dir, d)
		}
		if err == nil {
			w.c = hasp.New(d, &hasp.Options{TTL: w.Term, Timeout: w.Timeout, Owner: w.Owner})
			return nil
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func (w *client) tell(r report) {
	w.mu.Lock()
	defer w.mu.Unlock()
	r.Wall = time.Now().UnixNano()
	_ = w.out.Encode(r) // if nobody reads, the input ends, too
}

// watch tells once a second what the process takes of the machine.
func (w *client) watch() {
	live := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	for range time.Tick(time.Second) {
		runtime.GC()
		metrics.Read(live)
		w.tell(report{What: used, T: hostclock.Now(), Use: &use{live[0].Value.Uint64(), runtime.NumGoroutine(), openFiles()}})
	}
}

func (w *client) run() {
	var wg sync.WaitGroup
	for i := range w.Callers {
		wg.Go(func() { w.call(rand.New(rand.NewPCG(w.Seed, uint64(i)))) })
	}
	wg.Wait()
	w.tell(report{What: idle})
}

// call is one caller, who after an error lets others go first.
func (w *client) call(r *rand.Rand) {
	for !w.drained.Load() {
		if !w.turn(r) {
			time.Sleep(w.Term/20 + rand.N(w.Term/3))
		}
		time.Sleep(time.Duration(r.IntN(3000)) * time.Microsecond)
	}
}

// turn is one Lock and what follows it.
func (w *client) turn(r *rand.Rand) (had bool) {
	id, key := w.ids.Add(1), r.IntN(len(w.Keys))
	var opts []hasp.Option
	fenced := r.Float64() >= w.Bare
	if fenced {
		opts = append(opts, hasp.WithFence())
	}
	if r.IntN(6) == 0 {
		opts = append(opts, hasp.WithMaxWait(time.Duration(r.Float64()*2*float64(w.Term))))
	}
	length := time.Duration(r.IntN(20)) * time.Millisecond
	if r.IntN(10) == 0 {
		length = time.Duration((0.5 + 1.5*r.Float64()) * float64(w.Term))
	}
	blind := r.IntN(3) == 0

	w.tell(report{What: asks, ID: id, Key: key, T: hostclock.Now(), Fenced: fenced})
	lease, err := w.c.Lock(context.Background(), w.Keys[key], opts...)
	t := hostclock.Now()
	if err != nil {
		w.tell(report{What: failed, ID: id, T: t, Err: kindOf(err)})
		return false
	}
	w.tell(report{What: got, ID: id, T: t, Fence: lease.Fence(), Plan: t + int64(length), Expires: expires(lease)})
	var lost atomic.Int64
	lost.Store(1<<63 - 1)
	heard := make(chan struct{})
	forget := context.AfterFunc(lease.Context(), func() {
		lost.Store(hostclock.Now())
		close(heard)
	})
	for hostclock.Now() < t+int64(length) && lease.Err() == nil {
		w.use(id, lease)
		time.Sleep(time.Duration(3+r.IntN(10)) * time.Millisecond)
	}
	if blind {
		w.use(id, lease) // without a look whether it still holds
	}
	if !forget() {
		<-heard
	}
	end := hostclock.Now()
	gone := errors.Is(lease.Err(), hasp.ErrLost)
	told, exp := hostclock.Now(), expires(lease)
	w.tell(report{What: ended, ID: id, T: told, End: min(end, exp, lost.Load()), Expires: exp, Lost: gone})
	for try := 0; ; try++ {
		err := lease.Unlock(context.Background())
		t := hostclock.Now()
		again := err != nil && !errors.Is(err, hasp.ErrLost) && !errors.Is(err, hasp.ErrReleased) && try < 20
		if again {
			time.Sleep(10 * time.Millisecond)
			continue
		}
		done := report{What: freed, ID: id, T: t, Expires: expires(lease), Lost: errors.Is(err, hasp.ErrLost)}
		if err != nil {
			done.Err = kindOf(err)
		}
		w.tell(done)
		return true
	}
}

// expires is until when a lease is trusted, by hostclock, or up to a
// millisecond less. A process that is stopped between two looks at clocks looks
// again.
func expires(l *hasp.Lease) int64 {
	for {
		t := hostclock.Now()
		left := time.Until(l.Expires())
		if hostclock.Now()-t < int64(time.Millisecond) {
			return t + int64(left)
		}
	}
}

// use has the resource used, whatever it says.
func (w *client) use(id int64, lease *hasp.Lease) {
	answer := make(chan order, 1)
	w.mu.Lock()
	w.answers[id] = answer
	w.mu.Unlock()
	w.tell(report{What: touch, ID: id, T: hostclock.Now(), Fence: lease.Fence(), Expires: expires(lease)})
	<-answer
}

// kindOf is what a program would tell errors by.
func kindOf(err error) string {
	switch {
	case errors.Is(err, hasp.ErrHeld):
		return "held"
	case errors.Is(err, hasp.ErrLost):
		return "lost"
	case errors.Is(err, hasp.ErrReleased):
		return "released"
	case errors.Is(err, hasp.ErrClosed), errors.Is(err, hasp.ErrInvalid):
		return err.Error()
	}
	return "outage"
}

// close closes the client and counts what is left of it.
func (w *client) close(goroutines, files int) {
	r := report{What: closed}
	if err := w.c.Close(); err != nil {
		r.Err = err.Error()
	}
	own := goroutines + 1 // this one
	for began := time.Now(); time.Since(began) < patience; time.Sleep(20 * time.Millisecond) {
		r.Goroutines, r.Files = [2]int{own, runtime.NumGoroutine()}, [2]int{files, openFiles()}
		if r.Goroutines[1] <= own && r.Files[1] <= files {
			break
		}
	}
	if r.Goroutines[1] > own {
		stacks := make([]byte, 1<<16)
		fmt.Fprintf(os.Stderr, "%s\n", stacks[:runtime.Stack(stacks, true)])
	}
	w.tell(r)
}

// warm has the runtime open what it keeps for all connections.
func warm() {
	if l, err := net.Listen("tcp", "127.0.0.1:0"); err == nil {
		l.Close()
	}
}

// openFiles counts descriptors, where the system tells.
func openFiles() int {
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return 0
	}
	return len(all)
}
