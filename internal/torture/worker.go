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
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9/logging"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/crew"
	"github.com/hasplock/hasp/internal/hostclock"
	"github.com/hasplock/hasp/internal/walljump"
)

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
	Steady  bool          `json:",omitempty"` // never hundreds of calls at once, whose connections stay in the pool
	Profile string        `json:",omitempty"` // how the names of profiles begin; if empty, none is written

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

	parent  *crew.Pipe
	mu      sync.Mutex           // guards answers
	answers map[int64]chan order // by turn
}

// work obeys orders until the parent ends.
func work(parent *crew.Pipe) {
	bearLimits()
	logging.Disable() // go-redis logs servers that are down
	w := &client{parent: parent, answers: map[int64]chan order{}}
	var before, files = 0, 0
	for {
		var o order
		if parent.Receive(&o) != nil {
			os.Exit(0)
		}
		switch o.Op {
		case "start":
			walljump.Set(o.Ahead)
			warm()
			w.order = o
			go w.watch()
			before, files = runtime.NumGoroutine(), openFiles()
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
	// The store may be in the middle of a fault.
	for {
		c, err := w.dial(ctx)
		if err == nil {
			w.c = c
			return nil
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// dial opens a Client.
func (w *client) dial(ctx context.Context) (*hasp.Client, error) {
	config, err := hasp.ParseURL(w.URL)
	if err != nil {
		return nil, err
	}
	d, err := config.Driver(ctx)
	if err != nil {
		return nil, err
	}
	d, err = plant(w.Plant, w.Direct, w.Dir, d)
	if err != nil {
		return nil, err
	}
	return hasp.New(d, &hasp.Options{TTL: w.Term, Timeout: w.Timeout, Owner: w.Owner}), nil
}

func (w *client) tell(r report) {
	r.Wall = time.Now().UnixNano()
	_ = w.parent.Send(r) // if the parent has ended, Receive fails and so ends this process
}

// watch tells once a second what the process takes of the machine. Whenever the
// heap has grown by more than checkGrowth forgives, it writes profiles: when the run
// is checked, the process has ended.
func (w *client) watch() {
	live := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	var profiled uint64
	for range time.Tick(time.Second) {
		runtime.GC()
		metrics.Read(live)
		heap := live[0].Value.Uint64()
		if float64(heap) > 1.25*float64(profiled)+heapSlack {
			profiled = heap
			w.profile(fmt.Sprintf("%dMiB", heap>>20))
		}
		w.tell(report{What: used, T: hostclock.Now(), Use: &use{heap, runtime.NumGoroutine(), openFiles()}})
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
		if !w.round(r) {
			time.Sleep(w.Term/20 + rand.N(w.Term/3))
		}
		time.Sleep(time.Duration(r.IntN(3000)) * time.Microsecond)
	}
}

// round is something that a program does with locks. What it draws does not
// depend on how earlier rounds came out.
func (w *client) round(r *rand.Rand) (had bool) {
	r = rand.New(rand.NewPCG(r.Uint64(), 0))
	switch x := r.IntN(60); {
	case x == 0 && len(w.Keys) > keys:
		return w.many(r)
	case x < 6:
		hot := make([]int, keys)
		for k := range hot {
			hot[k] = k
		}
		return w.turn(context.Background(), w.c, r, hot)
	case x < 10:
		return w.single(r)
	}
	return w.turn(context.Background(), w.c, r, []int{r.IntN(keys)})
}

// single is a Client that is opened for one Lock, as "hasp run" does.
func (w *client) single(r *rand.Rand) (had bool) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	c, err := w.dial(ctx)
	if err != nil {
		return false
	}
	defer c.Close()
	return w.turn(context.Background(), c, r, []int{r.IntN(keys)})
}

// many is hundreds of keys, one after another or all at once.
func (w *client) many(r *rand.Rand) (had bool) {
	all := make([]int, len(w.Keys)-keys)
	for i := range all {
		all[i] = keys + i
	}
	if w.Steady || r.IntN(2) == 0 {
		return w.turn(context.Background(), w.c, r, all)
	}
	var wg sync.WaitGroup
	for _, k := range all {
		one := rand.New(rand.NewPCG(r.Uint64(), 0))
		wg.Go(func() { w.turn(context.Background(), w.c, one, []int{k}) })
	}
	wg.Wait()
	return true
}

// hold is a lease of a turn.
type hold struct {
	id    int64
	lease *hasp.Lease
	lost  atomic.Int64  // when its context ended
	heard chan struct{} // closed then
	stop  func() bool   // context.AfterFunc's
}

// turn is one Lock, or one LockAll of several keys, and what follows it.
func (w *client) turn(ctx context.Context, c *hasp.Client, r *rand.Rand, which []int) (had bool) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	opts, fenced := w.options(r)
	length := time.Duration(r.IntN(20)) * time.Millisecond
	if r.IntN(10) == 0 {
		length = time.Duration((0.5 + 1.5*r.Float64()) * float64(w.Term))
	}
	blind := r.IntN(3) == 0
	if r.IntN(10) == 0 {
		defer time.AfterFunc(time.Duration(r.Float64()*2*float64(w.Term)), cancel).Stop()
	}

	ids := make([]int64, len(which))
	for i, k := range which {
		ids[i] = w.ids.Add(1)
		w.tell(report{What: asks, ID: ids[i], Key: k, T: hostclock.Now(), Fenced: fenced})
	}
	leases, err := w.lock(ctx, c, which, opts)
	t := hostclock.Now()
	if err != nil {
		for _, id := range ids {
			w.tell(report{What: failed, ID: id, T: t, Err: kindOf(err)})
		}
		return false
	}
	holds := make([]*hold, len(leases))
	for i, l := range leases {
		h := &hold{id: ids[i], lease: l, heard: make(chan struct{})}
		h.lost.Store(1<<63 - 1)
		holds[i] = h
		w.tell(report{What: got, ID: h.id, T: t, Fence: l.Fence(), Plan: t + int64(length), Expires: expires(l)})
		h.stop = context.AfterFunc(l.Context(), func() {
			h.lost.Store(hostclock.Now())
			close(h.heard)
		})
	}

	last := holds[len(holds)-1] // whose context ends with any of the others
	var inner []*hasp.Lease
	if which[0] < keys && r.IntN(4) == 0 {
		inner = w.nest(r, c, last.lease)
	}
	if which[0] == 0 && len(which) == 1 && r.IntN(8) == 0 {
		w.turn(last.lease.Context(), c, r, []int{1}) // in this order only, or they would wait for each other
	}
	for hostclock.Now() < t+int64(length) && last.lease.Err() == nil {
		w.use(last.id, last.lease)
		time.Sleep(time.Duration(3+r.IntN(10)) * time.Millisecond)
	}
	if blind {
		w.use(last.id, last.lease) // without a look whether it still holds
	}
	var wg sync.WaitGroup
	for _, h := range slices.Backward(holds) {
		w.end(h)
		wg.Go(func() { w.unlock(h) })
	}
	wg.Wait()
	for _, l := range inner {
		_ = l.Unlock(context.Background())
	}
	return true
}

// options draws those of a Lock.
func (w *client) options(r *rand.Rand) (opts []hasp.Option, fenced bool) {
	if fenced = r.Float64() >= w.Bare; fenced {
		opts = append(opts, hasp.WithFence())
	}
	switch r.IntN(12) {
	case 0, 1:
		opts = append(opts, hasp.WithMaxWait(time.Duration(r.Float64()*2*float64(w.Term))))
	case 2, 3:
		opts = append(opts, hasp.WithMaxWait(time.Duration(1+r.IntN(30))*time.Millisecond))
	}
	if r.IntN(3) == 0 {
		opts = append(opts, hasp.WithTTL(time.Duration((0.7+r.Float64())*float64(w.Term))))
	}
	return opts, fenced
}

// lock locks one key by Lock, and several by LockAll. The leases are in the
// order of the keys.
func (w *client) lock(ctx context.Context, c *hasp.Client, which []int, opts []hasp.Option) ([]*hasp.Lease, error) {
	if len(which) == 1 {
		l, err := c.Lock(ctx, w.Keys[which[0]], opts...)
		return []*hasp.Lease{l}, err
	}
	var names []string
	for _, k := range which {
		names = append(names, w.Keys[k])
	}
	all, err := hasp.LockAll(ctx, c, names, opts...)
	if err != nil {
		return nil, err
	}
	return all.All(), nil
}

// nest re-enters a lease, deeply at times, cancels the contexts from one of
// them inwards, and unlocks some of the inner leases in any order. It returns
// the others, which outlast the outer lease.
func (w *client) nest(r *rand.Rand, c *hasp.Client, outer *hasp.Lease) (rest []*hasp.Lease) {
	ctx := outer.Context()
	var cancels []context.CancelFunc
	each := r.IntN(2) == 0 // lease has a context of its own
	for i := range 1 + r.IntN(30) {
		if i == 0 || each {
			own, cancel := context.WithCancel(ctx)
			defer cancel()
			ctx, cancels = own, append(cancels, cancel)
		}
		l, err := c.Lock(ctx, outer.Key())
		if err != nil {
			break
		}
		rest = append(rest, l)
		ctx = l.Context()
	}
	if len(rest) > 0 && r.IntN(2) == 0 {
		cancels[r.IntN(len(cancels))]()
		<-ctx.Done()
	}
	time.Sleep(time.Duration(r.IntN(10)) * time.Millisecond)
	r.Shuffle(len(rest), func(i, j int) { rest[i], rest[j] = rest[j], rest[i] })
	n := r.IntN(len(rest) + 1)
	for _, l := range rest[:n] {
		_ = l.Unlock(context.Background())
	}
	return rest[n:]
}

// end tells until when a lease was trusted, before it is unlocked.
func (w *client) end(h *hold) {
	if !h.stop() {
		<-h.heard
	}
	end := hostclock.Now()
	gone := errors.Is(h.lease.Err(), hasp.ErrLost)
	told, exp := hostclock.Now(), expires(h.lease)
	w.tell(report{What: ended, ID: h.id, T: told, End: min(end, exp, h.lost.Load()), Expires: exp, Lost: gone})
}

// unlock unlocks a lease, whatever it takes.
func (w *client) unlock(h *hold) {
	for try := 0; ; try++ {
		err := h.lease.Unlock(context.Background())
		t := hostclock.Now()
		again := err != nil && !errors.Is(err, hasp.ErrLost) && !errors.Is(err, hasp.ErrReleased) && try < 20
		if again {
			time.Sleep(10 * time.Millisecond)
			continue
		}
		done := report{What: freed, ID: h.id, T: t, Expires: expires(h.lease), Lost: errors.Is(err, hasp.ErrLost)}
		if err != nil {
			done.Err = kindOf(err)
		}
		w.tell(done)
		return
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
	case errors.Is(err, context.Canceled):
		return "cancelled"
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
	w.profile("end")
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
