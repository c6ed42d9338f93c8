package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"fmt"
	"runtime"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
)

// figures maps the names of metrics to the results of one turn.
type figures map[string]float64

// keysEach is the number of keys that most callers have.
const keysEach = 8

// measure measures callers that lock and unlock keys of their own.
func (d distinct) measure(ctx context.Context, b *bench, c contestant) (figures, error) {
	l, err := b.locker(ctx, c)
	if err != nil {
		return nil, err
	}
	keys := distinctKeys(d.goroutines, d.keys)
	if d.goroutines == 1 {
		defer b.pin(ctx, c)()
	}

	// This run is not measured. It opens connections and loads scripts.
	if _, err := pairs(ctx, l, term, keys, d.length/4); err != nil {
		return nil, err
	}

	var made made
	var cpu time.Duration
	var m1, m2 runtime.MemStats
	server, err := b.meter.spending(ctx, c, func() (err error) {
		runtime.ReadMemStats(&m1)
		cpu = cpuTime()
		made, err = pairs(ctx, l, term, keys, d.length)
		cpu = cpuTime() - cpu
		runtime.ReadMemStats(&m2)
		return err
	})

	if err != nil {
		return nil, err
	}

	if made.stuck > 0 {
		b.note("%s, %v: %d callers of %s still waited for a free key a second after the end", uncontended, d, made.stuck, c.name)
	}
	n := float64(made.pairs)
	return figures{
		"pairs/s":       n / made.took.Seconds(),
		"allocations":   float64(m2.Mallocs-m1.Mallocs) / n,
		"commands":      server.commands / n,
		"bytes":         server.bytes / n,
		"client CPU µs": cpu.Seconds() / n * 1e6,
		"server CPU µs": server.cpu / n * 1e6,
	}, nil
}

// distinctKeys returns a list of keys for each caller. No key is in two lists, and all have the same
// length.
func distinctKeys(callers, each int) [][]string {
	keys := make([][]string, callers)
	name := rand.Text()[:8]
	for i := range keys {
		for k := range each {
			keys[i] = append(keys[i], fmt.Sprintf("bench:%s:%05d:%03d", name, i, k))
		}
	}

	return keys
}

// made counts what callers have done. A pair is a Lock and its Unlock.
type made struct {
	pairs int
	took  time.Duration // from the start to the end of the last pair
	stuck int           // the number of callers that still waited for a free key at the end
}

// grace is how long a caller may take for its last pair after the time for pairs has passed.
const grace = time.Second

// pairs starts a caller for each list of keys. The callers lock and unlock their keys until the
// duration length has passed.
func pairs(
	ctx context.Context, l locker, term time.Duration, keys [][]string, length time.Duration,
) (all made, err error) {
	ctx, cancel := context.WithTimeout(ctx, length+grace)
	defer cancel()
	var callers errgroup.Group
	var stop atomic.Bool
	each := make([]made, len(keys))
	began := time.Now()
	for i, keys := range keys {
		callers.Go(func() (err error) {
			each[i], err = caller(ctx, l, term, keys, &stop)
			each[i].took = time.Since(began)
			return err
		})
	}

	time.AfterFunc(length, func() { stop.Store(true) })
	err = callers.Wait()

	for _, m := range each {
		all.pairs += m.pairs
		all.stuck += m.stuck
		if m.stuck == 0 {
			all.took = max(all.took, m.took)
		}
	}

	all.took = cmp.Or(all.took, length)
	return all, err
}

// caller locks and unlocks its keys until stop is true. It tries at least one pair.
func caller(
	ctx context.Context, l locker, term time.Duration, keys []string, stop *atomic.Bool,
) (m made, err error) {
	for i := 0; i == 0 || !stop.Load(); i++ {
		done, err := pair(ctx, l, term, keys[i%len(keys)])
		switch {
		case err != nil:
			return m, err
		case done:
			m.pairs++
		case ctx.Err() != nil:
			m.stuck = 1
			return m, nil
		}
	}

	return m, nil
}

// pair locks and unlocks a key, and reports whether both succeeded. It returns an error only if
// neither the end of ctx nor a slow machine explains the failure.
func pair(ctx context.Context, l locker, term time.Duration, key string) (done bool, err error) {
	began := time.Now()
	h, err := l.lock(ctx, key)
	if err == nil {
		err = h.Unlock(context.Background())
	}
	if err != nil && (ctx.Err() != nil || excused(err, time.Since(began), term)) {
		return false, nil
	}
	return err == nil, err
}
