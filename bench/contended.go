package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"time"
)

// hold is one turn at the key.
type hold struct {
	process, caller   int
	asked, got, freed int64
}

// contended has callers of some processes want the same key.
func (b *bench) contended(ctx context.Context, c contestant, s contest) (figures, error) {
	orders := make([]order, s.processes)
	key := "bench:" + rand.Text()[:8]
	for i := range orders {
		n := s.waiters / s.processes
		if i < s.waiters%s.processes {
			n++
		}
		orders[i] = order{Op: "open", Contestant: c.name, Stores: b.at, Key: key, Waiters: n, Hold: s.hold}
	}
	if c.name == ringName {
		placeRing(orders)
	}
	if _, err := b.crew.tell(orders...); err != nil {
		return nil, err
	}
	if _, err := b.crew.tell(same(order{Op: "begin"}, s.processes)...); err != nil {
		return nil, err
	}
	if c.name == ringName {
		if err := b.meter.one.Publish(ctx, orders[0].Ring[0].Own, "next").Err(); err != nil {
			return nil, err
		}
	}
	w := window{}
	err := w.open(ctx, b, c, s.length)
	reports, failed := b.crew.tell(same(order{Op: "stop"}, s.processes)...)
	if err := errors.Join(err, failed); err != nil {
		return nil, err
	}
	return b.judge(c, w.look(reports), reports)
}

// judge has the run fail if hasp is at fault, and what is bare. What peers do
// wrong is shown.
func (b *bench) judge(c contestant, f figures, reports []report) (figures, error) {
	first := ""
	for _, r := range reports {
		f["refused"] += float64(r.Refused)
		first = cmp.Or(first, r.First)
	}
	switch {
	case c.group == theirs:
	case f["overlaps"] > 0:
		return nil, fmt.Errorf("%w: %v times two callers had the key at once", errWrong, f["overlaps"])
	case first != "":
		return nil, fmt.Errorf("%w: %s", errWrong, first)
	}
	return f, nil
}

// placeRing makes a ring of two members in one process, or of one in each.
func placeRing(orders []order) {
	members := max(len(orders), 2)
	for i := range members {
		o := &orders[i%len(orders)]
		o.Ring = append(o.Ring, link{fmt.Sprint(o.Key, "-", i), fmt.Sprint(o.Key, "-", (i+1)%members)})
	}
}

// window is the part of a contest that counts: what comes before is callers
// who arrive.
type window struct {
	from, to int64
	server   spent
}

func (w *window) open(ctx context.Context, b *bench, c contestant, length time.Duration) error {
	time.Sleep(max(length/4, 2*arrival))
	before, err := b.meter.read(ctx, c)
	if err != nil {
		return err
	}
	w.from = now()
	time.Sleep(length)
	w.to = now()
	after, err := b.meter.read(ctx, c)
	w.server = after.since(before)
	return err
}

// look is what the reports say about the window.
func (w *window) look(reports []report) figures {
	var holds []hold
	var shares []float64
	var longest int64
	for p, r := range reports {
		for _, t := range r.Turns {
			n := 0.0
			for i, asked := range t.Asked {
				got := w.to // if it still waits then
				if i < len(t.Got) {
					got = t.Got[i]
					holds = append(holds, hold{p, len(shares), asked, got, t.Freed[i]})
					if got >= w.from && got <= w.to {
						n++
					}
				}
				if got >= w.from && asked <= w.to {
					longest = max(longest, min(got, w.to)-asked)
				}
			}
			shares = append(shares, n)
		}
	}
	slices.SortFunc(holds, func(a, b hold) int { return cmp.Compare(a.got, b.got) })
	f := w.pass(holds)
	f["longest_wait_ms"] = float64(longest) / 1e6
	f["share_least"], f["share_most"] = slices.Min(shares), slices.Max(shares)
	f["share_none"] = 0
	for _, n := range shares {
		if n == 0 {
			f["share_none"]++
		}
	}
	f["share_ratio"] = f["share_most"] / f["share_least"]
	return f
}

// pass goes through all turns in order.
func (w *window) pass(holds []hold) figures {
	var n, holders, changes, overlaps float64
	var handovers, between []time.Duration
	for i, h := range holds {
		if h.got < w.from || h.got > w.to {
			continue // some give the key back when the context of their Lock ends, as all do then
		}
		if i > 0 && h.got < holds[i-1].freed {
			overlaps++
		}
		n++
		if i == 0 {
			continue
		}
		last := holds[i-1]
		if last.caller != h.caller {
			holders++
		}
		if last.process != h.process {
			changes++
		}
		if h.asked > last.freed || last.freed < w.from {
			continue // nobody waited for it
		}
		d := time.Duration(h.got - last.freed)
		handovers = append(handovers, d)
		if last.process != h.process {
			between = append(between, d)
		}
	}
	slices.Sort(handovers)
	slices.Sort(between)
	seconds := float64(w.to-w.from) / 1e9
	return figures{
		"acquisitions_per_s":    n / seconds,
		"holders_per_s":         holders / seconds,
		"changes_per_s":         changes / seconds,
		"handover_p50_us":       percentile(handovers, 50),
		"handover_p99_us":       percentile(handovers, 99),
		"between_p50_us":        percentile(between, 50),
		"between_p99_us":        percentile(between, 99),
		"commands_per_lock":     w.server.commands / n,
		"scripts_per_lock":      w.server.scripts / n,
		"server_cpu_s_per_100k": w.server.cpu / n * 1e5,
		"overlaps":              overlaps,
	}
}
