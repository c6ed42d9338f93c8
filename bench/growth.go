package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"math"
	"sync"
	"time"

	"github.com/hasplock/hasp/internal/redistest"
)

// growth adds the turns of the scenario of growth. It measures hasp only.
func (b *bench) growth(order []contestant, add func(fmt.Stringer, contestant, func(context.Context) (figures, error))) {
	g := b.plan.growth
	for _, n := range g.nodes {
		for _, c := range order {
			if c.group == ours && c.nodes == 5 {
				add(n, c, func(ctx context.Context) (figures, error) { return b.quorumOf(ctx, c, n) })
			}
		}
	}
	for _, s := range g.keys {
		for _, c := range order {
			if s.leases <= c.grows {
				add(s, c, func(ctx context.Context) (figures, error) { return b.keysHeld(ctx, c, s) })
			}
		}
	}

	// These come last. A minute after thousands of waiters of a fairlock have been
	// cancelled, their Clients release their tokens once more.
	for _, s := range g.contests {
		for _, c := range order {
			if c.group == ours && s.includes(c) && !c.asked {
				add(s, c, func(ctx context.Context) (figures, error) { return b.line(ctx, c, s) })
			}
		}
	}
}

// quorumOf measures a lone caller on n nodes.
func (b *bench) quorumOf(ctx context.Context, c contestant, n quorumSize) (figures, error) {
	var lab redistest.Lab
	defer lab.Close()
	var at stores
	if err := lab.Do(func() error {
		for range n {
			at.Five = append(at.Five, redistest.Start(&lab, &redistest.Options{Own: true, Real: true}).URL())
		}
		return nil
	}); err != nil {
		return nil, err
	}

	at.One, c.nodes = at.Five[0], int(n)
	m, err := newMeter(at)
	if err != nil {
		return nil, err
	}
	defer m.close()
	l, err := c.open(ctx, at, term)
	if err != nil {
		return nil, err
	}
	defer l.close()

	// A first run opens connections and loads scripts.
	probe := &prober{l: l, key: "bench:" + rand.Text()[:8], term: term}
	if _, err := probe.beside(ctx, m, c, b.plan.growth.length/4); err != nil {
		return nil, err
	}
	s, err := probe.beside(ctx, m, c, b.plan.growth.length)
	if err != nil {
		return nil, err
	}
	return s.figures(), nil
}

// figures returns what a pair of a lone caller costs.
func (s spell) figures() figures {
	n := float64(len(s.pairs))
	return figures{
		"p50_us":             percentile(s.pairs, 50),
		"p99_us":             percentile(s.pairs, 99),
		"commands_per_pair":  s.server.commands / n,
		"client_us_per_pair": s.cpu / n * 1e6,
		"server_us_per_pair": s.server.cpu / n * 1e6,
	}
}

// line measures callers that contend for one key. In one process, it also measures
// the memory of callers that wait.
func (b *bench) line(ctx context.Context, c contestant, s contest) (figures, error) {
	if err := b.settle(ctx, c); err != nil {
		return nil, err
	}
	memory := figures{}
	if s.processes == 1 && s.waiters >= fewest {
		var err error
		if memory, err = b.waiting(ctx, c, s.waiters); err != nil {
			return nil, err
		}
		if err := b.settle(ctx, c); err != nil {
			return nil, err
		}
	}
	f, err := b.contended(ctx, growth, c, s)
	if err != nil {
		return nil, err
	}
	maps.Copy(f, memory)
	return f, nil
}

// settle waits until thousands of waiters that have left a queue are removed from it.
func (b *bench) settle(ctx context.Context, c contestant) error {
	before, err := b.meter.read(ctx, c)
	for end := time.Now().Add(5 * time.Second); err == nil && time.Now().Before(end); {
		time.Sleep(50 * time.Millisecond)
		var after spent
		after, err = b.meter.read(ctx, c)
		if after.since(before).commands < 50 {
			break
		}
		before = after
	}
	return err
}

