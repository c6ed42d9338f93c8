package main

import (
	"context"
	"fmt"
	"github.com/hasplock/hasp/internal/results"
	"io"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"time"
)

// entrant is a contestant with its connections.
type entrant struct {
	contestant
	locker
	prefix string // of its keys
	figures
}

// key is one that nobody has had.
func (e *entrant) key() string { return e.prefix + strconv.FormatUint(rand.Uint64(), 36) }

// figures are what was seen of one contestant under one condition.
type figures struct {
	locks, unlocks []time.Duration
	failed         int // Locks and Unlocks
	orphans        int // keys left on servers that are not down
}

// enter opens all contestants.
func (m *measurement) enter(ctx context.Context) (all []*entrant, leave func(), err error) {
	var clients clients
	leave = func() {
		for _, e := range all {
			e.close()
		}
		clients.close()
	}
	for i, c := range contestants {
		l, err := c.open(ctx, m.set, clients.through(m.set))
		if err != nil {
			leave()
			return nil, nil, fmt.Errorf("%s: %w", c.name, err)
		}
		all = append(all, &entrant{contestant: c, locker: l, prefix: fmt.Sprintf("quorum-%d-", i)})
	}
	return all, leave, nil
}

// latencies measures Lock and Unlock of a lone caller under each condition.
func (m *measurement) latencies(ctx context.Context, out io.Writer, g *results.Goals) error {
	all, leave, err := m.enter(ctx)
	if err != nil {
		return err
	}
	defer leave()
	for _, c := range m.conditions {
		if err := m.compete(ctx, c, all); err != nil {
			return err
		}
		t := results.NewTable(out, strings.ToUpper(c.name[:1])+c.name[1:], "", "pairs",
			"Lock: p50 µs", "of by hand", "p99 µs", "of by hand", "Unlock: p50 µs", "of by hand", "p99 µs", "of by hand", "failed", "orphan keys")
		for _, e := range all {
			lock50, lock := compare(e.locks, all[0].locks)
			unlock50, unlock := compare(e.unlocks, all[0].unlocks)
			t.Row(slices.Concat([]any{e.name, len(e.locks)}, lock, unlock, []any{e.failed, e.orphans})...)
			if e.ours {
				g.AtMost(1.5, lock50, c.name, e.name+": median Lock, of by hand")
				g.AtMost(1.5, unlock50, c.name, e.name+": median Unlock, of by hand")
				g.AtMost(0, float64(e.failed), c.name, e.name+": Locks and Unlocks that failed")
				g.AtMost(0, float64(e.orphans), c.name, e.name+": orphan keys")
			}
		}
	}
	return m.set.be(allWell, 0)
}

// compare returns the ratio of the medians, and cells.
func compare(got, base []time.Duration) (ratio float64, cells []any) {
	for _, p := range []int{50, 99} {
		a, b := results.Percentile(got, p), results.Percentile(base, p)
		cells = append(cells, a, a/b)
	}
	return cells[1].(float64), cells
}

// compete has all take turns under a condition.
func (m *measurement) compete(ctx context.Context, c condition, all []*entrant) error {
	if err := m.set.be(c, m.delay); err != nil {
		return err
	}
	for began, round := time.Now(), 0; round <= m.rounds && (round <= 1 || time.Since(began) < m.under); round++ {
		for _, i := range rand.Perm(len(all)) {
			e := all[i]
			if round <= 1 { // before the first, connections are made
				e.figures = figures{}
			}
			if err := m.turns(ctx, c, e); err != nil {
				return err
			}
		}
	}
	for _, e := range all {
		slices.Sort(e.locks)
		slices.Sort(e.unlocks)
	}
	return nil
}

// turns are those of one contestant in a round. They end when what it left to
// itself has had the time to end, too.
func (m *measurement) turns(ctx context.Context, c condition, e *entrant) error {
	for n, began := 0, time.Now(); n < m.pairs && (n == 0 || time.Since(began) < m.turn); n++ {
		if err := ctx.Err(); err != nil {
			return err
		}
		asked := time.Now()
		unlock, err := e.lock(ctx, e.key())
		got := time.Now()
		if err != nil {
			e.failed++
			continue
		}
		if unlock(ctx) != nil {
			e.failed++
			continue
		}
		e.locks, e.unlocks = append(e.locks, got.Sub(asked)), append(e.unlocks, time.Since(got))
	}
	wait := 50 * time.Millisecond
	if c.slow {
		wait += 2 * m.delay
	}
	time.Sleep(wait)
	orphans, err := sweep(ctx, m.set.reachable(c), e.prefix)
	e.orphans += orphans
	return err
}

// commands counts what servers are told for a Lock and for an Unlock.
func (m *measurement) commands(ctx context.Context, out io.Writer, _ *results.Goals) error {
	all, leave, err := m.enter(ctx)
	if err != nil {
		return err
	}
	defer leave()
	t := results.NewTable(out, "Commands, with those in scripts, all well", "", "Lock: per server", "in total", "Unlock: per server", "in total", "which, on a server")
	for _, e := range all {
		var took [2]calls
		_, err := m.counting(ctx, e) // connections are made, scripts loaded
		if err == nil {
			took, err = m.counting(ctx, e)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", e.name, err)
		}
		each := float64(m.counted)
		row := []any{e.name}
		for _, c := range took {
			row = append(row, float64(c.total())/each/nodes, float64(c.total())/each)
		}
		t.Row(append(row, took[0].per(each*nodes)+"; "+took[1].per(each*nodes))...)
	}
	return nil
}

// counting locks some keys, and then unlocks them.
func (m *measurement) counting(ctx context.Context, e *entrant) (took [2]calls, err error) {
	var unlocks []func(context.Context) error
	for op := range took {
		before, err := m.set.count(ctx)
		if err != nil {
			return took, err
		}
		for i := range m.counted {
			if op == 0 {
				unlock, err := e.lock(ctx, e.key())
				if err != nil {
					return took, err
				}
				unlocks = append(unlocks, unlock)
			} else if err := unlocks[i](ctx); err != nil {
				return took, err
			}
		}
		time.Sleep(50 * time.Millisecond) // the last ones are still under way
		after, err := m.set.count(ctx)
		if err != nil {
			return took, err
		}
		took[op] = after.since(before)
	}
	return took, nil
}
