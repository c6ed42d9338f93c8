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

// calm runs programs at the end of a run, after its faults. Each part checks a
// promise whose violation another fault would hide.
func (r *run) calm() error {
	if r.plant != "" {
		return nil
	}
	parts := []func() error{r.brief}
	if !r.losing {
		parts = append(parts, r.nested, r.crowd, r.busy, r.moves)
	}
	for _, part := range parts {
		// If the machine stands still for a term, leases are lost while a part
		// prepares. Then the part checks nothing.
		if err := part(); err != nil && !errors.Is(err, hasp.ErrLost) {
			return err
		}
	}
	return nil
}

// brief runs programs that lock once and end, one after another, as "hasp run"
// does, without a fault. Anything they leave would block others for a term, so
// they may leave nothing.
func (r *run) brief() error {
	const rounds = 40
	if r.place != onServer || r.store.dir != "" {
		return nil // a release reaches a replica later
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	left, last := 0, []string(nil)
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
			last = all
		}
	}
	// Close waits for a second at most, and the machine may stand still longer.
	if left > 1 {
		r.fail("leftovers", hostclock.Now(), fmt.Sprintf("%d of %d Clients that were opened for one Lock left something at Close, the last one %v", left, rounds, last))
	}
	return nil
}

// nested re-enters a key again and again, as recursive calls do, under one
// context. When that context is cancelled, all contexts must end long before the
// term.
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
		r.fail("cancelled at once", began, fmt.Sprintf("the context of a lease that is nested %d deep had not ended %v after it was cancelled", depth, bound))
	}
	for _, l := range slices.Backward(all) {
		_ = l.Unlock(context.Background())
	}
	return nil
}

// crowd starts callers that have less time than a call to the store may take. A
// majority of the servers hangs, and the keys are free. So no caller may get
// ErrHeld, neither the caller that asks the store nor those behind it in the line.
func (r *run) crowd() error {
	const clients, callers, bound = 2, 10, 2 * time.Second
	if r.store.links == nil {
		return nil
	}
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
		// The callers of the other Client find the keys held, and the Client remembers
		// it.
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

	// A caller may get ErrHeld if it leaves before a healthy store could have
	// answered. If the machine is that slow, this part checks nothing.
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
	var text atomic.Value
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
						text.Store(err.Error())
					}
				})
			}
		}
	}
	wg.Wait()
	if n := held.Load(); got.Load() == 0 && n > clients*callers {
		r.fail("outage reported", began, fmt.Sprintf("%d of %d callers of a store that hangs got ErrHeld for a free key, for example %v",
			n, clients*callers*len(names), text.Load()))
	}
	return nil
}

// busy runs a Client that keeps some keys while hundreds of its callers take
// others. Each of their holds waits for a distant replica, and the renewals must
// not wait behind them. Another Client keeps as many keys and does nothing else.
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
	// If the machine stands still for a term, both lose their leases.
	if held[0] == 0 && held[1] == kept {
		r.fail("kept until its end", began, fmt.Sprintf("all of %d leases were lost without a fault while %d callers of their Client took other keys", kept, callers))
	}
	return nil
}

// moves runs Clients of a queue that connected before their address led to
// another master, and Clients that connected later. All must get the key.
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
	start := func() (*atomic.Int32, error) {
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

	var all []*atomic.Int32 // holds by Client; the first two connect before the move
	for i := range 4 {
		if i == 2 {
			time.Sleep(time.Second) // so that the first two wait in the queue
			in, ok := moved(false)(&nemesis{run: r})
			if !ok {
				return nil // a violation is noted
			}
			if err := in.heal(); err != nil {
				return err
			}
		}
		holds, err := start()
		if err != nil {
			return err
		}
		all = append(all, holds)
	}

	time.Sleep(lasts / 2) // they may learn of it at their next check of the queue
	began := hostclock.Now()
	for _, holds := range all {
		holds.Store(0)
	}
	time.Sleep(lasts / 2)
	least, most := all[0].Load()+all[1].Load(), all[2].Load()+all[3].Load()
	if least == 0 && most > 100 {
		r.fail("stood still", began, fmt.Sprintf("two Clients never got the key after the address led to another master, and two that connected later got it %d times", most))
	}
	return nil
}
