package main

import (
	"cmp"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"time"

	"github.com/hasplock/hasp/internal/clock"
)

// found counts events in the history that break no promise.
type found struct {
	Holds, Fenced int
	Shared        int // holds with WithShared
	Slots         int // holds of a slot
	Void          int // leases that had ended before Lock returned
	Killed        int // holds whose process was killed
	Lost          int // holders that learned that the lease was lost
	Overlaps      int // how often two callers held a key together after locks were lost; the fence separates the two
	Refused       int // uses of the resource with an old fence
}

// check searches the history for broken promises.
func (n *nemesis) check() (f found) {
	n.rec.mu.Lock()
	defer n.rec.mu.Unlock()
	for _, t := range n.rec.turns {
		if t.end == 0 { // the run stood still
			t.end = t.expires
		}
	}
	f.Holds, f.Refused = len(n.rec.turns), n.rec.refused
	byKey := map[int][]*lockCall{}
	for _, t := range n.rec.turns {
		byKey[t.key] = append(byKey[t.key], t)
		f.Fenced += one(t.fenced)
		f.Shared += one(t.shared)
		f.Slots += one(t.key >= slotted)
		// checkOrder checks that each slot has one holder at a time. So it remains to check that
		// no slot has too large a number: then the key has no more holders than slots.
		if t.key >= slotted+slots {
			n.fail("slots", t.got, fmt.Sprintf("%s got slot %d of %d", t.proc, t.key-slotted, slots))
		}
		f.Killed += one(t.killed)
		f.Lost += one(t.lost != 0)
		f.Void += one(t.void())
		n.checkLoss(t)
	}
	n.checkGrowth()
	for _, key := range slices.Sorted(maps.Keys(byKey)) {
		all := byKey[key]
		slices.SortFunc(all, inTime)
		f.Overlaps += n.checkOrder(all)
	}
	return f
}

// inTime compares two turns by the times of their grants.
func inTime(a, b *lockCall) int { return cmp.Compare(a.got, b.got) }

func one(b bool) int {
	if b {
		return 1
	}
	return 0
}

// within reports whether one of the spans overlaps the period between the times from and to.
func within(spans [][2]int64, from, to int64) bool {
	return slices.ContainsFunc(spans, func(l [2]int64) bool { return l[0] <= to && from <= l[1] })
}

// checkLoss reports a lease that was lost before its end, and a use that the resource refused
// although the caller held the key.
func (n *nemesis) checkLoss(t *lockCall) {
	lost := within(n.losses, t.asked, max(t.end, t.lost))
	if t.lost != 0 && t.lost < t.expires && !lost && !within(n.thinned, t.asked, t.lost) {
		how := "the lease"
		if t.lost == t.freed {
			how = "Unlock"
		}
		n.fail("kept until its end", t.lost, fmt.Sprintf("%s learned from %s that its lease of %s was lost %v before its end, %v after the call of Lock and %v after its return",
			t.proc, how, title(t.key), time.Duration(t.expires-t.lost), time.Duration(t.lost-t.asked), time.Duration(t.lost-t.got)))
	}
	if t.mistaken != 0 && t.mistaken < t.end && !lost {
		n.fail("fence", t.mistaken, fmt.Sprintf("%s held %s, and the resource had seen a fence larger than its %d", t.proc, title(t.key), t.fence))
	}
}

// latest contains the hold with the latest end, and the hold with the largest fence.
type latest struct{ end, fence *lockCall }

func (l *latest) add(t *lockCall) {
	if l.end == nil || t.end > l.end.end {
		l.end = t
	}
	if t.fenced && (l.fence == nil || t.fence > l.fence.fence) {
		l.fence = t
	}
}

