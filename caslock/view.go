package caslock

import (
	"maps"
	"sync"
	"time"

	"github.com/hasplock/hasp/backend"
)

// view is what this driver has last seen of a key.
type view struct {
	version string
	rec     record
	since   time.Time // when the answer came
}

// live returns the items that have not died.
func (v *view) live(now time.Time) []item {
	return without(v.rec.Items, func(it item) bool { return it.rest(now) <= 0 })
}

// isOver reports whether the record has had no items for so long that it can be deleted. A record
// that is created later gets its number from its writer's clock, and fences are such numbers. So
// that they grow, a record with a fence stays for an hour, which covers clocks that differ by less.
// Without a fence, a minute is enough.
func (v *view) isOver(now time.Time) bool {
	keep := time.Minute
	if v.rec.Fence > 0 {
		keep = time.Hour
	}
	return len(v.rec.Items) == 0 && v.rec.Write < uint64(now.Add(-keep).UnixMicro())
}

// next returns a record with these items and a new number, which is to replace the record of v.
func (v *view) next(items []item, now time.Time) *record {
	r := v.rec
	r.Write = max(r.Write+1, uint64(now.UnixMicro()))
	r.Items = items
	return &r
}

// maxShown is how many shared holders a Status names.
const maxShown = 1000

// status returns the state of the key for Inspect and List. Here a hold also ends by the wall clock
// of its holder, because otherwise a process that asks once would report the hold of a dead process
// for a whole term. Clocks may differ, but no lock depends on a status.
func (v *view) status(now time.Time) backend.Status {
	s := backend.Status{Fence: v.rec.Fence}
	for _, it := range v.live(now) {
		wall := now.Round(0) // without the monotonic clock
		rest := min(it.rest(now), it.Ends.Sub(wall))
		if rest <= 0 {
			continue
		}

		owner := string(it.Owner)
		if isIntent(it) {
			s.Waiters = append(s.Waiters, owner)
			continue
		}

		s.Held = true
		s.TTL = max(s.TTL, rest)
		if it.Kind == kindShared {
			s.Shared = append(s.Shared, owner)
		} else {
			s.Owner = owner
			s.Since = it.Since
			s.Kept = it.Kind == kindMinHold
		}
	}

	s.Shared = s.Shared[:min(len(s.Shared), maxShown)]
	return s
}

// leastViews is how many views are remembered in any case.
const leastViews = 10_000

// views remembers the last view of each key.
type views struct {
	mu    sync.Mutex // guards the fields below, and the time seen of items while remember sets it
	byKey map[string]*view
	most  int // if there are more, makeRoomLocked looks for views to forget
}

// last returns the last view of key, or nil.
func (vs *views) last(key string) *view {
	vs.mu.Lock()
	defer vs.mu.Unlock()
	return vs.byKey[key]
}

// remember returns the view of a record that the answer to a call has shown. The call began at the
// time began. The view becomes the last one of its key, unless a newer one came during the call.
// Each item gets the time at which this process first saw it: now, or an earlier time from the view
// before.
func (vs *views) remember(version string, r record, began, now time.Time) *view {
	vs.mu.Lock()
	defer vs.mu.Unlock()

	for i := range r.Items {
		it := &r.Items[i]
		it.seen = vs.firstSeenLocked(string(r.Key), it, now)
	}
	vs.makeRoomLocked()

	// The answers of two calls may come in another order. So a view with a larger number stays, if
	// it came during this call. If it came before this call, the store has lost its last writes,
	// and the record with the smaller number is the newer one.
	v := &view{version, r, time.Now()}
	last := vs.byKey[string(r.Key)]
	isLate := last != nil && last.since.After(began) && last.rec.Write > r.Write
	if !isLate {
		vs.byKey[string(r.Key)] = v
	}
	return v
}

// firstSeenLocked returns when this process first saw the item of key. That is now if the last view
// lacks the item. If the view has it, it is the earlier of the two times, because now may lie in
// the past by the age that the store has told.
func (vs *views) firstSeenLocked(key string, it *item, now time.Time) time.Time {
	before := vs.byKey[key]
	if before == nil {
		return now
	}

	seen := now
	for _, old := range before.rec.Items {
		isSame := old.Token == it.Token && old.N == it.N
		if isSame && old.seen.Before(seen) {
			seen = old.seen
		}
	}

	return seen
}

// makeRoomLocked forgets the views of free keys, and those whose items have been dead for an hour,
// if there are too many views. It keeps holds that live, and holds that have just died: without the
// view, a key that can be taken over now would be refused for another term.
func (vs *views) makeRoomLocked() {
	if len(vs.byKey) < vs.most {
		return
	}

	anHourAgo := time.Now().Add(-time.Hour)
	maps.DeleteFunc(vs.byKey, func(_ string, v *view) bool { return len(v.live(anHourAgo)) == 0 })

	// Look again only when the number of views has doubled, so that looking costs little for each.
	vs.most = max(leastViews, 2*len(vs.byKey))
}
