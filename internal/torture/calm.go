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
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/hostclock"
)

// calm is what programs do at the end of a run, when its faults are over. Each
// part looks for something that a fault on top of it would hide.
func (r *run) calm() error {
	if r.plant != "" {
		return nil
	}
	parts := []func() error{r.brief}
	if !r.losing {
		parts = append(parts, r.nested, r.crowd, r.busy, r.moves)
	}
	for _, part := range parts {
		// A machine that stands still for a term loses leases while a part prepares.
		// Then that part finds nothing.
		if err := part(); err != nil && !errors.Is(err, hasp.ErrLost) {
			return err
		}
	}
	return nil
}

// brief is programs that lock once and end, one after another, as "hasp run"
// does, while nothing is wrong. What they leave would be in the way of others
// for a term, so nothing may be left when they have ended.
func (r *run) brief() error {
	const rounds = 40
	if r.place != onServer || r.store.dir != "" {
		return nil // a replica learns of a release later
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	left, what := 0, []string(nil)
	for range rounds {
		c, err := hasp.Open(ctx, r.store.urls[0], &hasp.Options{TTL: maxTerm, Timeout: 10 * time.Second})
		if err != nil {
			return err
		}
		lease, err := c.Lock(ctx, r.names[0])
		if err == nil {
			err = lease.Unlock(ctx)
		}
		if err := errors.Join(err, c.Close()); err != nil {
			return err
		}
		all, err := r.store.records(ctx)
		if err != nil {
			return err
		}
		if left += one(len(all) > 0); len(all) > 0 {
			what = all
		}
	}
	// Close waits for a second at most, and this machine may stand still longer.
	if left > 1 {
		r.fail("leftovers", hostclock.Now(), fmt.Sprintf("%d of %d Clients that were opened for one Lock left something at Close, at last %v", left, rounds, what))
	}
	return nil
}

// nested is a key that is re-entered again and again, as recursive calls do, under
// one context. When that is cancelled, all contexts end long before the term does.
func (r *run) nested() error {
	const depth, long, bound = 20, time.Minute, 10 * time.Second
	if r.strategy == redlock {
		return nil // its terms are short here
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, err := hasp.Open(ctx, r.store.urls[0], &hasp.Options{TTL: long, Timeout: bound})
	if err != nil {
		return err
	}
	defer c.Close()
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var all []*hasp.Lease
	for range depth {
		l, err := c.Lock(ctx, r.names[0])
		if err != nil {
			return err
		}
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
	case <-time.After(bound):
		r.fail("cancelled at once", began, fmt.Sprintf("the context of a lease that is nested %d deep goes on for %v after it was cancelled", depth, bound))
	}
	for _, l := range slices.Backward(all) {
		_ = l.Unlock(context.Background())
	}
	return nil
}

// crowd is callers that have less time than a call to the store may take. A
// majority of the servers hangs, and nobody has the keys. So no caller may be
// told that a key is held, neither the one that asks the store nor those behind
// it in the line.
func (r *run) crowd() error {
	if r.store.links == nil {
		return nil
	}
	const clients, callers, bound = 2, 10, 2 * time.Second
	names := r.all[:8]
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	all := make([]*hasp.Client, clients)
	for i := range all {
		c, err := hasp.Open(ctx, r.store.urls[i], &hasp.Options{TTL: maxTerm, Timeout: 5 * bound})
		if err != nil {
			return err
		}
		defer c.Close()
		all[i] = c
	}
	for i, c := range all {
		// The others find the keys held, which they remember.
		leases, err := hasp.LockAll(ctx, c, names)
		if err != nil {
			return err
		}
		for _, name := range names {
			if l, err := all[1-i].TryLock(ctx, name); err == nil {
				_ = l.Unlock(ctx)
			}
		}
		if err := leases.Unlock(ctx); err != nil {
			return err
		}
	}

	// A caller that leaves before a store that is well could have answered may be
	// told so. This machine may be too slow for bound to be longer than that.
	began := hostclock.Now()
	for _, c := range all {
		if l, err := c.TryLock(ctx, r.all[len(names)]); err == nil {
			_ = l.Unlock(ctx)
		}
	}
	if hostclock.Now()-began > int64(bound/8) {
		return nil
	}

	hang := func(do func(*faultproxy.Proxy)) {
		for _, links := range r.store.links[:clients] {
			for _, p := range links[:len(links)/2+1] {
				do(p)
			}
		}
	}
	hang((*faultproxy.Proxy).Stall)
	defer hang((*faultproxy.Proxy).Flow)
	began = hostclock.Now()
	var wg sync.WaitGroup
	var held, got atomic.Int32
	var said atomic.Value
	for _, c := range all {
		for i := range callers {
			for _, name := range names {
				wg.Go(func() {
					time.Sleep(time.Duration(i) * bound / callers)
					ctx, cancel := context.WithTimeout(ctx, bound)
					defer cancel()
					l, err := c.Lock(ctx, name)
					switch {
					case err == nil:
						got.Add(1)
						_ = l.Unlock(ctx)
					case errors.Is(err, hasp.ErrHeld):
						held.Add(1)
						said.Store(err.Error())
					}
				})
			}
		}
	}
	wg.Wait()
	if n := held.Load(); got.Load() == 0 && n > clients*callers {
		r.fail("outage told", began, fmt.Sprintf("%d of %d callers before a store that hangs were told that a free key is held, such as by %v",
			n, clients*callers*len(names), said.Load()))
	}
	return nil
}

// busy is a Client that keeps some keys while hundreds of callers take others.
// Each of their holds waits for a replica that is some way off, and the renewals
// must not wait behind them. Another Client keeps as many keys and does nothing else.
func (r *run) busy() error {
	if r.store.service == nil {
		return nil
	}
	const kept, callers, lasts = 20, 800, 3 * maxTerm
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var all [2]*hasp.Client
	var leases [2]*hasp.Leases
	for i := range all {
		c, err := hasp.Open(ctx, r.store.urls[0], &hasp.Options{TTL: maxTerm, Timeout: 10 * time.Second})
		if err != nil {
			return err
		}
		defer c.Close()
		if leases[i], err = hasp.LockAll(ctx, c, r.all[i*kept:][:kept]); err != nil {
			return err
		}
		all[i] = c
	}
	began := hostclock.Now()
	var wg sync.WaitGroup
	for i := range callers {
		wg.Go(func() {
			for end := time.Now().Add(lasts); time.Now().Before(end); {
				if l, err := all[0].Lock(ctx, fmt.Sprintf("torture-busy-%03d", i)); err == nil {
					_ = l.Unlock(ctx)
				}
			}
		})
	}
	wg.Wait()
	var held [2]int
	for i, some := range leases {
		for _, l := range some.All() {
			held[i] += one(l.Err() == nil)
		}
		_ = some.Unlock(ctx)
	}
	// Where this machine stands still for a term, both lose their leases.
	if held[0] == 0 && held[1] == kept {
		r.fail("kept until its end", began, fmt.Sprintf("all of %d leases were lost while %d callers of their Client took other keys and nothing was wrong", kept, callers))
	}
	return nil
}

// moves is Clients of a queue that were there before their address led to another
// master, and Clients that came later. All have their turns.
func (r *run) moves() error {
	if r.store.service == nil || r.strategy != fairlock {
		return nil
	}
	const callers, lasts = 2, 10 * time.Second
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var wg sync.WaitGroup
	defer wg.Wait()
	var over atomic.Bool
	defer over.Store(true)
	come := func() (*atomic.Int32, error) {
		c, err := hasp.Open(ctx, r.store.urls[0], &hasp.Options{TTL: maxTerm, Timeout: 10 * time.Second})
		if err != nil {
			return nil, err
		}
		holds := new(atomic.Int32)
		var mine sync.WaitGroup
		for range callers {
			mine.Go(func() {
				for !over.Load() {
					if l, err := c.Lock(ctx, r.names[0]); err == nil {
						holds.Add(1)
						_ = l.Unlock(ctx)
					}
				}
			})
		}
		wg.Go(func() {
			mine.Wait()
			c.Close()
		})
		return holds, nil
	}
	var all []*atomic.Int32 // by Client, those of before the move first
	for i := range 4 {
		if i == 2 {
			time.Sleep(time.Second) // so that the first two wait in the queue
			in, ok := moved(false)(&nemesis{run: r})
			if !ok {
				return nil // which is noted
			}
			if err := in.heal(); err != nil {
				return err
			}
		}
		holds, err := come()
		if err != nil {
			return err
		}
		all = append(all, holds)
	}
	time.Sleep(lasts / 2) // they may find out by their next look at the queue
	began := hostclock.Now()
	for _, holds := range all {
		holds.Store(0)
	}
	time.Sleep(lasts / 2)
	least, most := all[0].Load()+all[1].Load(), all[2].Load()+all[3].Load()
	if least == 0 && most > 100 {
		r.fail("stood still", began, fmt.Sprintf("two Clients never had the key since the address leads to another master, and two that came later had it %d times", most))
	}
	return nil
}
