package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hasplock/hasp/internal/clock"
)

// lockCall is one call of Lock and what followed it. Times are from clock.Now, and 0 until they are
// known.
type lockCall struct {
	proc    *proc
	key     int // if the key is slotted, the grant adds the slot's number to this field
	fenced  bool
	shared  bool // its uses of the resource are reads
	fence   uint64
	asked   int64
	got     int64 // when Lock returned a lease
	plan    int64 // when the caller plans to unlock
	expires int64 // the time until which the lease was trusted without another renewal
	end     int64 // when the caller stopped trusting the lease, or was about to call Unlock
	freed   int64 // when Unlock returned
	lost    int64 // when the caller learned that the lease was lost
	killed  bool  // the process was killed before the end of the turn

	mistaken int64 // when the resource last refused a use
}

// A turn is removed from record.open when Lock fails or its process is killed.
func (t *lockCall) waiting() bool { return t.got == 0 }
func (t *lockCall) holding() bool { return t.got != 0 && t.end == 0 }

// void reports whether the lease had ended when Lock returned, because the
// process was stopped meanwhile.
func (t *lockCall) void() bool { return t.end <= t.got }

// turnID names a turn of a process.
type turnID struct {
	proc *proc
	id   int64
}

// record is the history of a run. It is also the resource that the locks protect.
type record struct {
	of      options
	mu      sync.Mutex           // guards all fields below
	open    map[turnID]*lockCall // turns that have not ended
	turns   []*lockCall          // turns that were granted, in the order of the reports
	highest map[int]uint64       // for each key, the largest fence that the resource has seen
	written map[int]uint64       // for each key, the largest fence of a write
	uses    []use                // the samples of the process that is never killed, one a second
	refused int                  // uses of the resource with an old fence
}

func newRecord(of options) *record {
	return &record{of: of, open: map[turnID]*lockCall{}, highest: map[int]uint64{}, written: map[int]uint64{}}
}

// take records a report. It returns true if the resource refused the use that was reported.
func (r *record) take(p *proc, e report) (refused bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if e.What == touch && e.T == 0 {
		e.T = clock.Now()
	}
	r.of.write(p.String(), e)

	id := turnID{p, e.ID}
	t := r.open[id]
	switch {
	case e.What == used && p.seat == spared:
		r.uses = append(r.uses, *e.Use)
	case e.What == asks:
		r.open[id] = &lockCall{proc: p, key: e.Key, asked: e.T, fenced: e.Fenced, shared: e.Shared}
	case t == nil:
	case e.What == touch:
		refused = r.touchLocked(t, e.T)
	default:
		r.noteLocked(t, e)
	}
	if t != nil && e.Expires != 0 {
		t.expires = e.Expires
	}
	if e.What == failed || e.What == freed {
		delete(r.open, id)
	}
	return refused
}

// touchLocked uses the resource, and reports whether the resource refused this use. A read may have
// a smaller fence than an earlier read, but not a smaller fence than an earlier write.
func (r *record) touchLocked(t *lockCall, at int64) (refused bool) {
	least := r.highest[t.key]
	if t.shared {
		least = r.written[t.key]
	}
	if t.fenced && t.fence < least {
		t.mistaken = at
		r.refused++
		return true
	}
	r.highest[t.key] = max(r.highest[t.key], t.fence)
	if !t.shared {
		r.written[t.key] = max(r.written[t.key], t.fence)
	}
	return false
}

// noteLocked notes in a turn what a report says about the turn's Lock or lease.
func (r *record) noteLocked(t *lockCall, e report) {
	switch e.What {
	case got:
		t.got, t.fence, t.plan = e.T, e.Fence, e.Plan
		t.key += e.Slot
		r.turns = append(r.turns, t)
	case ended:
		t.end = e.End
	case freed:
		t.freed = e.T
	}
	if e.Lost && t.lost == 0 {
		t.lost = e.T
	}
}

// died ends the turns of a process that was killed.
func (r *record) died(p *proc, at int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.of.write(p.String(), report{What: died, T: at})
	for id, t := range r.open {
		if id.proc == p {
			if t.holding() {
				t.end = min(at, t.expires)
			}
			t.killed = true
			delete(r.open, id)
		}
	}
}

// seen returns the holders that plan to go on, in the order from the latest plan to the earliest,
// and the waiters, in the order from the longest wait to the shortest.
func (r *record) seen() (holders, waiters []lockCall) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := clock.Now()
	for _, t := range r.open {
		switch {
		case t.holding() && t.plan > now:
			holders = append(holders, *t)
		case t.waiting():
			waiters = append(waiters, *t)
		}
	}
	slices.SortFunc(holders, func(a, b lockCall) int { return cmp.Compare(b.plan, a.plan) })
	slices.SortFunc(waiters, func(a, b lockCall) int { return cmp.Compare(a.asked, b.asked) })
	return holders, waiters
}

// unfinished names the callers that hold a key, and counts the callers that wait.
func (r *record) unfinished() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var holding []string
	waiting := 0
	for _, t := range r.open {
		waiting += one(t.waiting())
		if t.holding() {
			holding = append(holding, fmt.Sprintf("%s holds %s", t.proc, title(t.key)))
		}
	}
	return fmt.Sprintf("%d wait, %s", waiting, cmp.Or(strings.Join(holding, ", "), "none holds one"))
}

// after returns the time at which a key was first granted after the time since, or 0. A negative
// key means any key, and a negative seat means any client.
func (r *record) after(key, seat int, since int64) (first int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, t := range slices.Backward(r.turns) {
		if t.got < since-int64(10*time.Second) { // a process that was stopped reports its grants late
			break
		}
		if t.got > since && (key < 0 || t.key == key) && (seat < 0 || t.proc.seat == seat) && (first == 0 || t.got < first) {
			first = t.got
		}
	}
	return first
}
