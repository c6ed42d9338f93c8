package main

import (
	"context"
	"encoding/gob"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"time"
)

// order is what a worker is told.
type order struct {
	Op         string // "open", "begin" or "stop"
	Contestant string
	Stores     stores
	Key        string
	Waiters    int
	Hold       time.Duration
	Ring       []link // with which there is no contestant
}

// report is what a worker answers to every order.
type report struct {
	Err string

	// To "stop":
	Turns   []turns
	Refused int    // calls that should have been granted
	First   string // what one of these said
}

// turns are one caller's, in nanoseconds of the clock that all share: when it
// asked for the key, when it had it, and the moment before it gave it back.
// One wait more than holds is a wait that the end cut short.
type turns struct{ Asked, Got, Freed []int64 }

// worker is a process whose callers want a key.
type worker struct {
	open    map[string]locker
	more    map[string][]locker // of those that need one for each caller
	callers []locker
	order   order
	ring    *ring
	cancel  context.CancelFunc
	done    chan report
}

// work does what it is told, one order at a time, until its input ends.
func work(in io.Reader, out io.Writer) {
	w := &worker{open: map[string]locker{}, more: map[string][]locker{}}
	orders, reports := gob.NewDecoder(in), gob.NewEncoder(out)
	for {
		var o order
		if orders.Decode(&o) != nil {
			os.Exit(0)
		}
		r, err := w.obey(o)
		if err != nil {
			r.Err = err.Error()
		}
		_ = reports.Encode(r) // if nobody reads, the input ends, too
	}
}

func (w *worker) obey(o order) (report, error) {
	ctx := context.Background()
	switch o.Op {
	case "open":
		w.order = o
		if o.Ring != nil {
			var err error
			w.ring, err = newRing(ctx, o)
			return report{}, err
		}
		return report{}, w.prepare(ctx)
	case "begin":
		ctx, w.cancel = context.WithTimeout(ctx, patience)
		w.done = make(chan report, 1)
		go func() {
			if w.order.Ring != nil {
				w.done <- w.ring.run(ctx)
			} else {
				w.done <- w.run(ctx)
			}
		}()
		return report{}, nil
	case "stop":
		w.cancel()
		r := <-w.done
		return r, nil
	}
	return report{}, errors.New("no such order: " + o.Op)
}

// prepare opens what the callers of an order need, unless it is open.
func (w *worker) prepare(ctx context.Context) error {
	name := w.order.Contestant
	l := w.open[name]
	if l == nil {
		for _, c := range contestants() {
			if c.name == name {
				var err error
				if l, err = c.open(ctx, w.order.Stores, term); err != nil {
					return err
				}
				w.open[name] = l
			}
		}
	}
	w.callers = nil
	own, ok := l.(perCaller)
	for i := range w.order.Waiters {
		if !ok {
			w.callers = append(w.callers, l)
			continue
		}
		if i == len(w.more[name]) {
			c, err := own.caller(ctx)
			if err != nil {
				return err
			}
			w.more[name] = append(w.more[name], c)
		}
		w.callers = append(w.callers, w.more[name][i])
	}
	return nil
}

// run has the callers take turns at the key until ctx ends.
func (w *worker) run(ctx context.Context) (r report) {
	r.Turns = make([]turns, len(w.callers))
	errs := make([][]error, len(w.callers))
	var wg sync.WaitGroup
	for i, l := range w.callers {
		wg.Go(func() { errs[i] = take(ctx, l, w.order, &r.Turns[i]) })
	}
	wg.Wait()
	for _, err := range slices.Concat(errs...) {
		r.Refused++
		r.First = err.Error()
	}
	return r
}

// arrival is within how long the callers come. A queue is to have those of
// all processes mixed.
const arrival = 20 * time.Millisecond

// take is one caller. It returns what it should not have been told.
func take(ctx context.Context, l locker, o order, t *turns) (refused []error) {
	time.Sleep(rand.N(arrival))
	for ctx.Err() == nil {
		asked := now()
		t.Asked = append(t.Asked, asked)
		h, err := l.lock(ctx, o.Key)
		if err == nil {
			got := now()
			if o.Hold > 0 {
				time.Sleep(o.Hold)
			}
			freed := now()
			err = h.Unlock(context.WithoutCancel(ctx))
			t.Got, t.Freed = append(t.Got, got), append(t.Freed, freed)
		}
		switch {
		case err == nil:
		case ctx.Err() != nil:
			return refused
		case !excused(err, time.Duration(now()-asked), term):
			refused = append(refused, err)
		}
		t.Asked = t.Asked[:len(t.Got)]
	}
	return refused
}
