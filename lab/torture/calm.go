package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/hostclock"
	"github.com/hasplock/hasp/internal/stall"
)

// calm runs more programs at the end of a run on a service, after its faults. Each part checks a
// promise whose violation the faults would hide.
func (r *run) calm() {
	if r.store.service == nil || r.losing || r.plant != "" && r.plant != queued {
		return
	}
	for _, part := range []func(context.Context){r.busy, r.moves} {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		err := r.Do(func() error { part(ctx); return nil })
		cancel()

		// If the machine stands still for a term, leases are lost while a part
		// prepares. Then the part checks nothing.
		if !errors.Is(err, hasp.ErrLost) {
			r.Check(err)
		}
	}
}

// calmTimeout is longer than any wait of the parts.
const calmTimeout = 10 * time.Second

// open opens a Client. The caller closes it. No fault disturbs this process, but the machine may
// stand still for longer than an opening waits. So open tries again after an outage.
func (r *run) open(ctx context.Context) *hasp.Client {
	var d backend.Driver
	var err error
	repeatUntil(time.Minute, 20*time.Millisecond, func() bool {
		d, err = openDriver(ctx, r.store.urls[0], r.plant)
		return !errors.Is(err, hasp.ErrUnavailable)
	})
	r.Check(err)
	c, err := hasp.New(d, &hasp.Options{TTL: maxTerm, Timeout: calmTimeout})
	r.Check(err)
	return c
}

// busy runs a Client that keeps some keys while many of its callers take others. Each of these
// holds waits for a distant replica, and the renewals must not wait behind them. For comparison,
// another Client keeps as many keys and does nothing else.
func (r *run) busy(ctx context.Context) {
	const kept, lasts = 20, 3 * maxTerm
	const callers = 800
	var all [2]*hasp.Client
	var leases [2]*hasp.Leases
	for i := range all {
		all[i] = r.open(ctx)
		defer all[i].Close()
		some, err := hasp.LockAll(ctx, all[i], r.all[i*kept:][:kept])
		r.Check(err)
		leases[i] = some
	}

	began := hostclock.Now()
	var wg sync.WaitGroup
	var over atomic.Bool
	for i := range callers {
		wg.Go(func() {
			for !over.Load() {
				if l, err := all[0].Lock(ctx, fmt.Sprintf("torture-busy-%03d", i)); err == nil {
					_ = l.Unlock(ctx)
				}
			}
		})
	}
	stop := stall.Watch(nil)
	time.Sleep(lasts)
	stood := stop()
	var held [2]int
	for i, some := range leases {
		for _, l := range some.All() {
			held[i] += one(l.Err() == nil)
		}
	}
	over.Store(true)
	wg.Wait()
	for _, some := range leases {
		_ = some.Unlock(ctx)
	}

	// If the machine stood still for a part of a term, lost leases prove nothing.
	if held[0] == 0 && held[1] == kept && stood < maxTerm/10 {
		r.fail("kept until its end", began, fmt.Sprintf("all of %d leases were lost without a fault while %d callers of their Client took other keys", kept, callers))
	}
}

// moves makes the address lead to another master. It checks that Clients that connected before
// still get the key, beside Clients that connect later. It leaves out spinlock, whose callers do
// not take turns.
func (r *run) moves(ctx context.Context) {
	if r.strategy == "spinlock" {
		return
	}
	const lasts = 10 * time.Second
	var wg sync.WaitGroup
	var over atomic.Bool
	var holds [2]atomic.Int32 // counts of Clients opened before the move, and after it
	defer wg.Wait()
	defer over.Store(true)

	r.contend(ctx, &wg, &over, &holds[0])
	time.Sleep(time.Second) // let these Clients queue
	moved(&nemesis{run: r}).heal()
	r.contend(ctx, &wg, &over, &holds[1])

	time.Sleep(lasts / 2) // Clients may notice the move only at their next check of the queue
	began := hostclock.Now()
	holds[0].Store(0)
	holds[1].Store(0)
	time.Sleep(lasts / 2)
	if least, most := holds[0].Load(), holds[1].Load(); least == 0 && most > 100 {
		r.fail("stood still", began, fmt.Sprintf("two Clients never got the key after the address led to another master, and two that connected later got it %d times", most))
	}
}

// contend starts callers of two Clients, which lock one key again and again until over is set.
func (r *run) contend(ctx context.Context, wg *sync.WaitGroup, over *atomic.Bool, holds *atomic.Int32) {
	const clients, callers = 2, 2
	for range clients {
		c := r.open(ctx)
		r.Cleanup(func() { c.Close() })
		for range callers {
			wg.Go(func() {
				for !over.Load() {
					if l, err := c.Lock(ctx, r.names[0]); err == nil {
						holds.Add(1)
						_ = l.Unlock(ctx)
					}
				}
			})
		}
	}
}
