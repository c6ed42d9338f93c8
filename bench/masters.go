package main

import (
	"context"
	"crypto/rand"
	"fmt"
	"time"

	"github.com/hasplock/hasp/internal/redistest"
)

// settling is the time in which a contestant may clean up the keys it left
// behind.
const settling = 1500 * time.Millisecond

// masters measures one caller on five masters, of which one is slow and one is
// down.
func (b *bench) masters(ctx context.Context, c contestant, d degraded) (figures, error) {
	var lab redistest.Lab
	defer lab.Close()
	at, links, err := b.behindProxies(&lab, 0)
	if err != nil {
		return nil, err
	}
	l, err := c.open(ctx, at, term)
	if err != nil {
		return nil, err
	}
	defer l.close()

	// A first run, with all masters, opens connections and loads scripts.
	name := "bench:" + rand.Text()[:8]
	if _, _, err := apart(ctx, l, name+":h", 0, d.length/10); err != nil {
		return nil, err
	}
	time.Sleep(100 * time.Millisecond) // for its calls in flight

	links[3].Delay(d.delay)
	links[4].Close()
	locks, unlocks, err := apart(ctx, l, name+":d", d.pause, d.length)
	if err != nil {
		return nil, err
	}
	orphans, err := b.orphans(ctx, name)
	if err != nil {
		return nil, err
	}
	return figures{
		"lock_p50_ms":     percentile(locks, 50) / 1e3,
		"lock_p99_ms":     percentile(locks, 99) / 1e3,
		"unlock_p50_ms":   percentile(unlocks, 50) / 1e3,
		"unlock_p99_ms":   percentile(unlocks, 99) / 1e3,
		"orphans_per_100": float64(orphans) / float64(len(locks)) * 100,
	}, nil
}

// apart makes pairs, each on a key of its own, and returns how long each half
// took.
func apart(ctx context.Context, l locker, name string, pause, length time.Duration) (locks, unlocks []time.Duration, err error) {
	end := time.Now().Add(length)
	for i := 0; i < 2 || time.Now().Before(end); i++ {
		began := time.Now()
		h, err := l.lock(ctx, fmt.Sprint(name, i))
		had := time.Now()
		if err == nil {
			err = h.Unlock(ctx)
		}
		if err != nil && !excused(err, time.Since(began), term) {
			return nil, nil, err
		}
		if err == nil {
			locks, unlocks = append(locks, had.Sub(began)), append(unlocks, time.Since(had))
		}
		time.Sleep(pause)
	}
	if locks == nil {
		return nil, nil, fmt.Errorf("no Lock returned in time: %w", context.DeadlineExceeded)
	}
	return locks, unlocks, nil
}

// orphans counts the keys that are left on the masters. No caller holds them.
func (b *bench) orphans(ctx context.Context, name string) (n int, err error) {
	for end := time.Now().Add(settling); ; time.Sleep(100 * time.Millisecond) {
		n = 0
		for _, rdb := range b.meter.five {
			keys, err := rdb.Keys(ctx, "*"+name+"*").Result()
			if err != nil {
				return 0, err
			}
			n += len(keys)
		}
		if n == 0 || time.Now().After(end) {
			return n, nil
		}
	}
}
