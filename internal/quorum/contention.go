package main

import (
	"context"
	"errors"
	"fmt"
	"github.com/hasplock/hasp/internal/results"
	"io"
	"slices"
	"sync"
	"time"
)

// contention has clients take turns at a key that nobody keeps.
func (m *measurement) contention(ctx context.Context, out io.Writer, g *results.Goals) error {
	t := results.NewTable(out, fmt.Sprintf("%d clients want one key for %v, all well", m.clients, m.race), "", "acquisitions/s",
		"longest without one, ms", "longest wait, ms", "of a client: least", "most", "failed",
		"attempts per acquisition", "split votes per acquisition", "commands per acquisition")
	for _, c := range contestants {
		if !c.races {
			continue
		}
		r, err := m.contend(ctx, c)
		if err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
		n := 0.0
		for _, share := range r.shares {
			n += float64(share)
		}
		gap, wait := float64(r.gap.Milliseconds()), float64(r.wait.Milliseconds())
		t.Row(c.name, int(n/m.race.Seconds()), gap, wait, slices.Min(r.shares), slices.Max(r.shares), r.failed,
			float64(r.tries.all)/n, float64(r.tries.split)/n, float64(r.took.total())/n)
		if c.ours {
			g.AtMost(1000, gap, "contention", c.name+": ms in which nobody is given the key")
			g.AtMost(10_000, wait, "contention", c.name+": ms that a client waits")
			g.AtMost(0, float64(r.failed), "contention", c.name+": Locks and Unlocks that failed")
		}
	}
	return nil
}

// contend lets clients of one kind loose on a key for a while, each with
// connections of its own. These do not lead through the proxies, which would
// have more to do than the servers.
func (m *measurement) contend(ctx context.Context, c contestant) (race, error) {
	var votes votes
	var clients clients
	defer clients.close()
	rivals := make([]locker, m.clients)
	for i := range rivals {
		l, err := c.open(ctx, m.set, clients.straight(m.set, &votes))
		if err != nil {
			return race{}, err
		}
		defer l.close()
		rivals[i] = l
		unlock, err := l.lock(ctx, fmt.Sprint("quorum-own-", i)) // connections are made
		if err == nil {
			err = unlock(ctx)
		}
		if err != nil {
			return race{}, err
		}
	}
	votes.begin()
	before, err := m.set.count(ctx)
	if err != nil {
		return race{}, err
	}
	r := &running{key: "quorum-contended-" + c.name, last: time.Now(), race: race{shares: make([]int, len(rivals))}}
	within, end := context.WithTimeout(ctx, m.race)
	defer end()
	var wg sync.WaitGroup
	for i, l := range rivals {
		wg.Go(func() { r.run(within, i, l) })
	}
	<-within.Done()
	r.tries = votes.count()
	after, err := m.set.count(ctx)
	wg.Wait()
	r.took = after.since(before)
	return r.race, errors.Join(err, r.err)
}

// race is what was seen of clients that wanted one key.
type race struct {
	shares []int         // by client
	gap    time.Duration // the longest in which nobody was given the key
	wait   time.Duration // the longest of a client, to the end of the race if in vain
	failed int           // Locks and Unlocks
	tries  tally
	took   calls
}

// running is a race that has not ended.
type running struct {
	key string

	mu   sync.Mutex // guards all below
	last time.Time  // when somebody was given the key
	held bool
	err  error
	race
}

// run is one client until ctx ends, and then until it has the answer that it
// waits for.
func (r *running) run(ctx context.Context, client int, l locker) {
	asked := time.Now()
	for ctx.Err() == nil {
		unlock, err := l.lock(ctx, r.key)
		r.answered(ctx, client, asked, err)
		if err != nil {
			continue
		}
		r.freed()
		if err := unlock(context.WithoutCancel(ctx)); err != nil {
			r.fail()
		}
		asked = time.Now()
	}
}

func (r *running) answered(ctx context.Context, client int, asked time.Time, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now, over := time.Now(), ctx.Err() != nil
	r.wait = max(r.wait, now.Sub(asked))
	if err == nil || over {
		r.gap = max(r.gap, now.Sub(r.last))
		r.last = now
	}
	switch {
	case err != nil && !over:
		r.failed++
	case err == nil && r.held:
		r.err = errors.New("two had the key at once")
	case err == nil:
		r.held = true
		if !over {
			r.shares[client]++
		}
	}
}

func (r *running) freed() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.held = false
}

func (r *running) fail() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.failed++
}
