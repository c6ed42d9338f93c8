package main

import (
	"context"
	"crypto/rand"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/hasplock/hasp/internal/faultproxy"
)

// settling is how long keys that are left behind may take to be cleaned up.
const settling = 1500 * time.Millisecond

// masters has one caller lock and unlock on five masters of which one is slow
// and one is down.
func (b *bench) masters(ctx context.Context, c contestant, d degraded) (figures, error) {
	at, links, end, err := b.behindProxies()
	if err != nil {
		return nil, err
	}
	defer end()
	l, err := c.open(ctx, at, term)
	if err != nil {
		return nil, err
	}
	defer l.close()
	name := "bench:" + rand.Text()[:8]
	healthy, _, err := apart(ctx, l, name+":h", 0, d.length/10)
	if err != nil {
		return nil, err
	}
	time.Sleep(100 * time.Millisecond) // for what that has still under way
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
		"healthy_lock_p50_ms": percentile(healthy, 50) / 1e3,
		"lock_p50_ms":         percentile(locks, 50) / 1e3,
		"lock_p99_ms":         percentile(locks, 99) / 1e3,
		"unlock_p50_ms":       percentile(unlocks, 50) / 1e3,
		"unlock_p99_ms":       percentile(unlocks, 99) / 1e3,
		"pairs":               float64(len(locks)),
		"orphans_per_100":     float64(orphans) / float64(len(locks)) * 100,
	}, nil
}

// behindProxies are the five masters through one proxy each.
func (b *bench) behindProxies() (at stores, links []*faultproxy.Proxy, end func(), err error) {
	end = func() {
		for _, p := range links {
			p.Close()
		}
	}
	for _, url := range b.at.Five {
		host := strings.TrimPrefix(url, "redis://")
		p, err := faultproxy.Listen(func() (net.Conn, error) { return net.Dial("tcp", host) })
		if err != nil {
			end()
			return at, nil, nil, err
		}
		links = append(links, p)
		at.Five = append(at.Five, "redis://"+p.Addr())
	}
	return at, links, end, nil
}

// apart makes pairs on keys of their own, and returns how long each half
// took, sorted.
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
		return nil, nil, fmt.Errorf("it never locks: %w", context.DeadlineExceeded)
	}
	slices.Sort(locks)
	slices.Sort(unlocks)
	return locks, unlocks, nil
}

// orphans counts the keys that nobody holds and that are there all the same.
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
