package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// figures are what one round has shown, by the names of metrics.
type figures map[string]float64

// A caller goes round so many keys of its own.
const keysEach = 8

// uncontended has callers lock and unlock keys that nobody else wants.
func (b *bench) uncontended(ctx context.Context, c contestant, d distinct) (figures, error) {
	l, err := b.locker(ctx, c)
	if err != nil {
		return nil, err
	}
	keys := distinctKeys(d.goroutines)
	if _, err := pairs(ctx, l, term, keys, d.length/4); err != nil { // connections, scripts
		return nil, err
	}
	before, err := b.meter.read(ctx, c)
	if err != nil {
		return nil, err
	}
	var m1, m2 runtime.MemStats
	runtime.ReadMemStats(&m1)
	cpu := cpuTime()
	made, err := pairs(ctx, l, term, keys, d.length)
	cpu = cpuTime() - cpu
	runtime.ReadMemStats(&m2)
	if err != nil {
		return nil, err
	}
	after, err := b.meter.read(ctx, c)
	if err != nil {
		return nil, err
	}
	n, server := float64(len(made.times)), after.since(before)
	return figures{
		"pairs_per_s":           n / made.took.Seconds(),
		"p50_us":                percentile(made.times, 50),
		"p99_us":                percentile(made.times, 99),
		"stuck":                 float64(made.stuck),
		"allocs_per_pair":       float64(m2.Mallocs-m1.Mallocs) / n,
		"commands_per_pair":     server.commands / n,
		"bytes_per_pair":        server.bytes / n,
		"scripts_per_pair":      server.scripts / n,
		"client_cpu_s_per_100k": cpu.Seconds() / n * 1e5,
		"server_cpu_s_per_100k": server.cpu / n * 1e5,
	}, nil
}

// distinctKeys are those of so many callers.
func distinctKeys(callers int) [][]string {
	keys := make([][]string, callers)
	name := rand.Text()[:8]
	for i := range keys {
		for k := range keysEach {
			keys[i] = append(keys[i], fmt.Sprintf("bench:%s:%d:%d", name, i, k))
		}
	}
	return keys
}

// made is what callers have done.
type made struct {
	times []time.Duration // of pairs, sorted
	took  time.Duration   // until the last one
	stuck int             // callers who waited for what nobody else wants
}

// grace is how long a caller may need for its last pair.
const grace = time.Second

// pairs has a caller for each list of keys lock and unlock until the time is
// over.
func pairs(ctx context.Context, l locker, term time.Duration, keys [][]string, length time.Duration) (all made, err error) {
	ctx, cancel := context.WithTimeout(ctx, length+grace)
	defer cancel()
	var (
		wg    sync.WaitGroup
		stop  atomic.Bool
		each  = make([]made, len(keys))
		errs  = make([]error, len(keys))
		began = time.Now()
	)
	for i, keys := range keys {
		wg.Go(func() { each[i], errs[i] = caller(ctx, l, term, keys, &stop) })
	}
	time.AfterFunc(length, func() { stop.Store(true) })
	wg.Wait()
	for _, m := range each {
		all.times = append(all.times, m.times...)
		all.took = max(all.took, m.took)
		all.stuck += m.stuck
	}
	all.took = max(all.took-began.Sub(started), 1)
	slices.Sort(all.times)
	return all, cmp.Or(errs...)
}

// caller makes at least one pair, unless it is stuck.
func caller(ctx context.Context, l locker, term time.Duration, keys []string, stop *atomic.Bool) (m made, err error) {
	always := context.WithoutCancel(ctx)
	m.times = make([]time.Duration, 0, 1024)
	for i := 0; i == 0 || !stop.Load(); i++ {
		began := time.Now()
		h, err := l.lock(ctx, keys[i%len(keys)])
		if err == nil {
			err = h.Unlock(always)
		}
		took := time.Since(began)
		switch {
		case err == nil:
			m.times = append(m.times, took)
			m.took = began.Add(took).Sub(started)
		case ctx.Err() != nil:
			m.stuck++
			return m, nil
		case !excused(err, took, term):
			return m, err
		}
	}
	return m, nil
}
