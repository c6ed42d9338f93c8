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

	"github.com/hasplock/hasp/internal/faultproxy"
)

// holders take and give back many leases at once; acquiring bounds how long
// they may take.
const (
	holders   = 128
	acquiring = 12 * time.Second
)

// probing is how often a lone caller locks and unlocks a key beside all the
// leases.
const probing = 10 * time.Millisecond

var errMany = errors.New("it does not take so many leases in " + acquiring.String())

// leases has many held at once, and looks at what keeping them costs, and at
// what it costs others. The lone caller is measured alone before.
func (b *bench) leases(ctx context.Context, c contestant, s crowd) (f figures, err error) {
	at, m := b.at, b.meter
	cut := func() {}
	if s.unreachable {
		var end func()
		var links []*faultproxy.Proxy
		if at, links, end, err = b.behindProxies(); err != nil {
			return nil, err
		}
		defer end()
		last := len(links) - 1
		m, cut = m.first(last), links[last].Stall
	}
	l, err := c.open(ctx, at, s.term)
	if err != nil {
		return nil, err
	}
	defer l.close()
	name := "bench:" + rand.Text()[:8]
	if _, err := pairs(ctx, l, s.term, distinctKeys(holders), 50*time.Millisecond); err != nil { // connections, scripts
		return nil, err
	}
	probe := &prober{l, name, s.term}
	memory, goroutines := heap(), runtime.NumGoroutine()
	alone, err := probe.beside(ctx, m, c, s.alone)
	if err != nil {
		return nil, err
	}
	all, err := acquire(ctx, l, name, s)
	defer func() {
		if lost := release(ctx, all); f != nil {
			f["lost"] = float64(lost)
		}
	}()
	if err != nil {
		return nil, err
	}
	memory, goroutines = heap()-memory, runtime.NumGoroutine()-goroutines
	cut()
	k, err := probe.beside(ctx, m, c, s.length)
	if err != nil {
		return nil, err
	}
	n := float64(s.leases)
	if s.leases == 0 {
		n = math.NaN() // what is nothing for each
	}
	each := alone.server.scripts / float64(len(alone.pairs)) // a lone pair's
	renewals := (k.server.scripts - each*float64(len(k.pairs))) / float64(m.nodes(c))
	return figures{
		"term_s":                 s.term.Seconds(),
		"renewals_per_s":         max(renewals, 0) / k.seconds,
		"goroutines":             float64(goroutines),
		"client_core_percent":    k.cpu / k.seconds * 100,
		"server_core_percent":    k.server.cpu / k.seconds * 100,
		"client_keeping_percent": (k.cpu/k.seconds - alone.cpu/alone.seconds) * 100,
		"server_keeping_percent": (k.server.cpu/k.seconds - alone.server.cpu/alone.seconds) * 100,
		"client_bytes_per_lease": memory / n,
		"server_bytes_per_lease": k.before.since(alone.before).memory / n,
		"p50_us":                 percentile(k.pairs, 50),
		"p99_us":                 percentile(k.pairs, 99),
		"lock_p99_us":            percentile(k.locks, 99),
		"alone_lock_p99_us":      percentile(alone.locks, 99),
	}, nil
}

// prober is the lone caller.
type prober struct {
	l    locker
	key  string
	term time.Duration
}

// spell is what the lone caller saw, and what all cost meanwhile.
type spell struct {
	locks, pairs   []time.Duration // sorted
	seconds, cpu   float64
	before, server spent
}

// beside makes pairs for a while. One that is stuck is the last.
func (p *prober) beside(ctx context.Context, m *meter, c contestant, length time.Duration) (s spell, err error) {
	if s.before, err = m.read(ctx, c); err != nil {
		return s, err
	}
	bound, cancel := context.WithTimeout(ctx, length+grace)
	defer cancel()
	cpu, began := cpuTime(), time.Now()
	for end := began.Add(length); s.pairs == nil || time.Now().Before(end); time.Sleep(probing) {
		if err := p.pair(bound, &s); err != nil {
			return s, err
		}
	}
	s.seconds, s.cpu = time.Since(began).Seconds(), (cpuTime() - cpu).Seconds()
	slices.Sort(s.locks)
	slices.Sort(s.pairs)
	after, err := m.read(ctx, c)
	s.server = after.since(s.before)
	return s, err
}

func (p *prober) pair(ctx context.Context, s *spell) error {
	began := time.Now()
	h, err := p.l.lock(ctx, p.key)
	s.locks = append(s.locks, time.Since(began))
	if err == nil {
		err = h.Unlock(context.WithoutCancel(ctx))
	}
	took := time.Since(began)
	s.pairs = append(s.pairs, took)
	if err != nil && (ctx.Err() != nil || excused(err, took, p.term)) {
		err = nil
	}
	return err
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
