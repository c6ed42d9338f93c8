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

	"github.com/hasplock/hasp/internal/clock"
	"github.com/hasplock/hasp/internal/crew"
	"github.com/hasplock/hasp/internal/redistest"
)

// workerRole is the role of the processes whose callers contend for a key.
const workerRole = "worker"

// order is a message to a worker.
type order struct {
	Op         string // "open", "begin" or "stop"; the other fields are for "open"
	Contestant string
	Stores     stores
	Key        string
	Waiters    int
	Hold       time.Duration
	Think      time.Duration // mean pause of a caller after each turn

	Place, Places int // the index of this process, and the number of processes
}

// report is what a worker answers to an order.
type report struct {
	Err string

	// The answer to "stop" has these fields as well.
	Visits  [][]visit // for each caller
	Refused int       // calls that failed without an excuse
	First   string    // the error of one such call
}

// visit contains the times of a caller's turn at the key, in nanoseconds of clock.Now: when it asked
// for the key, when it received the key, and when it was about to release the key. If the caller
// still waited at the end, Got and Freed are 0.
type visit struct{ Asked, Got, Freed int64 }

// compete lets workers take part in a contest while f runs. Each order goes to the worker with the
// same index. The workers are stopped even if f failed.
func (b *bench) compete(orders []order, f func() error) ([]report, error) {
	for _, op := range []string{"open", "begin"} {
		if _, err := b.order(op, orders); err != nil {
			return nil, err
		}
	}
	err := f()
	reports, failed := b.order("stop", orders)
	return reports, errors.Join(err, failed)
}

// order sends each order, with the field Op set to op, to the worker with the same index, and returns the workers' reports. It
// starts the workers that do not run yet.
func (b *bench) order(op string, orders []order) ([]report, error) {
	for len(b.workers) < len(orders) {
		w, err := crew.Start(workerRole)
		if err != nil {
			return nil, err
		}
		b.servers.Cleanup(w.End)
		b.workers = append(b.workers, w)
	}

	reports := make([]report, len(orders))
	return reports, redistest.Each(len(orders), func(i int) error {
		w := b.workers[i]
		o := orders[i]
		o.Op = op
		if err := w.Send(o); err != nil {
			return err
		}
		defer time.AfterFunc(patience, func() { w.Kill() }).Stop()
		if err := w.Receive(&reports[i]); err != nil {
			return fmt.Errorf("a worker ended: %w", err)
		}
		if e := reports[i].Err; e != "" {
			return fmt.Errorf("a worker: %s", e)
		}
		return nil
	})
}

// worker is the state of a worker process.
type worker struct {
	// the open lockers; a name contains the contestant and the address of the stores
	open   map[string][]locker
	run    func(context.Context) report // lets the callers take turns until the context ends
	cancel context.CancelFunc
	done   chan report
}

// work obeys one order at a time until the parent ends.
func work(parent *crew.Pipe) {
	w := &worker{open: map[string][]locker{}}
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
		w.run, err = w.prepare(ctx, o)
	case "begin":
		ctx, w.cancel = context.WithTimeout(ctx, patience)
		w.done = make(chan report, 1)
		go func() { w.done <- w.run(ctx) }()
	case "stop":
		w.cancel()
		r = <-w.done
	}

	return r, err
}

// prepare opens the lockers that an order needs, except those that are open already. All callers
// share one locker, unless it is a perCaller.
func (w *worker) prepare(
	ctx context.Context, o order,
) (run func(context.Context) report, err error) {
	name := o.Contestant + " " + o.Stores.One
	all := w.open[name]
	for len(all) < o.Waiters {
		var l locker
		if len(all) == 0 {
			i := slices.IndexFunc(contestants(),
				func(c contestant) bool { return c.name == o.Contestant })
			l, err = contestants()[i].open(ctx, o.Stores, term)
		} else if own, ok := all[0].(perCaller); ok {
			l, err = own.caller(ctx)
		} else {
			l = all[0]
		}
		if err != nil {
			return nil, err
		}
		all = append(all, l)
	}

	w.open[name] = all
	if r, ok := all[0].(*ring); ok {
		err = r.join(ctx, o)
	}
	return func(ctx context.Context) report { return takeAll(ctx, all[:o.Waiters], o) }, err
}

// takeAll lets the callers take turns at the key until ctx ends.
func takeAll(ctx context.Context, callers []locker, o order) (r report) {
	r.Visits = make([][]visit, len(callers))
	refused := make([]int, len(callers))
	errs := make([]string, len(callers))
	var wg sync.WaitGroup
	for i, l := range callers {
		wg.Go(func() { refused[i], errs[i] = take(ctx, l, o, &r.Visits[i]) })
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
func take(ctx context.Context, l locker, o order, visits *[]visit) (refused int, first string) {
	time.Sleep(rand.N(arrival))
	for ctx.Err() == nil {
		t := visit{Asked: clock.Now()}
		h, err := l.lock(ctx, o.Key)
		if err == nil {
			t.Got = clock.Now()
			if o.Hold > 0 {
				time.Sleep(o.Hold)
			}
			t.Freed = clock.Now()
			err = h.Unlock(context.WithoutCancel(ctx))
			time.Sleep(o.Think/2 + rand.N(o.Think+1))
		}
		if t.Got != 0 || ctx.Err() != nil {
			*visits = append(*visits, t)
		}
		took := time.Duration(clock.Now() - t.Asked)
		if err != nil && ctx.Err() == nil && !excused(err, took, term) {
			refused++
			first = cmp.Or(first, err.Error())
		}
	}

	return refused, first
}
