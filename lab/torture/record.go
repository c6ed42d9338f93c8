package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hasplock/hasp/internal/clock"
)

// lockCall is one call of Lock and what followed it. Times are of clock.Now, and 0 until they are
// known.
type lockCall struct {
	client  string // the name of the process
	key     int
	fenced  bool
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
	client string
	id     int64
}

// record is the history of a run. It is also the resource that the locks protect.
type record struct {
	run    string    // options.name
	losing bool      // faults take locks away
	out    io.Writer // receives all reports as lines of JSON; may be nil

	mu      sync.Mutex           // guards all fields below
	open    map[turnID]*lockCall // turns that have not ended
	turns   []*lockCall          // turns that were granted, in the order of the reports
	highest map[int]uint64       // for each key, the largest fence that the resource has seen
	uses    []use                // the samples of the process that is never killed, one a second
	refused int                  // uses of the resource with an old fence
	losses  [][2]int64           // when the store may have lost locks
	// when a minority may have lost locks; then a lease may end early, but no other caller gets the
	// key
	thinned [][2]int64
	left    map[string]string // what is left in each process that has closed its Client

	// for each process, when its last report of each kind came
	heard map[string]map[string]time.Time
}

func newRecord(run string, losing bool, out io.Writer) *record {
	return &record{
		run: run, losing: losing, out: out,
		open: map[turnID]*lockCall{}, highest: map[int]uint64{}, left: map[string]string{},
		heard: map[string]map[string]time.Time{},
	}
}

// ages says for each process how long ago its last report of each kind came.
func (r *record) ages() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var all []string
	for _, client := range slices.Sorted(maps.Keys(r.heard)) {
		text := client + ":"
		for _, kind := range slices.Sorted(maps.Keys(r.heard[client])) {
			age := time.Since(r.heard[client][kind]).Round(10 * time.Millisecond)
			text += fmt.Sprintf(" %s %v", kind, age)
		}
		all = append(all, text)
	}
	return strings.Join(all, "; ")
}

// entry is a line of a history.
type entry struct {
	Run    string
	Client string `json:",omitempty"`
	report
}

// take records a report of a client, or of the harness. Each line of the history is one write, so
// lines of two runs do not mix.
func (r *record) take(client string, e report) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if e.What == touch && e.T == 0 {
		e.T = clock.Now()
	}
	if r.out != nil {
		_ = json.NewEncoder(r.out).Encode(entry{r.run, client, e})
	}

	if r.heard[client] == nil {
		r.heard[client] = map[string]time.Time{}
	}
	r.heard[client][e.What] = time.Now()

	id := turnID{client, e.ID}
	t := r.open[id]
	switch {
	case e.What == lossy:
		r.losses = append(r.losses, [2]int64{e.T, e.End})
	case e.What == thinned:
		r.thinned = append(r.thinned, [2]int64{e.T, e.End})
	case e.What == closed:
		r.left[client] = e.Left
	case e.What == used && client == spared:
		r.uses = append(r.uses, e.Use)
	case e.What == died:
		r.dieLocked(client, e.T)
	case e.What == asks:
		r.open[id] = &lockCall{client: client, key: e.Key, asked: e.T, fenced: e.Fenced}
	case t != nil:
		r.noteLocked(t, e)
	}

	if e.What == refuse || e.What == freed {
		delete(r.open, id)
	}
}

// noteLocked notes in a turn what a report says about the turn's Lock or lease.
func (r *record) noteLocked(t *lockCall, e report) {
	switch e.What {
	case got:
		t.got = e.T
		t.fence = e.Fence
		t.plan = e.Plan
		r.turns = append(r.turns, t)
	case touch:
		r.touchLocked(t, e.T)
	case ended:
		t.end = e.End
	case freed:
		t.freed = e.T
	}

	if e.Lost && t.lost == 0 {
		t.lost = e.T
	}
	if e.Expires != 0 {
		t.expires = e.Expires
	}
}

// touchLocked uses the resource, which refuses a use with an old fence.
func (r *record) touchLocked(t *lockCall, at int64) {
	if t.fenced && t.fence < r.highest[t.key] {
		t.mistaken = at
		r.refused++
		return
	}
	r.highest[t.key] = max(r.highest[t.key], t.fence)
}

// dieLocked ends the turns of a process that was killed.
func (r *record) dieLocked(client string, at int64) {
	for id, t := range r.open {
		if id.client != client {
			continue
		}
		if t.holding() {
			t.end = min(at, t.expires)
		}
		t.killed = true
		delete(r.open, id)
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

// over reports whether a client has closed its Client.
func (r *record) over(client string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	_, ok := r.left[client]
	return ok
}

// after returns the time at which a key was first granted to a client after the time since, or 0.
// A negative key means any key, and an empty name means any client.
func (r *record) after(key int, client string, since int64) (first int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, t := range slices.Backward(r.turns) {
		// a process that was stopped reports its grants late
		if t.got < since-int64(10*time.Second) {
			break
		}
		other := key >= 0 && t.key != key || client != "" && t.client != client
		if !other && t.got > since && (first == 0 || t.got < first) {
			first = t.got
		}
	}

	return first
}

// losingRun ends the name of a run with faults that take locks away.
const losingRun = ", losing"

// replay checks a history again. It omits the promises about progress and leftovers.
func replay(history io.Reader, out io.Writer) (sound bool, err error) {
	runs := map[string]*record{}
	for lines := json.NewDecoder(history); lines.More(); {
		var e entry
		if err := lines.Decode(&e); err != nil {
			return false, err
		}
		if runs[e.Run] == nil {
			runs[e.Run] = newRecord(e.Run, strings.HasSuffix(e.Run, losingRun), nil)
		}
		runs[e.Run].take(e.Client, e.report)
	}

	sound = len(runs) > 0
	for name, r := range runs {
		f := r.check()
		fmt.Fprintf(out, "%s: %d holds, %d times two callers at once, broken promises: %d\n%v\n",
			name, f.Holds, f.Overlaps, len(f.wrong), f.wrong)
		sound = sound && len(f.wrong) == 0
	}

	return sound, nil
}