// waiting returns the memory that n callers take while another caller holds the key.
func (b *bench) waiting(ctx context.Context, c contestant, n int) (figures, error) {
	l, err := b.locker(ctx, c)
	if err != nil {
		return nil, err
	}
	key := "bench:" + rand.Text()[:8]
	h, err := l.lock(ctx, key)
	if err != nil {
		return nil, err
	}
	memory := heap()
	before, err := b.meter.read(ctx, c)
	if err != nil {
		return nil, err
	}

	bound, stop := context.WithCancel(ctx)
	defer stop()
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() { _, _ = l.lock(bound, key) }) // the key is held until all have left
	}
	time.Sleep(500*time.Millisecond + time.Duration(n)*300*time.Microsecond) // until all wait
	after, err := b.meter.read(ctx, c)
	memory = heap() - memory

	stop()
	wg.Wait()
	return figures{
		"client_bytes_per_waiter": memory / float64(n),
		"server_bytes_per_waiter": max(after.since(before).memory/float64(n), 0),
	}, errors.Join(err, h.Unlock(ctx))
}

// fewest is the smallest number of leases or waiters for which memory is divided
// among them.
const fewest = 1000

// keysHeld measures many leases, and a lone caller beside them: first while no
// renewal is due, and then until every lease has been renewed.
func (b *bench) keysHeld(ctx context.Context, c contestant, s crowd) (f figures, err error) {
	l, err := c.open(ctx, b.at, s.term)
	if err != nil {
		return nil, err
	}
	defer l.close()

	// A first run opens connections and loads scripts.
	if _, err := pairs(ctx, l, s.term, distinctKeys(takers), 50*time.Millisecond); err != nil {
		return nil, err
	}
	name := "bench:" + rand.Text()[:8]
	seldom := &prober{l, name, s.term, probing}
	without, err := seldom.beside(ctx, b.meter, c, alone)
	if err != nil {
		return nil, err
	}

	memory := heap()
	before, err := b.meter.read(ctx, c)
	if err != nil {
		return nil, err
	}
	began := time.Now()
	all, err := acquire(ctx, l, name, s)
	defer func() {
		if lost := release(ctx, all); f != nil {
			f["lost"] = float64(lost)
		}
	}()
	if err != nil {
		return nil, err
	}
	took := time.Since(began)
	after, err := b.meter.read(ctx, c)
	if err != nil {
		return nil, err
	}
	memory = heap() - memory

	often := &prober{l: l, key: name, term: s.term}
	quiet, err := often.beside(ctx, b.meter, c, min(time.Second, s.term/8))
	if err != nil {
		return nil, err
	}
	if s.leases < fewest {
		return quiet.figures(), nil
	}
	with, err := seldom.beside(ctx, b.meter, c, s.length)
	if err != nil {
		return nil, err
	}

	n := float64(s.leases)
	f = quiet.figures()
	each := quiet.server.scripts / float64(len(quiet.pairs)) // scripts of a lone pair
	renewals := (with.server.scripts - each*float64(len(with.pairs))) / float64(b.meter.nodes(c))
	if renewals < n/2 {
		renewals = math.NaN() // of memlock they are not known
	}

	// A lone pair costs more CPU time if the caller pauses before it, as in both of these.
	part := float64(len(with.pairs)) / float64(len(without.pairs))
	f["taken_per_s"] = n / took.Seconds()
	f["renewals_per_s"] = renewals / with.seconds
	f["client_us_per_renewal"] = (with.cpu - without.cpu*part) / renewals * 1e6
	f["server_us_per_renewal"] = (with.server.cpu - without.server.cpu*part) / renewals * 1e6
	f["renewing_p99_us"] = percentile(with.pairs, 99)
	f["client_bytes_per_lease"] = memory / n
	f["server_bytes_per_lease"] = max(after.since(before).memory/n, 0)
	return f, nil
}
