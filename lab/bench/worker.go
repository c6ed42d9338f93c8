package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/hasplock/hasp/internal/crew"
	"github.com/hasplock/hasp/internal/hostclock"
)

// workerRole is the role of the processes whose callers contend for a key.
const workerRole = "worker"

// order is a message to a worker.
type order struct {
	Op         string // "open", "begin" or "stop"
	Contestant string
	Stores     stores
	Key        string
	Waiters    int
	Hold       time.Duration
	Think      time.Duration // mean pause of a caller after each turn
	Ring       []link        // the members of the ring in this process; if not nil, no contestant is opened
}

// report is what a worker answers to an order.
type report struct {
	Err string

	// The answer to "stop" has these fields as well.
	Turns   []turns
	Refused int    // calls that failed without an excuse
	First   string // the error of one such call
}

// turns contains the times of one caller's turns, in nanoseconds of hostclock: when the caller
// asked for the key, when it received the key, and when it was about to release the key. If the
// caller still waited at the end, Asked contains one entry more than Got and Freed.
type turns struct{ Asked, Got, Freed []int64 }

// order sends each order to the worker with the same index, and returns the workers' reports.
func (b *bench) order(orders ...order) ([]report, error) {
	for i, o := range orders {
		if err := b.workers[i].Send(o); err != nil {
			return nil, err
		}
	}
	reports := make([]report, len(orders))
	for i := range orders {
		kill := time.AfterFunc(patience, func() { b.workers[i].Kill() })
		err := b.workers[i].Receive(&reports[i])
		kill.Stop()
		if err != nil {
			return nil, fmt.Errorf("a worker ended: %w", err)
		}
		if e := reports[i].Err; e != "" {
			return nil, fmt.Errorf("a worker: %s", e)
		}
	}
	return reports, nil
}

// worker is the state of a worker process.
type worker struct {
	open    map[string]locker   // the open lockers; a name contains the contestant and the address of the stores
	more    map[string][]locker // under the same names, one locker for each caller, if callers must not share a locker
	callers []locker
	order   order
	ring    *ring
	cancel  context.CancelFunc
	done    chan report
}

// work obeys one order at a time until the parent ends.
func work(parent *crew.Pipe) {
	w := &worker{open: map[string]locker{}, more: map[string][]locker{}}
	for {
		var o order
		if parent.Receive(&o) != nil {
			return
		}
		r, err := w.obey(o)
		if err != nil {
			r.Err = err.Error()
		}
		_ = parent.Send(r) // if the parent has ended, the next Receive fails
	}
}

func (w *worker) obey(o order) (r report, err error) {
	ctx := context.Background()
	switch o.Op {
	case "open":
		w.order = o
		if o.Ring == nil {
			return r, w.prepare(ctx)
		}
		w.ring, err = newRing(ctx, o)
		return r, err
	case "begin":
		ctx, w.cancel = context.WithTimeout(ctx, patience)
		w.done = make(chan report, 1)
		run := w.run
		if w.order.Ring != nil {
			run = w.ring.run
		}
		go func() { w.done <- run(ctx) }()
		return r, nil
	case "stop":
		w.cancel()
		return <-w.done, nil
	}
	return r, errors.New("unknown order: " + o.Op)
}

// prepare opens the lockers that the current order needs, except those that are open already.
func (w *worker) prepare(ctx context.Context) (err error) {
	name := w.order.Contestant + " " + w.order.Stores.One
	l := w.open[name]
	if l == nil {
		i := slices.IndexFunc(contestants(), func(c contestant) bool { return c.name == w.order.Contestant })
		if l, err = contestants()[i].open(ctx, w.order.Stores, term); err != nil {
			return err
		}
		w.open[name] = l
	}

	if own, ok := l.(perCaller); ok {
		for len(w.more[name]) < w.order.Waiters {
			c, err := own.caller(ctx)
			if err != nil {
				return err
			}
			w.more[name] = append(w.more[name], c)
		}
		w.callers = w.more[name][:w.order.Waiters]
	} else {
		w.callers = slices.Repeat([]locker{l}, w.order.Waiters)
	}
	return nil
}

// run lets the callers take turns at the key until ctx ends.
func (w *worker) run(ctx context.Context) (r report) {
	r.Turns = make([]turns, len(w.callers))
	refused := make([]int, len(w.callers))
	errs := make([]string, len(w.callers))
	var wg sync.WaitGroup
	for i, l := range w.callers {
		wg.Go(func() { refused[i], errs[i] = take(ctx, l, w.order, &r.Turns[i]) })
	}
	wg.Wait()
	for _, n := range refused {
		r.Refused += n
	}
	r.First = cmp.Or(errs...)
	return r
}

// arrival is the longest delay of a caller's start. The delays are random, so that the callers of
// all processes are mixed in a queue.
const arrival = 20 * time.Millisecond

// take carries out the turns of one caller until ctx ends. It returns how many calls failed without
// an excuse, and the first error of such a call.
func take(ctx context.Context, l locker, o order, t *turns) (refused int, first string) {
	time.Sleep(rand.N(arrival))
	for ctx.Err() == nil {
		asked := hostclock.Now()
		t.Asked = append(t.Asked, asked)
		h, err := l.lock(ctx, o.Key)
		if err == nil {
			got := hostclock.Now()
			if o.Hold > 0 {
				time.Sleep(o.Hold)
			}
			freed := hostclock.Now()
			err = h.Unlock(context.WithoutCancel(ctx))
			t.Got, t.Freed = append(t.Got, got), append(t.Freed, freed)
			time.Sleep(o.Think/2 + rand.N(o.Think+1))
		}

		switch {
		case err == nil:
		case ctx.Err() != nil:
			return refused, first
		case !excused(err, time.Duration(hostclock.Now()-asked), term):
			refused++
			first = cmp.Or(first, err.Error())
		}
		t.Asked = t.Asked[:len(t.Got)] // remove the entry of a failed wait
	}
	return refused, first
}
