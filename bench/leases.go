package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// holders take and give back many leases at once; acquiring bounds how long
// they may take.
const (
	holders   = 128
	acquiring = 12 * time.Second
)

// probing is how often a lone caller locks and unlocks a key beside all the
// leases.
const probing = 20 * time.Millisecond

var errMany = errors.New("it does not take so many leases in " + acquiring.String())

// leases has many held at once, and looks at what keeping them costs, and at
// what it costs others.
func (b *bench) leases(ctx context.Context, c contestant, s crowd) (f figures, err error) {
	l, err := c.open(ctx, b.at, s.term)
	if err != nil {
		return nil, err
	}
	defer l.close()
	name := "bench:" + rand.Text()[:8]
	if _, err := pairs(ctx, l, s.term, distinctKeys(holders), 50*time.Millisecond); err != nil { // connections
		return nil, err
	}
	probe := &prober{l, name, s.term}
	scripts, err := b.warm(ctx, c, probe)
	if err != nil {
		return nil, err
	}
	memory, goroutines := heap(), runtime.NumGoroutine()
	empty, err := b.meter.read(ctx, c)
	if err != nil {
		return nil, err
	}
	all, err := acquire(ctx, l, name, s)
	defer func() {
		lost := release(ctx, all)
		if f != nil {
			f["lost"] = float64(lost)
		}
	}()
	if err != nil {
		return nil, err
	}
	memory, goroutines = heap()-memory, runtime.NumGoroutine()-goroutines
	k, err := b.keep(ctx, c, probe, s.length)
	if err != nil {
		return nil, err
	}
	n := float64(s.leases)
	if s.leases == 0 {
		n = math.NaN() // what is nothing for each
	}
	renewals := (k.server.scripts - scripts*float64(len(k.times))) / float64(max(c.nodes, 1))
	return figures{
		"term_s":                 s.term.Seconds(),
		"renewals_per_s":         max(renewals, 0) / k.seconds,
		"goroutines":             float64(goroutines),
		"client_core_percent":    k.cpu / k.seconds * 100,
		"server_core_percent":    k.server.cpu / k.seconds * 100,
		"client_bytes_per_lease": memory / n,
		"server_bytes_per_lease": k.before.since(empty).memory / n,
		"p50_us":                 percentile(k.times, 50),
		"p99_us":                 percentile(k.times, 99),
	}, nil
}

// kept is what keeping leases has cost for a while.
type kept struct {
	times          []time.Duration // of the lone caller
	seconds, cpu   float64
	before, server spent
}

func (b *bench) keep(ctx context.Context, c contestant, p *prober, length time.Duration) (k kept, err error) {
	if k.before, err = b.meter.read(ctx, c); err != nil {
		return k, err
	}
	cpu, began := cpuTime(), time.Now()
	if k.times, err = p.run(ctx, length); err != nil {
		return k, err
	}
	k.seconds, k.cpu = time.Since(began).Seconds(), (cpuTime() - cpu).Seconds()
	after, err := b.meter.read(ctx, c)
	k.server = after.since(k.before)
	return k, err
}

// warm makes some pairs, and returns how many scripts one takes.
func (b *bench) warm(ctx context.Context, c contestant, p *prober) (scripts float64, err error) {
	const n = 20
	var before, after spent
	for range 2 { // the first time scripts travel
		if before, err = b.meter.read(ctx, c); err != nil {
			return 0, err
		}
		for range n {
			if _, err := p.pair(ctx); err != nil {
				return 0, err
			}
		}
		if after, err = b.meter.read(ctx, c); err != nil {
			return 0, err
		}
	}
	return after.since(before).scripts / n, nil
}

// prober is the lone caller.
type prober struct {
	l    locker
	key  string
	term time.Duration
}

func (p *prober) pair(ctx context.Context) (time.Duration, error) {
	began := time.Now()
	h, err := p.l.lock(ctx, p.key)
	if err == nil {
		err = h.Unlock(context.WithoutCancel(ctx))
	}
	took := time.Since(began)
	if err != nil && (ctx.Err() != nil || excused(err, took, p.term)) {
		err = nil
	}
	return took, err
}

// run makes pairs for a while. One that is stuck is the last.
func (p *prober) run(ctx context.Context, length time.Duration) (times []time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, length+grace)
	defer cancel()
	for end := time.Now().Add(length); time.Now().Before(end); time.Sleep(probing) {
		took, err := p.pair(ctx)
		if err != nil {
			return nil, err
		}
		times = append(times, took)
	}
	slices.Sort(times)
	return times, nil
}

// acquire takes as many leases as it should, less those that a slow machine
// has cost.
func acquire(ctx context.Context, l locker, name string, s crowd) (all []held, err error) {
	all = make([]held, s.leases)
	end := time.Now().Add(acquiring)
	err = together(s.leases, func(i int) error {
		began := time.Now()
		if began.After(end) {
			return errMany
		}
		h, err := l.lock(ctx, fmt.Sprint(name, ":", i))
		switch {
		case err == nil:
			all[i] = h
		case !excused(err, time.Since(began), s.term):
			return err
		}
		return nil
	})
	return all, err
}

// release gives them back, and counts those that were lost.
func release(ctx context.Context, all []held) int64 {
	var lost atomic.Int64
	_ = together(len(all), func(i int) error {
		if all[i] != nil && all[i].Unlock(ctx) != nil {
			lost.Add(1)
		}
		return nil
	})
	return lost.Load()
}

// together does something n times, so many at a time.
func together(n int, do func(i int) error) error {
	var (
		next atomic.Int64
		wg   sync.WaitGroup
		errs = make([]error, holders)
	)
	for h := range holders {
		wg.Go(func() {
			for i := int(next.Add(1)) - 1; i < n && errs[h] == nil; i = int(next.Add(1)) - 1 {
				errs[h] = do(i)
			}
		})
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// heap is what is in use once all garbage is gone, stacks included.
func heap() float64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc + m.StackInuse)
}
