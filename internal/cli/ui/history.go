package ui

import (
	"cmp"
	"slices"
	"time"
)

// These constants bound a history.
const (
	maxSpans      = 20_000  // spans that have ended; see the type history
	maxSpanKey    = 1 << 10 // bytes of a span's key
	maxGaps       = 50
	spansInAnswer = 1000 // spans of one key that have ended
)

// These are the states of a span.
const (
	holds  = "holds"
	shares = "shares" // has a shared hold
	waits  = "waits"
)

// These are the ways in which a span ended.
const (
	released = "released" // the hold ended before its term, or with its min hold
	expired  = "expired"  // the holder had stopped renewing, and its term ended
	ended    = "ended"    // it is not known how the hold ended
	got      = "got"      // the waiter holds the key now
	left     = "left"     // the waiter gave up
)

// span is a time in which an owner held a key or waited for it. If a hold or a wait begins and ends
// between two lists, there is no span of it.
type span struct {
	key, owner string
	State      string `json:"state"`
	From       int64  `json:"from"`
	To         int64  `json:"to,omitempty"`   // 0 while the span lasts
	How        string `json:"how,omitempty"`  // how the span ended
	Stale      int64  `json:"late,omitempty"` // when the overdue renewal was due
}

// ownerHistory has the spans of one owner and one key.
type ownerHistory struct {
	Owner string `json:"owner"`
	Spans []span `json:"spans"`
}

// unwatched is a period in which there were no lists.
type unwatched struct {
	Why  string `json:"why"` // "outage" or "unwatched"
	From int64  `json:"from"`
	To   int64  `json:"to,omitempty"` // 0 while the period lasts
}

// history has the ended spans of all keys, the oldest first. It drops old spans, so that it always
// keeps the last maxSpans spans, and never more than 2*maxSpans.
type history struct {
	spans []span
	gaps  []unwatched
}

// follow compares the entries of one key in two lists. The argument l is the later entry. The
// argument old is the earlier entry, or nil if the key was not in the earlier list. follow sets the
// open spans of l: those of old that go on, and new ones. It adds the other open spans of old to
// the history, because they have ended. If the holder of l does not renew, its span says since
// when.
func (h *history) follow(old, l *lock) {
	var before []span // the open spans of old; in the end, only those that have ended
	sameHold := false
	if old != nil {
		before = slices.Clone(old.open)
		sameHold = l.Held && SameHold(old.Status, l.Status)
	}

	// An old hold that has ended ends at oldTo, and a new hold begins at newFrom. If the store
	// records no times, both are the time of the later list. Otherwise the field Since says when
	// the new hold began, and the old one ended at that time at the latest.
	oldTo := l.seen
	newFrom := l.seen
	if !l.Since.IsZero() && l.Since.Before(newFrom) {
		newFrom = l.Since
		if old != nil && newFrom.Before(old.seen) {
			// The hold is the old one, or the clocks of the store and this process differ, because
			// the earlier list would have shown a hold that began before it.
			newFrom = old.seen
		}
		if !sameHold {
			oldTo = newFrom
		}
	}

	// The function open adds a span to l.open: the owner's open span with that state, or a new one.
	open := func(owner, state string, from time.Time) {
		for i, s := range before {
			// If the same owner has another hold than before, begin a new span. A wait goes on.
			isSame := s.owner == owner && s.State == state
			if isSame && (state == waits || sameHold) {
				l.open = append(l.open, s)
				before = slices.Delete(before, i, i+1)
				return
			}
		}

		l.open = append(l.open, span{key: l.Key, owner: owner, State: state, From: ms(from)})
	}

	switch {
	case l.sharerCount > 0:
		for _, owner := range l.Shared {
			open(owner, shares, l.seen)
		}
	case l.Held:
		open(l.Owner, holds, newFrom)
	}

	for _, owner := range l.Waiters {
		open(owner, waits, l.seen)
	}

	for _, s := range before {
		s.end(old, l, oldTo)
		h.add(s)
	}

	// If the holder does not renew, show that before the term ends.
	if l.unrenewed() {
		for i := range l.open {
			if l.open[i].State == holds {
				l.open[i].Stale = max(ms(l.renewalDue()), l.open[i].From)
			}
		}
	}
}

// end sets the end of s, an open span of old that l does not have any more. The argument oldTo is
// the time at which the hold of old had ended.
func (s *span) end(old, l *lock, oldTo time.Time) {
	isHoldOfOwner := func(now span) bool { return now.owner == s.owner && now.State != waits }
	switch {
	case s.State != waits:
		s.To = ms(oldTo)
		s.How = how(old, oldTo)
		if s.How == expired {
			s.Stale = ms(old.renewalDue())
		}
	case slices.ContainsFunc(l.open, isHoldOfOwner):
		s.To = ms(oldTo) // about when the waiter's hold began
		s.How = got
	default:
		s.To = ms(l.seen)
		s.How = left
	}

	s.From = min(s.From, s.To) // clocks that differ must not make a span that ends before it begins
}

// how returns the way in which a hold ended. The argument old is the last entry with this hold, and
// at is a time at which the hold had ended.
func how(old *lock, at time.Time) string {
	until := old.until()
	switch {
	case until.IsZero():
		return ended
	case old.unrenewed() && at.After(until.Add(-inexact)):
		return expired
	case old.Kept, at.Before(until):
		return released
	}

	return ended // after the term, but the holder may have renewed it after the last list
}

// inexact bounds how late a computed end of a term may be, because the store's answer takes time.
const inexact = 250 * time.Millisecond

// add appends a span that has ended. If there are too many spans, it removes the oldest. It ignores
// spans of very long keys, which would take too much memory.
func (h *history) add(s span) {
	if len(s.key) > maxSpanKey {
		return
	}
	h.spans = append(h.spans, s)
	if len(h.spans) > 2*maxSpans {
		h.spans = slices.Clone(h.spans[maxSpans:])
	}
}

// addGap appends a period in which there were no lists. If there are too many, it removes the
// oldest.
func (h *history) addGap(why string, from, to time.Time) {
	if len(h.gaps) == maxGaps {
		h.gaps = slices.Delete(h.gaps, 0, 1)
	}
	h.gaps = append(h.gaps, unwatched{why, ms(from), ms(to)})
}

// lanes returns the latest spans of a key, grouped by owner, in the order of the owners' first
// spans. The argument l has the open spans. It is nil if the last list does not have the key.
func (h *history) lanes(key string, l *lock) []ownerHistory {
	var spans []span
	for _, s := range h.spans {
		if s.key == key {
			spans = append(spans, s)
		}
	}

	spans = spans[max(0, len(spans)-spansInAnswer):]
	if l != nil {
		spans = append(spans, l.open...)
	}
	slices.SortStableFunc(spans, func(a, b span) int { return cmp.Compare(a.From, b.From) })

	lanes := []ownerHistory{}
	indexes := map[string]int{} // by owner, into lanes
	for _, s := range spans {
		i, ok := indexes[s.owner]
		if !ok {
			i = len(lanes)
			indexes[s.owner] = i
			lanes = append(lanes, ownerHistory{Owner: shown(s.owner)})
		}

		lanes[i].Spans = append(lanes[i].Spans, s)
	}

	return lanes
}
