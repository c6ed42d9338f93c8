package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/hostclock"
)

// calm runs programs at the end of a run, after its faults. Each part checks a
// promise whose violation another fault would hide.
func (r *run) calm() {
	parts := []func(context.Context){r.brief}
	switch {
	case r.plant == queued && !r.losing:
		parts = []func(context.Context){r.busy} // the part that finds it
	case r.plant != "":
		return
	case !r.losing:
		parts = append(parts, r.nested, r.crowd, r.busy, r.moves)
	}
	for _, part := range parts {
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

// calmTimeout is longer than anything takes that the parts wait for.
const calmTimeout = 10 * time.Second

// open opens a Client with the link of a seat. The caller closes it.
func (r *run) open(ctx context.Context, seat int, term time.Duration) *hasp.Client {
	var direct []string
	for _, srv := range r.store.servers {
		direct = append(direct, srv.Addr)
	}
	url := r.store.urls[seat]
	d, err := persist(func() (backend.Driver, error) { return openDriver(ctx, url, r.plant, direct, r.store.dir) })
	r.Check(err)
	return hasp.New(d, &hasp.Options{TTL: term, Timeout: calmTimeout})
}

// brief runs programs that lock once and end, one after another, as "hasp run"
// does, without a fault. Anything they leave would block others for a term, so
// they may leave nothing.
func (r *run) brief(ctx context.Context) {
	if r.place != onServer || r.store.dir != "" {
		return // a release reaches a replica later
	}
	const rounds = 40
	left, last := 0, []string(nil)
	for range rounds {
		c := r.open(ctx, 0, maxTerm)
		lease, err := c.Lock(ctx, r.names[0])
		if err == nil {
			err = lease.Unlock(ctx)
		}
		r.Check(errors.Join(err, c.Close()))
		if all := r.store.records(ctx); len(all) > 0 {
			left++
			last = all
		}
	}
	// Close waits for a second at most, and the machine may stand still longer.
	if left > 1 {
		r.fail("leftovers", hostclock.Now(), fmt.Sprintf("%d of %d Clients that were opened for one Lock left something at Close, the last one %v", left, rounds, last))
	}
}

// nested re-enters a key again and again, as recursive calls do, under one
// context. When that context is cancelled, all contexts must end long before the
// term.
func (r *run) nested(ctx context.Context) {
	if r.strategy == redlock {
		return // its terms are short here
	}
	const depth = 20
	c := r.open(ctx, 0, time.Minute)
	defer c.Close()
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var all []*hasp.Lease
	for range depth {
		l, err := c.Lock(ctx, r.names[0])
		r.Check(err)
		all = append(all, l)
		ctx = l.Context()
	}

	began := hostclock.Now()
	ended := make(chan struct{})
	stop()
	go func() {
		<-ctx.Done()
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(calmTimeout):
		r.fail("cancelled at once", began, fmt.Sprintf("the context of a lease that is nested %d deep had not ended %v after it was cancelled", depth, calmTimeout))
	}
	for _, l := range slices.Backward(all) {
		_ = l.Unlock(context.Background())
	}
}

// crowd starts callers that have less time than a call to the store may take. A
// majority of the servers hangs, and the keys are free. So no caller may get
// ErrHeld, neither the caller that asks the store nor those behind it in the line.
func (r *run) crowd(ctx context.Context) {
	if r.store.links == nil {
		return
	}
	const clients, bound = 2, 2 * time.Second
	names := r.all[:8]
	var all [clients]*hasp.Client
	for i := range all {
		all[i] = r.open(ctx, i, maxTerm)
		defer all[i].Close()
	}
	for i, c := range all {
		// The callers of the other Client find the keys held, and the Client remembers
		// it.
		leases, err := hasp.LockAll(ctx, c, names)
		r.Check(err)
		for _, name := range names {
			try(ctx, all[1-i], name)
		}
		r.Check(leases.Unlock(ctx))
	}

	// A caller may get ErrHeld if it leaves before a healthy store could have
	// answered. If the machine is that slow, this part checks nothing.
	began := hostclock.Now()
	for _, c := range all {
		try(ctx, c, r.all[len(names)])
	}
	if hostclock.Now()-began > int64(bound/8) {
		return
	}

	for _, links := range r.store.links[:clients] {
		for _, p := range links[:len(links)/2+1] {
			p.Stall()
			defer p.Flow()
		}
	}
	r.askHungStore(ctx, all[:], names, bound)
}

// askHungStore runs callers of free keys, one after another, which wait for bound
// each.
func (r *run) askHungStore(ctx context.Context, clients []*hasp.Client, names []string, bound time.Duration) {
	const callers = 10 // of each Client and key
	began := hostclock.Now()
	var wg sync.WaitGroup
	var held, got atomic.Int32
	var text atomic.Value
	ask := func(c *hasp.Client, name string) {
		ctx, cancel := context.WithTimeout(ctx, bound)
		defer cancel()
		l, err := c.Lock(ctx, name)
		switch {
		case err == nil:
			got.Add(1)
			_ = l.Unlock(ctx)
		case errors.Is(err, hasp.ErrHeld):
			held.Add(1)
			text.Store(err.Error())
		}
	}
	for range callers {
		for _, c := range clients {
			for _, name := range names {
				wg.Go(func() { ask(c, name) })
			}
		}
		time.Sleep(bound / callers)
	}
	wg.Wait()
	if n := held.Load(); got.Load() == 0 && int(n) > len(clients)*callers {
		r.fail("outage reported", began, fmt.Sprintf("%d of %d callers of a store that hangs got ErrHeld for a free key, for example %v",
			n, len(clients)*callers*len(names), text.Load()))
	}
}

// try tries to lock a key, and unlocks it.
func try(ctx context.Context, c *hasp.Client, key string) {
	if l, err := c.TryLock(ctx, key); err == nil {
		_ = l.Unlock(ctx)
	}
}

// busy runs a Client that keeps some keys while many of its callers take others. Their
// holds wait for a distant replica, or the servers are far away, and the renewals must
// not wait behind them. Another Client keeps as many keys and does nothing else.
func (r *run) busy(ctx context.Context) {
	const kept, lasts = 20, 3 * maxTerm
	const callers = 800
	if r.store.service == nil {
		return
	}
	var all [2]*hasp.Client
	var leases [2]*hasp.Leases
	for i := range all {
		all[i] = r.open(ctx, 0, maxTerm)
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
	slept := pause(lasts)
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

	// A machine that stands still for a part of a term may lose leases.
	if held[0] == 0 && held[1] == kept && slept < maxTerm/10 {
		r.fail("kept until its end", began, fmt.Sprintf("all of %d leases were lost without a fault while %d callers of their Client took other keys", kept, callers))
	}
}

// moves checks that Clients that connected before their address led to another master
// still get the key, beside Clients that connected later. Spinlock is left out: it has no turns.
func (r *run) moves(ctx context.Context) {
	if r.store.service == nil || r.strategy == "spinlock" {
		return
	}
	const lasts = 10 * time.Second
	var wg sync.WaitGroup
	var over atomic.Bool
	var holds [2]atomic.Int32 // of the Clients before the move, and of those after it
	defer wg.Wait()
	defer over.Store(true)

	r.contend(ctx, &wg, &over, &holds[0])
	time.Sleep(time.Second) // so that they wait in the queue
	moved(&nemesis{run: r}).heal()
	r.contend(ctx, &wg, &over, &holds[1])

	time.Sleep(lasts / 2) // they may learn of it at their next check of the queue
	began := hostclock.Now()
	holds[0].Store(0)
	holds[1].Store(0)
	time.Sleep(lasts / 2)
	if least, most := holds[0].Load(), holds[1].Load(); least == 0 && most > 100 {
		r.fail("stood still", began, fmt.Sprintf("two Clients never got the key after the address led to another master, and two that connected later got it %d times", most))
	}
}

// contend starts callers of two Clients, which lock one key again and again until it is over.
func (r *run) contend(ctx context.Context, wg *sync.WaitGroup, over *atomic.Bool, holds *atomic.Int32) {
	const clients, callers = 2, 2
	for range clients {
		c := r.open(ctx, 0, maxTerm)
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

// pause waits for a time, and returns the longest time for which this process stood still
// meanwhile.
func pause(lasts time.Duration) (slept time.Duration) {
	began := hostclock.Now()
	for last := began; last < began+int64(lasts); {
		time.Sleep(time.Millisecond)
		now := hostclock.Now()
		slept, last = max(slept, time.Duration(now-last)), now
	}
	return slept
}
