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

// violation is a promise that was broken.
type violation struct {
	promise string
	at      int64
	what    string
}

func (v violation) String() string { return fmt.Sprintf("- **%s**: %s", v.promise, v.what) }

// found is what a check found in the history: broken promises, and counts of events that break none.
type found struct {
	Holds int
	Void  int // leases that had ended before Lock returned
	// how often two callers held a key together after locks were lost; the fence separates the two
	Overlaps int
	Refused  int // uses of the resource with an old fence

	of    *record
	wrong []violation
}

// fail notes a violation.
func (f *found) fail(promise string, at int64, format string, args ...any) {
	f.wrong = append(f.wrong, violation{promise, at, fmt.Sprintf(format, args...)})
}

// check searches the history for broken promises.
func (r *record) check() *found {
	r.mu.Lock()
	defer r.mu.Unlock()
	f := &found{of: r, Holds: len(r.turns), Refused: r.refused}
	byKey := map[int][]*lockCall{}
	for _, t := range r.turns {
		if t.end == 0 { // the run stood still
			t.end = t.expires
		}
		byKey[t.key] = append(byKey[t.key], t)
		f.Void += one(t.void())
		f.checkLoss(t)
	}

	for _, key := range slices.Sorted(maps.Keys(byKey)) {
		f.checkOrder(byKey[key])
	}
	f.checkGrowth()
	return f
}

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
func (f *found) checkLoss(t *lockCall) {
	if within(f.of.losses, t.asked, max(t.end, t.lost)) {
		return
	}
	early := t.lost != 0 && t.lost < t.expires
	if early && !within(f.of.thinned, t.asked, t.lost) {
		f.fail("kept until its end", t.lost,
			"%s learned (from Unlock: %v) that its lease of key %d was lost %v before its end, %v after the call of Lock and %v after its return",
			t.client, t.lost == t.freed, t.key, time.Duration(t.expires-t.lost),
			time.Duration(t.lost-t.asked), time.Duration(t.lost-t.got))
	}

	if t.mistaken != 0 && t.mistaken < t.end {
		f.fail("fence", t.mistaken,
			"%s held key %d, and the resource had seen a fence larger than its %d", t.client, t.key,
			t.fence)
	}
}

// checkOrder checks the holds of a key in the order in which they begin. No two holds may overlap,
// and fences must grow. If locks may have been lost, overlaps are only counted. The fence of a void
// lease is checked, but such a lease excludes no other hold.
func (f *found) checkOrder(all []*lockCall) {
	slices.SortFunc(all, func(a, b *lockCall) int { return cmp.Compare(a.got, b.got) })
	// of the earlier holds that are not void: the one with the latest end, and the one with the
	// largest fence
	var last, high *lockCall
	top := make([]*lockCall, len(all)) // for each hold, the hold with the largest fence so far
	drawn := map[uint64]*lockCall{}
	for i, t := range all {
		losses := f.of.losses
		if last != nil && !t.void() && t.got < last.end {
			// The store may have forgotten the older hold. It may also have forgotten the newer
			// hold, because a grant may reach its caller after another caller received the key.
			if within(losses, min(last.asked, t.asked), t.got) {
				f.Overlaps++
			} else {
				f.fail("one at a time", t.got, "key %d: %s got it, and %s held it until %v later",
					t.key, t.client, last.client, time.Duration(min(last.end, t.end)-t.got))
			}
		}

		// A hold that was granted before t was asked for must have a smaller fence than t.
		before, _ := slices.BinarySearchFunc(all[:i], t.asked,
			func(t *lockCall, at int64) int { return cmp.Compare(t.got, at) })
		if before > 0 {
			f.checkFence(t, top[before-1])
		}
		// A hold that t excludes must have a smaller fence as well, unless its grant or that of t
		// reached the caller after the store had forgotten it and had granted another.
		excludes := high != nil && !t.void() && t.got >= high.end
		if excludes && t.asked <= high.got && !within(losses, t.asked, t.got) {
			f.checkFence(t, high)
		}
		if twin := drawn[t.fence]; twin != nil && t.asked <= twin.got && !f.of.losing {
			f.checkFence(t, twin)
		}

		top[i] = t
		if i > 0 && top[i-1].fence > t.fence {
			top[i] = top[i-1]
		}
		drawn[t.fence] = t
		if t.void() {
			continue
		}
		if last == nil || t.end > last.end {
			last = t
		}
		if t.fenced && (high == nil || t.fence > high.fence) {
			high = t
		}
	}
}

// checkFence reports the fence of t if it is not larger than the fence of last.
func (f *found) checkFence(t, last *lockCall) {
	if t.fenced && t.fence <= last.fence {
		f.fail("fence", t.got, "key %d: fence %d of %s after %d of %s", t.key, t.fence, t.client,
			last.fence, last.client)
	}
}

// growth says by how much what a process uses may grow: bytes, goroutines and descriptors. A
// connection needs 10 KiB. go-redis keeps references to as many closed connections as were ever
// idle at the same time, and the connections of the largest burst, up to ten for each CPU and
// server. Slow links make bursts larger.
var growth = use{4 << 20, 20, 10 + 40*runtime.GOMAXPROCS(0)}

// enough is the least number of samples that checkGrowth needs. One sample is taken each second.
const enough = 40

// checkGrowth compares two quarters of the run. It reports a violation if the process that is never
// killed used more in the last quarter than 1.25 times its use in the second, plus a slack.
func (f *found) checkGrowth() {
	all := f.of.uses
	if len(all) < enough {
		return
	}
	quarter := len(all) / 4
	for i, slack := range growth {
		var before, after int
		for j := range quarter {
			before += all[quarter+j][i]
			after += all[3*quarter+j][i]
		}
		if after > before*5/4+slack*quarter {
			f.fail("steady", clock.Now(),
				"%s used %d %s in the second quarter of the run and %d in the last",
				spared, before/quarter, []string{"bytes", "goroutines", "descriptors"}[i],
				after/quarter)
		}
	}
}
