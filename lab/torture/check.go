package main

import (
	"cmp"
	"fmt"
	"slices"
	"time"
)

// violation is a promise that was broken.
type violation struct {
	promise, what string
}

func (v violation) String() string { return fmt.Sprintf("- **%s**: %s", v.promise, v.what) }

// found is what a check found in the history: broken promises, and counts of events that break
// none.
type found struct {
	holds int
	void  int // leases that had ended before Lock returned
	// how often two callers held a key together after locks were lost; the fence separates the two
	overlaps int
	refused  int // uses of the resource with an old fence

	of    *record
	wrong []violation
}

// fail notes a violation.
func (f *found) fail(promise, format string, args ...any) {
	f.wrong = append(f.wrong, violation{promise, fmt.Sprintf(format, args...)})
}

// check searches the history for broken promises.
func (r *record) check() *found {
	r.mu.Lock()
	defer r.mu.Unlock()
	f := &found{of: r, holds: len(r.turns)}
	byKey := map[int][]*turn{}
	for _, t := range r.turns {
		if t.End == 0 { // the run stood still
			t.End = t.Expires
		}
		byKey[t.Key] = append(byKey[t.Key], t)
		if t.void() {
			f.void++
		}
		if t.Lost != 0 && t.Lost < t.Expires && !r.lost(minority, t.Asked, t.Lost) {
			f.fail("kept until its end",
				"%s learned that its lease of key %d was lost %v before its end, %v after the call of Lock and %v after its return",
				t.client, t.Key, time.Duration(t.Expires-t.Lost), time.Duration(t.Lost-t.Asked),
				time.Duration(t.Lost-t.Got))
		}
	}

	for _, all := range byKey {
		f.checkOrder(all)
		f.checkUses(all)
	}

	return f
}

// lost reports whether a fault may have taken away locks, or more, between the times from and to.
func (r *record) lost(least loss, from, to int64) bool {
	return slices.ContainsFunc(r.faults,
		func(s span) bool { return s.Takes >= least && s.From <= to && from <= s.To })
}

// checkOrder checks the holds of a key in the order in which they begin. No two holds may overlap,
// and fences must grow. If locks may have been lost, overlaps are only counted. The fence of a void
// lease is checked, but such a lease excludes no other hold.
func (f *found) checkOrder(all []*turn) {
	slices.SortFunc(all, func(a, b *turn) int { return cmp.Compare(a.Got, b.Got) })
	// of the earlier holds that are not void: the one with the latest end, and the one with the
	// largest fence
	var last, high *turn
	top := make([]*turn, len(all)) // for each hold, the hold with the largest fence so far
	for i, t := range all {
		if last != nil && !t.void() && t.Got < last.End {
			// The store may have forgotten the older hold. It may also have forgotten the newer
			// hold, because a grant may reach its caller after another caller received the key.
			if f.of.lost(locks, min(last.Asked, t.Asked), t.Got) {
				f.overlaps++
			} else {
				f.fail("one at a time", "key %d: %s got it at %d, and %s held it until %v later",
					t.Key, t.client, t.Got, last.client, time.Duration(min(last.End, t.End)-t.Got))
			}
		}

		// A hold that was granted before t was asked for must have a smaller fence than t.
		before, _ := slices.BinarySearchFunc(all[:i], t.Asked,
			func(t *turn, at int64) int { return cmp.Compare(t.Got, at) })
		if before > 0 {
			f.checkFence(t, top[before-1])
		}
		// A hold that t excludes must have a smaller fence as well, unless its grant or that of t
		// reached the caller after the store had forgotten it and had granted another.
		excludes := high != nil && !t.void() && t.Got >= high.End
		if excludes && t.Asked <= high.Got && !f.of.lost(locks, t.Asked, t.Got) {
			f.checkFence(t, high)
		}

		top[i] = t
		if i > 0 && top[i-1].Fence > t.Fence {
			top[i] = top[i-1]
		}
		if t.void() {
			continue
		}
		if last == nil || t.End > last.End {
			last = t
		}
		if t.Fenced && (high == nil || t.Fence > high.Fence) {
			high = t
		}
	}
}

// checkFence reports the fence of t if it is not larger than the fence of last.
func (f *found) checkFence(t, last *turn) {
	if t.Fenced && t.Fence <= last.Fence {
		f.fail("fence", "key %d: fence %d of %s at %d after %d of %s", t.Key, t.Fence, t.client,
			t.Got, last.Fence, last.client)
	}
}

// checkUses acts as the resource, which refuses a use with an old fence. It reports a use that was
// refused although the caller held the key.
func (f *found) checkUses(all []*turn) {
	type use struct {
		at int64
		*turn
	}
	var uses []use
	for _, t := range all {
		for _, at := range slices.Compact(slices.Clone(t.Used[:])) {
			if t.Fenced && at != 0 {
				uses = append(uses, use{at, t})
			}
		}
	}
	slices.SortFunc(uses, func(a, b use) int { return cmp.Compare(a.at, b.at) })

	highest := uint64(0)
	for _, u := range uses {
		if u.Fence >= highest {
			highest = u.Fence
			continue
		}
		f.refused++
		if u.at < u.End && !f.of.lost(locks, u.Asked, u.at) {
			f.fail("fence", "%s held key %d, and the resource had seen a fence larger than its %d",
				u.client, u.Key, u.Fence)
		}
	}
}
