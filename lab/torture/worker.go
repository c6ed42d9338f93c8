package main

import (
	"context"
	"fmt"
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
	"github.com/hasplock/hasp/internal/clock"
	"github.com/hasplock/hasp/internal/crew"
)

// order is a message to a client.
type order struct {
	Op string // "start", "touched", "drain" or "close"

	// These fields are for "start".
	URL    string        `json:",omitempty"`
	Plant  string        `json:",omitempty"`
	Owner  string        `json:",omitempty"`
	Seed   uint64        `json:",omitempty"`
	Keys   []string      `json:",omitempty"`
	Term   time.Duration `json:",omitempty"`
	Bare   float64       `json:",omitempty"` // share of locks without a fence
	Passed bool          `json:",omitempty"` // pass a client of Redis to the strategy, if it uses one
	Steady bool          `json:",omitempty"` // avoid hundreds of calls at the same time, because their connections stay in the pool
}

// report is a message from a client. The comment of a field names the kinds of reports that have
// this field.
type report struct {
	What string // the kind: one of the constants below
	ID   int64  `json:",omitempty"` // the turn's number within the process
	Key  int    `json:",omitempty"`
	T    int64  `json:",omitempty"` // the time by clock.Now; for a touch, when the resource is used

	Fenced  bool   `json:",omitempty"` // asks
	Shared  bool   `json:",omitempty"` // asks
	Slot    int    `json:",omitempty"` // got: which slot of a key with slots
	Fence   uint64 `json:",omitempty"` // got, touch
	Plan    int64  `json:",omitempty"` // got: when the caller plans to unlock
	Expires int64  `json:",omitempty"` // got, touch, ended, freed: the time until which the lease is trusted without a renewal
	End     int64  `json:",omitempty"` // ended: when the caller stopped trusting the lease; lossy, thinned: the end of the fault
	Lost    bool   `json:",omitempty"` // ended, freed: the lease was lost
	Err     string `json:",omitempty"` // failed, freed

	Goroutines, Files [2]int `json:",omitzero"`  // closed: before and after
	Use               *use   `json:",omitempty"` // used
}

// use counts the live bytes, goroutines and descriptors of a process.
type use struct {
	Heap       uint64 // bytes of live objects
	Goroutines int
	Files      int // descriptors
}

// The kinds of reports.
const (
	began  = "began"  // the client is open
	asks   = "asks"   // a caller calls Lock
	failed = "failed" // Lock returned an error
	got    = "got"    // Lock returned a lease
	touch  = "touch"  // a caller uses the resource; the answer is "touched"
	ended  = "ended"  // the lease was lost, or Unlock is about to be called
	freed  = "freed"  // Unlock has returned
	used   = "used"   // the process's memory, goroutines and descriptors
	idle   = "idle"   // all callers have ended
	closed = "closed" // the client is closed
	broke  = "broke"  // the harness failed

	// No client sends these kinds.
	died    = "died"    // the process was killed
	lossy   = "lossy"   // a fault may have taken locks away
	thinned = "thinned" // a fault may have taken locks away on a minority
)

// client is the state of a client process.
type client struct {
	order
	c       *hasp.Client
	clients sync.Map    // the clients of Redis that were passed
	shares  atomic.Bool // the driver has Traits.Shared
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
	var goroutines, files int // before the client opens
	for {
		var o order
		if parent.Receive(&o) != nil {
			os.Exit(0)
		}
		switch o.Op {
		case "start":
			warm()
			w.order = o
			go w.watch()
			goroutines, files = runtime.NumGoroutine(), openFiles()
			if err := w.open(); err != nil {
				w.report(report{What: broke, Err: err.Error()})
				continue
			}
			w.report(report{What: began})
			go w.run()
		case "touched":
			w.touched <- struct{}{}
		case "drain":
			w.drained.Store(true)
		case "close":
			go w.close(goroutines, files)
		}
	}
}

// open opens the Client. It tries for up to a minute, because the store may be in the middle of a
// fault.
func (w *client) open() (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	repeatUntil(time.Minute, 20*time.Millisecond, func() bool {
		w.c, err = w.dial(ctx)
		return err == nil
	})
	return err
}

// dial opens a Client, whose driver has the bug w.Plant.
func (w *client) dial(ctx context.Context) (*hasp.Client, error) {
	config, err := hasp.ParseURL(w.URL)
	if err != nil {
		return nil, err
	}
	var d backend.Driver
	var rdb redis.UniversalClient
	if w.Passed {
		rdb, d, err = passed(config)
	}
	if rdb == nil {
		d, err = config.Driver(ctx)
	} else {
		w.clients.Store(rdb, true)
	}
	if err != nil {
		return nil, err
	}
	if d, err = plant(w.Plant, d); err != nil {
		return nil, err
	}
	w.shares.Store(d.Traits().Shared)
	// The Timeouts of the clients differ, because redlock once relied on that of the caller. The seed
	// contains the number of the client above bit 32.
	parts := time.Duration(1 + (w.Seed>>32+w.Seed)%4)
	return hasp.New(d, &hasp.Options{TTL: w.Term, Timeout: w.Term / parts, Owner: w.Owner})
}

func (w *client) report(r report) {
	_ = w.parent.Send(r) // if the parent has ended, Receive fails and so ends this process
}

// watch reports the process's memory, goroutines and descriptors once a second.
func (w *client) watch() {
	live := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	for range time.Tick(time.Second) {
		runtime.GC()
		metrics.Read(live)
		w.report(report{What: used, T: clock.Now(), Use: &use{live[0].Value.Uint64(), runtime.NumGoroutine(), openFiles()}})
	}
}

// close closes the client, and counts the goroutines and descriptors that are left.
func (w *client) close(goroutines, files int) {
	r := report{What: closed}
	if err := w.c.Close(); err != nil {
		r.Err = err.Error()
	}
	w.clients.Range(func(rdb, _ any) bool { rdb.(redis.UniversalClient).Close(); return true })
	own := goroutines + 1 // plus this goroutine
	repeatUntil(patience, 20*time.Millisecond, func() bool {
		r.Goroutines, r.Files = [2]int{own, runtime.NumGoroutine()}, [2]int{files, openFiles()}
		return r.Goroutines[1] <= own && r.Files[1] <= files
	})
	if r.Goroutines[1] > own {
		stacks := make([]byte, 1<<16)
		fmt.Fprintf(os.Stderr, "%s\n", stacks[:runtime.Stack(stacks, true)])
	}
	w.report(r)
}

// warm lets the runtime open the descriptors that it needs for connections and never closes.
func warm() {
	if l, err := net.Listen("tcp", "127.0.0.1:0"); err == nil {
		l.Close()
	}
}

// openFiles returns the number of descriptors, or 0 if the system does not list descriptors.
func openFiles() int {
	all, _ := os.ReadDir("/proc/self/fd")
	return len(all)
}
