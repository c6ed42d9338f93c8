package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"fmt"
	"slices"
	"time"

	"github.com/hasplock/hasp/internal/clock"
)

// hold is a visit in which the caller got the key.
type hold struct {
	process, caller int
	visit
}

// measure measures callers of several processes that contend for one key.
func (s contest) measure(ctx context.Context, b *bench, c contestant) (figures, error) {
	at := b.storesOf(s.trip)
	orders := make([]order, s.processes)
	key := "bench:" + rand.Text()[:8]
	for i := range orders {
		n := (s.waiters + s.processes - 1 - i) / s.processes
		o := order{Contestant: c.name, Stores: at, Key: key, Place: i, Places: s.processes,
			Waiters: n, Hold: s.hold, Think: s.think}
		if c.name == ringName {
			// the message must not wait for a member that thinks
			o.Waiters = 1
			o.Think = 0
		}
		orders[i] = o
	}

	w := window{}
	reports, err := b.compete(orders, func() (err error) {
		time.Sleep(min(max(s.length/4, 2*arrival), warmup) + time.Duration(s.waiters)*queueing)
		w.server, err = b.meter.spending(ctx, c, func() error {
			w.from = clock.Now()
			time.Sleep(s.length)
			w.to = clock.Now()
			return nil
		})
		return err
	})

	if err != nil {
		return nil, err
	}
	return b.judge(c, s, w.figures(reports), reports)
}

// judge returns an error if hasp or a bare contestant is at fault. It notes the faults of peers.
func (b *bench) judge(c contestant, s contest, f figures, reports []report) (figures, error) {
	overlaps := f["overlaps"]
	refused := 0
	first := ""
	delete(f, "overlaps")
	for _, r := range reports {
		refused += r.Refused
		first = cmp.Or(first, r.First)
	}

	if overlaps == 0 && refused == 0 {
		return f, nil
	}
	text := fmt.Sprintf("%v times two callers held the key at once, %d errors %s", overlaps,
		refused, first)
	if !c.peer() {
		return nil, fmt.Errorf("%w: %s", errWrong, text)
	}
	b.note("one key, %v: %s: %s", s, c.name, text)
	return f, nil
}

// window is the part of a contest that is measured. The callers arrive before the window begins.
type window struct {
	from, to int64
	server   spent
}

// figures returns what the reports say about the window.
func (w *window) figures(reports []report) figures {
	var holds []hold
	var shares, ofProcesses []float64 // of callers, and of processes
	var longest int64
	starved := 0.0
	for p, r := range reports {
		all := 0.0
		for _, visits := range r.Visits {
			n := 0.0
			for _, t := range visits {
				if t.Got == 0 {
					t.Got = w.to // the caller still waited at the end
				} else {
					holds = append(holds, hold{p, len(shares), t})
					if t.Got >= w.from && t.Got <= w.to {
						n++
					}
				}
				if t.Got >= w.from && t.Asked <= w.to {
					longest = max(longest, min(t.Got, w.to)-t.Asked)
				}
			}
			shares = append(shares, n)
			all += n
			if n == 0 {
				starved++
			}
		}
		ofProcesses = append(ofProcesses, all)
	}

	slices.SortFunc(holds, func(a, b hold) int { return cmp.Compare(a.Got, b.Got) })
	f := w.pass(holds)
	f["longest wait ms"] = float64(longest) / 1e6
	f["starved"] = starved
	f["Jain, callers"] = jain(shares)
	f["Jain, processes"] = jain(ofProcesses)

	equal := sum(shares) / float64(len(shares))
	f["smallest share"] = slices.Min(shares) / equal
	f["largest share"] = slices.Max(shares) / equal
	return f
}

func sum(values []float64) (all float64) {
	for _, v := range values {
		all += v
	}
	return all
}

// jain returns Jain's index of fairness: 1 if all shares are equal, and 1/n if one of n callers has
// everything.
func jain(shares []float64) float64 {
	all := sum(shares)
	squares := 0.0
	for _, s := range shares {
		squares += s * s
	}
	return all * all / (float64(len(shares)) * squares)
}

// pass returns the figures that depend on the order of the holds.
func (w *window) pass(holds []hold) figures {
	var n, holders, changes, overlaps float64
	var held int64
	var between []time.Duration // the durations of hand-overs between processes
	for i, h := range holds {
		held += max(min(h.Freed, w.to)-max(h.Got, w.from), 0)
		if h.Got < w.from || h.Got > w.to {
			// after the window, some peers release the key because the context of Lock has ended
			continue
		}
		n++
		if i == 0 {
			continue
		}
		last := holds[i-1]
		if h.Got < last.Freed {
			overlaps++
		}
		if last.caller != h.caller {
			holders++
		}
		if last.process == h.process {
			continue
		}
		changes++
		if h.Asked <= last.Freed && last.Freed >= w.from { // the caller waited for the key
			between = append(between, time.Duration(h.Got-last.Freed))
		}
	}

	seconds := float64(w.to-w.from) / 1e9
	return figures{
		"acquisitions/s":            n / seconds,
		"changes of holder/s":       holders / seconds,
		"changes of process/s":      changes / seconds,
		"between processes, p50 µs": percentile(between, 50),
		"commands":                  w.server.commands / n,
		"key held %":                float64(held) / float64(w.to-w.from) * 100,
		"overlaps":                  overlaps,
	}
}
