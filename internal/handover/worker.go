package main

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/hostclock"
)

// role is the environment variable that makes this program a worker.
const role = "HASP_HANDOVER_WORKER"

// order is what a worker is told, a line each on standard input.
type order struct {
	Op      string        // "lock", "bare" or "stop"
	URL     string        // of the strategy on its store; of the store for bare
	Key     string        // of the lock; for bare the channel
	Next    string        // for bare the channel of the next process
	Waiters int           // callers that take turns at the key
	Hold    time.Duration // how long each has it
	Every   int64         // after how many holds to tell
}

// report is what a worker tells, a line each on standard output.
type report struct {
	What  string // "ready", "progress" or "done"
	More  int64  `json:",omitempty"` // progress: holds since the last time
	Holds []hold `json:",omitempty"` // done: all of them
	Err   string `json:",omitempty"` // done: what went wrong
}

// hold is one caller's turn: when it asked for the key, when it had it, and
// the moment before it gave it back.
type hold struct {
	Process, Waiter   int
	Asked, Got, Freed int64
}

// worker is one process, with one Client for each URL.
type worker struct {
	mu      sync.Mutex // guards out
	out     *json.Encoder
	clients map[string]*hasp.Client
	count   atomic.Int64
}

// work does what in says, one order at a time, and ends when in does: then
// whoever gave the orders is gone.
func work(in io.Reader, out io.Writer) {
	w := &worker{out: json.NewEncoder(out), clients: map[string]*hasp.Client{}}
	orders := json.NewDecoder(bufio.NewReader(in))
	var stop context.CancelFunc
	for {
		var o order
		if orders.Decode(&o) != nil {
			os.Exit(0)
		}
		if o.Op == "stop" {
			stop()
			continue
		}
		w.count.Store(0)
		var ctx context.Context
		ctx, stop = context.WithCancel(context.Background())
		do := w.lock
		if o.Op == "bare" {
			do = w.bare
		}
		go func() {
			r := report{What: "done"}
			var err error
			if r.Holds, err = do(ctx, o); err != nil {
				r.Err = err.Error()
			}
			w.tell(r)
		}()
	}
}

func (w *worker) tell(r report) {
	w.mu.Lock()
	defer w.mu.Unlock()
	_ = w.out.Encode(r) // if nobody reads, the input ends, too
}

// had counts a hold.
func (w *worker) had(o order) {
	if w.count.Add(1)%o.Every == 0 {
		w.tell(report{What: "progress", More: o.Every})
	}
}

// lock has callers take turns at the key until ctx ends. The turn that each of
// them waits for then is its last, so all had at least one.
func (w *worker) lock(ctx context.Context, o order) (holds []hold, err error) {
	client := w.clients[o.URL]
	if client == nil {
		if client, err = hasp.Open(ctx, o.URL, &hasp.Options{Timeout: timeout}); err != nil {
			return nil, err
		}
		w.clients[o.URL] = client
	}
	w.tell(report{What: "ready"})
	var mu sync.Mutex // guards holds and err
	var wg sync.WaitGroup
	for i := range o.Waiters {
		wg.Go(func() {
			mine, failed := w.turns(ctx, client, o, i)
			mu.Lock()
			defer mu.Unlock()
			holds = append(holds, mine...)
			if failed != nil {
				err = failed
			}
		})
	}
	wg.Wait()
	return holds, err
}

// mixed is how far apart callers begin.
const mixed = 20 * time.Millisecond

// turns is one caller.
func (w *worker) turns(stopped context.Context, client *hasp.Client, o order, waiter int) (holds []hold, err error) {
	ctx := context.WithoutCancel(stopped)
	time.Sleep(rand.N(mixed)) // a queue is to have callers of all processes mixed
	for first := true; first || stopped.Err() == nil; first = false {
		h := hold{Waiter: waiter, Asked: hostclock.Now()}
		lease, err := client.Lock(ctx, o.Key)
		if err != nil {
			return holds, err
		}
		h.Got = hostclock.Now()
		pause(stopped, o.Hold)
		h.Freed = hostclock.Now()
		if err := lease.Unlock(ctx); err != nil {
			return holds, err
		}
		holds = append(holds, h)
		w.had(o)
		pause(stopped, o.Hold/4) // or it would be back before a waiter in another process has heard
	}
	return holds, nil
}

// pause is what a holder does with a key, and without. It takes up to a
// millisecond longer.
func pause(stopped context.Context, d time.Duration) {
	if d > 0 && stopped.Err() == nil {
		time.Sleep(d)
	}
}

// publish is the bare hand-over: a script that tells its receiver.
var publish = redis.NewScript(`return redis.call('PUBLISH', ARGV[1], 'next')`)

// bare passes a message on to the next process when it has come and been kept,
// until ctx ends.
func (w *worker) bare(ctx context.Context, o order) (holds []hold, err error) {
	on := context.WithoutCancel(ctx)
	rdb, err := connect(o.URL)
	if err != nil {
		return nil, err
	}
	defer rdb.Close()
	sub := rdb.Subscribe(on, o.Key)
	defer sub.Close()
	if _, err := sub.Receive(on); err != nil { // the confirmation
		return nil, err
	}
	if err := publish.Load(on, rdb).Err(); err != nil {
		return nil, err
	}
	defer context.AfterFunc(ctx, func() { sub.Close() })()
	w.tell(report{What: "ready"})
	for ctx.Err() == nil {
		_, err := sub.ReceiveMessage(on)
		h := hold{Got: hostclock.Now()}
		if err == nil {
			pause(ctx, o.Hold)
			h.Freed = hostclock.Now()
			err = publish.EvalSha(on, rdb, nil, o.Next).Err()
		}
		switch {
		case ctx.Err() != nil:
			return holds, nil
		case err != nil:
			return holds, err
		}
		holds = append(holds, h)
		w.had(o)
	}
	return holds, nil
}
