package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
)

const (
	takers    = 128              // the number of goroutines that the function together uses
	acquiring = 12 * time.Second // the time limit of the function acquire
)

// probing is the pause of the lone caller between two pairs.
const probing = 10 * time.Millisecond

var errMany = errors.New("it does not take that many leases in time")

// measure measures the cost of many leases, and their effect on a lone caller.
// The lone caller is measured without leases first.
func (s crowd) measure(ctx context.Context, b *bench, c contestant) (f figures, err error) {
	l, err := c.open(ctx, b.at[0], s.term)
	if err != nil {
		return nil, err
	}
	defer l.close()

	// This run is not measured. It opens connections and loads scripts.
	if _, err := pairs(ctx, l, s.term, distinctKeys(takers, keysEach),
		50*time.Millisecond); err != nil {
		return nil, err
	}
	name := "bench:" + rand.Text()[:8]
	probe := &prober{l, name, s.term}
	memory := heap()
	without, err := probe.beside(ctx, &b.meter, c, alone)
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
	memory = heap() - memory
	with, err := probe.beside(ctx, &b.meter, c, s.length)
	if err != nil {
		return nil, err
	}

	each := without.server.scripts / float64(len(without.pairs)) // scripts of a lone pair
	renewals := (with.server.scripts - each*float64(len(with.pairs))) / float64(len(b.meter.servers(c)))
	return figures{
		"renewals/s":          max(renewals, 0) / with.seconds,
		"client, % of a core": (with.cpu/with.seconds - without.cpu/without.seconds) * 100,
		"server, % of a core": (with.server.cpu/with.seconds - without.server.cpu/without.seconds) * 100,
		"client bytes/lease":  memory / float64(s.leases),
		"lone pair p50 µs":    percentile(with.pairs, 50),
		"p99 µs":              percentile(with.pairs, 99),
	}, nil
}

// prober is the lone caller.
type prober struct {
	l    locker
	key  string
	term time.Duration
}

// spell contains the lone caller's times, and what this process and the stores spent meanwhile.
type spell struct {
	pairs        []time.Duration
	seconds, cpu float64
	server       spent
}

// beside measures pairs until the duration length has passed. A stuck pair is the last pair.
func (p *prober) beside(
	ctx context.Context, m *meter, c contestant, length time.Duration,
) (s spell, err error) {
	bound, cancel := context.WithTimeout(ctx, length+grace)
	defer cancel()
	s.server, err = m.spending(ctx, c, func() error {
		cpu := cpuTime()
		began := time.Now()
		for s.pairs == nil || time.Since(began) < length {
			start := time.Now()
			_, err := pair(bound, p.l, p.term, p.key)
			s.pairs = append(s.pairs, time.Since(start))
			if err != nil {
				return err
			}
			time.Sleep(probing)
		}
		s.seconds = time.Since(began).Seconds()
		s.cpu = (cpuTime() - cpu).Seconds()
		return nil
	})

	return s, err
}

// acquire locks the keys of the setting, and leaves out a key whose Lock failed because the machine
// was slow.
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

// release unlocks all leases, and returns how many were lost.
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

// together calls do(0) to do(n-1) on several goroutines, and returns the first error.
func together(n int, do func(i int) error) error {
	var all errgroup.Group
	all.SetLimit(takers)
	for i := range n {
		all.Go(func() error { return do(i) })
	}
	return all.Wait()
}

// heap returns the bytes of live objects and stacks.
func heap() float64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc + m.StackInuse)
}