// checkOrder checks the holds of a key in the order in which they begin. No hold may overlap an
// exclusive hold, and fences must grow. If locks may have been lost, overlaps are only counted. The
// fence of a void lease is checked, but such a lease excludes no other hold.
func (n *nemesis) checkOrder(all []*lockCall) (overlaps int) {
	var any, alone latest              // the variable any covers all earlier holds, and the variable alone covers the exclusive ones
	top := make([]*lockCall, len(all)) // for each hold, the hold with the largest fence so far
	drawn := map[uint64]*lockCall{}
	for i, t := range all {
		excluded := any
		if t.shared {
			excluded = alone
		}
		if last := excluded.end; last != nil && !t.void() && t.got < last.end {
			// The store may have forgotten the older hold. It may also have forgotten the newer
			// hold, because a grant may reach its caller after another caller received the key.
			if within(n.losses, min(last.asked, t.asked), t.got) {
				overlaps++
			} else {
				n.fail("one at a time", t.got, fmt.Sprintf("%s: %s got it (shared: %v), and %s held it (shared: %v) until %v later",
					title(t.key), t.proc, t.shared, last.proc, last.shared, time.Duration(min(last.end, t.end)-t.got)))
			}
		}

		// A hold that was granted before t was asked for must have a smaller fence than t.
		if before, _ := slices.BinarySearchFunc(all[:i], t.asked, (*lockCall).begin); before > 0 {
			n.checkFence(t, top[before-1])
		}
		// If one of two callers asked before the other got the key, the store may have granted the
		// holds in either order, unless these exclude each other. The order is also open if a grant
		// reached its caller after the store had forgotten this grant and had granted another.
		if last := excluded.fence; last != nil && t.asked <= last.got && !t.void() && t.got >= last.end && !within(n.losses, t.asked, t.got) {
			n.checkFence(t, last)
		}
		if twin := drawn[t.fence]; twin != nil && t.asked <= twin.got && !n.losing {
			n.checkFence(t, twin)
		}

		if top[i] = t; i > 0 && top[i-1].fence > t.fence {
			top[i] = top[i-1]
		}
		drawn[t.fence] = t
		if !t.void() {
			any.add(t)
			if !t.shared {
				alone.add(t)
			}
		}
	}
	return overlaps
}

// begin compares the beginning of a hold with a time.
func (t *lockCall) begin(at int64) int { return cmp.Compare(t.got, at) }

// checkFence reports the fence of t if it is not larger than the fence of last.
func (n *nemesis) checkFence(t, last *lockCall) {
	if t.fenced && t.fence <= last.fence {
		n.fail("fence", t.got, fmt.Sprintf("%s: fence %d of %s (shared: %v) after %d of %s (shared: %v)",
			title(t.key), t.fence, t.proc, t.shared, last.fence, last.proc, last.shared))
	}
}

// spared is the seat whose process is never killed. checkGrowth checks this process.
const spared = 0

// enough is the least number of samples that checkGrowth needs. One sample is taken each second.
const enough = 40

// heapSlack is by how many bytes the heap may grow. A connection needs 10 KiB. go-redis keeps
// references to as many closed connections as were ever idle at the same time.
const heapSlack = 4 << 20

// poolSlack returns how many descriptors a client may gain. go-redis keeps the connections of the
// largest burst, up to ten for each CPU and server. Slow links make bursts larger.
func (s *store) poolSlack() float64 {
	return 10 + 10*float64(runtime.GOMAXPROCS(0)*max(len(s.addrs), 1))
}

// checkGrowth compares two quarters of the run. It reports a violation if the process that is never
// killed used more in the last quarter than 1.25 times its use in the second, plus a slack.
func (r *run) checkGrowth() {
	all := r.rec.uses
	if len(all) < enough {
		return
	}
	quarter := len(all) / 4
	for _, f := range []struct {
		name  string
		slack float64
		of    func(use) float64
	}{
		{"bytes on the heap", heapSlack, func(u use) float64 { return float64(u.Heap) }},
		{"goroutines", 20, func(u use) float64 { return float64(u.Goroutines) }},
		{"descriptors", r.store.poolSlack(), func(u use) float64 { return float64(u.Files) }},
	} {
		median := func(part []use) float64 {
			var of []float64
			for _, u := range part {
				of = append(of, f.of(u))
			}
			slices.Sort(of)
			return of[len(of)/2]
		}
		before, after := median(all[quarter:2*quarter]), median(all[3*quarter:])
		if after > 1.25*before+f.slack {
			r.fail("steady", clock.Now(), fmt.Sprintf("client %d.0 had %.0f %s in the second quarter of the run and %.0f in the last", spared, before, f.name, after))
		}
	}
}
