package main

import (
	"cmp"
	"encoding/json"
	"io"
	"slices"
	"sync"
	"time"

	"github.com/hasplock/hasp/internal/hostclock"
)

// turn is one call of Lock and what followed it. Times are of hostclock, and
// zero until known.
type turn struct {
	proc    *proc
	id      int64
	key     int
	fenced  bool
	fence   uint64
	asked   int64
	failed  int64 // when Lock returned an error
	got     int64 // when Lock returned a lease
	plan    int64 // when the caller plans to unlock
	expires int64 // until when the lease was trusted without another renewal
	end     int64 // when the caller stopped to trust it, or was about to call Unlock
	freed   int64 // when Unlock returned
	lost    int64 // when the caller learned that the lease was lost
	killed  bool  // the process was killed before the end of the turn

	mistaken int64 // when the resource last refused a use
}

func (t *turn) waiting() bool { return t.failed == 0 && t.got == 0 && !t.killed }
func (t *turn) holding() bool { return t.got != 0 && t.end == 0 }

// void reports whether the lease had ended when Lock returned, because the
// process was stopped meanwhile.
func (t *turn) void() bool { return t.end <= t.got }

// grant is the event that a key was granted.
type grant struct {
	at        int64
	key, seat int
}

type turnID struct {
	proc *proc
	id   int64
}

// record is the history of a run. It is also the resource that the locks
// protect.
type record struct {
	mu      sync.Mutex // guards all below
	log     *json.Encoder
	open    map[turnID]*turn // turns that have not ended
	turns   []*turn          // turns that were granted
	highest []uint64         // by key, the largest fence that the resource has seen
	grants  []grant          // in the order of the reports
	errs    map[string]int   // of Lock and Unlock, by kind
	uses    []sample
	refused int // uses of the resource with an old fence
}

func newRecord(keys int, log io.Writer) *record {
	r := &record{open: map[turnID]*turn{}, highest: make([]uint64, keys), errs: map[string]int{}}
	if log != nil {
		r.log = json.NewEncoder(log)
	}
	return r
}

// take records a report. For a use of the resource, it returns whether the
// resource refused it.
func (r *record) take(p *proc, e report) (refused bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.log != nil {
		_ = r.log.Encode(struct {
			Client string
			report
		}{p.String(), e})
	}
	if e.What == used {
		r.uses = append(r.uses, sample{p.seat, p.gen, e.T, *e.Use})
		return false
	}
	id := turnID{p, e.ID}
	if e.What == asks {
		r.open[id] = &turn{proc: p, id: e.ID, key: e.Key, asked: e.T, fenced: e.Fenced}
		return false
	}
	t := r.open[id]
	if t == nil {
		return false
	}
	if e.Expires != 0 {
		t.expires = e.Expires
	}
	switch e.What {
	case failed:
		t.failed = e.T
		r.errs[e.Err]++
		delete(r.open, id)
	case got:
		t.got, t.fence, t.plan = e.T, e.Fence, e.Plan
		r.turns = append(r.turns, t)
		r.grants = append(r.grants, grant{e.T, t.key, p.seat})
	case touch:
		if refused = t.fenced && t.fence < r.highest[t.key]; refused {
			t.mistaken = hostclock.Now()
			r.refused++
			return true
		}
		r.highest[t.key] = max(r.highest[t.key], t.fence)
	case ended:
		t.end = e.End
		if e.Lost {
			t.lost = e.T
		}
	case freed:
		t.freed = e.T
		if e.Lost && t.lost == 0 {
			t.lost = e.T
		}
		if e.Err != "" {
			r.errs["unlock: "+e.Err]++
		}
		delete(r.open, id)
	}
	return false
}

// died ends the turns of a process that was killed.
func (r *record) died(p *proc, at int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
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

// seen returns the turns that have not ended: the holders, the longest plan
// first, and the waiters, the longest wait first.
func (r *record) seen() (holders, waiters []turn) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := hostclock.Now()
	for _, t := range r.open {
		switch {
		case t.holding() && t.plan > now:
			holders = append(holders, *t)
		case t.waiting():
			waiters = append(waiters, *t)
		}
	}
	slices.SortFunc(holders, func(a, b turn) int { return cmp.Compare(b.plan, a.plan) })
	slices.SortFunc(waiters, func(a, b turn) int { return cmp.Compare(a.asked, b.asked) })
	return holders, waiters
}

// after returns when key was first granted after t, or 0. A negative key means
// any key, and a negative seat any client.
func (r *record) after(key, seat int, t int64) (first int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, g := range r.latest(t) {
		if g.at > t && (key < 0 || g.key == key) && (seat < 0 || g.seat == seat) && (first == 0 || g.at < first) {
			first = g.at
		}
	}
	return first
}

// latest returns the grants after t and some before. A process that was stopped
// reports its grants late.
func (r *record) latest(t int64) []grant {
	i := len(r.grants)
	for i > 0 && r.grants[i-1].at > t-int64(10*time.Second) {
		i--
	}
	return r.grants[i:]
}
