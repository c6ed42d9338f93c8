package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/hostclock"
)

const (
	patience = 3 * time.Minute  // for what must happen at last
	timeout  = 20 * time.Second // of calls to the store: a slow machine is no outage
	bare     = "bare"           // the way that is no lock
)

// measurement is a run of this program.
type measurement struct {
	options
	crew    *crew
	rdb     *redis.Client
	ordered map[string]bool // strategies
}

// round is what was seen of one way of taking turns.
type round struct {
	holds    []hold // in order
	from, to int64  // the part of it that counts
	took     calls  // of the server, in that part
}

// orders has callers, spread over the processes, take turns at key in a way.
func (m *measurement) orders(way, key string, waiters int, hold time.Duration, every int64) []order {
	n := min(processes, waiters)
	orders := make([]order, n)
	for i := range orders {
		orders[i] = order{Op: "lock", URL: way + "+" + m.redis, Key: key, Waiters: waiters / n, Hold: hold, Every: every}
		if way == bare {
			orders[i] = order{Op: bare, URL: m.redis, Key: fmt.Sprint(key, i), Next: fmt.Sprint(key, (i+1)%n), Hold: hold, Every: every}
		}
	}
	return orders
}

func newKey() string { return "handover-" + rand.Text()[:8] + "-" }

// round has callers take turns for a while, of which the first fifth does not
// count.
func (m *measurement) round(ctx context.Context, way string, waiters int) (round, error) {
	orders := m.orders(way, newKey(), waiters, m.hold, 1<<62)
	err := m.crew.begin(orders...)
	if err == nil && way == bare {
		err = m.rdb.Publish(ctx, orders[0].Key, "next").Err()
	}
	if err == nil {
		err = m.crew.until(m.length/5, 1)
	}
	if err != nil {
		return round{}, err
	}
	return m.watch(ctx, way, waiters, func() error { return m.crew.until(m.length, 1) })
}

// race has callers who all wait when it begins take turns at a key that nobody
// keeps, until it has been had so many times.
func (m *measurement) race(ctx context.Context, strategy string, waiters, holds int) (round, error) {
	first, err := m.first(ctx, strategy)
	if err != nil {
		return round{}, err
	}
	defer first.close()
	err = m.crew.begin(m.orders(strategy, first.key, waiters, 0, int64(max(holds/40, 1)))...)
	if err == nil {
		err = first.queued(ctx, waiters)
	}
	if err != nil {
		return round{}, err
	}
	r, err := m.watch(ctx, strategy, waiters, func() error {
		return errors.Join(first.free(ctx), m.crew.until(patience, int64(holds)))
	})
	if err == nil && len(r.holds) < holds {
		err = fmt.Errorf("%s: %d holds of %d in %v", strategy, len(r.holds), holds, patience)
	}
	return r, err
}

// watch is the part of a round that counts, and its end.
func (m *measurement) watch(ctx context.Context, way string, waiters int, part func() error) (r round, err error) {
	before, err := count(ctx, m.rdb)
	if err != nil {
		return r, err
	}
	r.from = hostclock.Now()
	if err := part(); err != nil {
		return r, err
	}
	r.to = hostclock.Now()
	after, err := count(ctx, m.rdb)
	if err != nil {
		return r, err
	}
	r.took = calls{after.scripts - before.scripts, after.others - before.others}
	if r.holds, err = m.crew.stop(min(processes, waiters)); err != nil {
		return r, err
	}
	return r, check(r.holds, way, waiters)
}

// check returns an error if two had the key at once, or one never.
func check(holds []hold, way string, waiters int) error {
	for i := 1; i < len(holds); i++ {
		if holds[i].Got < holds[i-1].Freed {
			return fmt.Errorf("%s: two callers had the key at once", way)
		}
	}
	if n := len(shares(holds)); way != bare && n != waiters {
		return fmt.Errorf("%s: %d of %d callers had the key", way, n, waiters)
	}
	return nil
}

// handovers returns how long it took from the moment before a holder gave the
// key back until the next one had it who waited for it then: those from one
// process to another, and all, sorted.
func (r round) handovers() (across, all []time.Duration) {
	for i := 1; i < len(r.holds); i++ {
		last, next := r.holds[i-1], r.holds[i]
		if last.Freed < r.from || next.Got > r.to || next.Asked > last.Freed {
			continue
		}
		d := time.Duration(next.Got - last.Freed)
		all = append(all, d)
		if last.Process != next.Process {
			across = append(across, d)
		}
	}
	slices.Sort(across)
	slices.Sort(all)
	return across, all
}

// counted is how many holds began in the part that counts.
func (r round) counted() (n int) {
	for _, h := range r.holds {
		if h.Got >= r.from && h.Got <= r.to {
			n++
		}
	}
	return n
}

// shares counts the holds of each caller.
func shares(holds []hold) map[[2]int]int {
	n := map[[2]int]int{}
	for _, h := range holds {
		n[[2]int{h.Process, h.Waiter}]++
	}
	return n
}

// killed returns how long it takes a waiter to get a key that is released when
// the processes of all who stood before it have been killed.
func (m *measurement) killed(ctx context.Context, strategy string) (time.Duration, error) {
	first, err := m.first(ctx, strategy)
	if err != nil {
		return 0, err
	}
	defer first.close()
	waits := m.orders(strategy, first.key, 1, 0, 1<<62)
	var victims []*crew
	for range m.dead {
		v, err := hire(ctx, 1)
		if err != nil {
			return 0, err
		}
		defer v.dismiss()
		victims = append(victims, v)
		if err := errors.Join(v.begin(waits...), first.queued(ctx, len(victims))); err != nil {
			return 0, err
		}
	}
	if err := errors.Join(m.crew.begin(waits...), first.queued(ctx, m.dead+1)); err != nil {
		return 0, err
	}
	for _, v := range victims {
		v.dismiss()
	}
	freed := hostclock.Now()
	if err := first.free(ctx); err != nil {
		return 0, err
	}
	holds, err := m.crew.stop(1)
	if err != nil {
		return 0, err
	}
	return time.Duration(holds[0].Got - freed), nil
}

// first has the key of a measurement until it begins.
type first struct {
	key     string
	client  *hasp.Client
	lease   *hasp.Lease
	ordered bool
}

func (m *measurement) first(ctx context.Context, strategy string) (*first, error) {
	client, err := hasp.Open(ctx, strategy+"+"+m.redis, &hasp.Options{Timeout: timeout})
	if err != nil {
		return nil, err
	}
	f := &first{key: newKey(), client: client, ordered: m.ordered[strategy]}
	if f.lease, err = client.Lock(ctx, f.key); err != nil {
		client.Close()
		return nil, err
	}
	return f, nil
}

// queued returns when n wait, as far as the strategy can tell.
func (f *first) queued(ctx context.Context, n int) error {
	if !f.ordered {
		time.Sleep(100 * time.Millisecond)
		return nil
	}
	for began := time.Now(); ; time.Sleep(time.Millisecond) {
		s, err := f.client.Inspect(ctx, f.key)
		if err != nil || len(s.Waiters) == n {
			return err
		}
		if time.Since(began) > patience {
			return fmt.Errorf("%d waiters in the queue, want %d", len(s.Waiters), n)
		}
	}
}

func (f *first) free(ctx context.Context) error { return f.lease.Unlock(ctx) }

func (f *first) close() {
	_ = f.lease.Unlock(context.Background()) // if it was not freed
	f.client.Close()
}
