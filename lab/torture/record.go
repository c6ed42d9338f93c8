package main

import (
	"encoding/json"
	"io"
	"sync"
)

// turn is one call of Lock and what followed it. Times are of clock.Now, and 0 until they are
// known. Its process reports the turn after each change.
type turn struct {
	client  string // the name of the process
	ID      int64  // the turn's number within the process
	Key     int
	Fenced  bool   // WithFence
	Refused bool   `json:",omitempty"` // Lock returned an error
	Fence   uint64 `json:",omitempty"`
	Asked   int64
	Got     int64 `json:",omitempty"` // when Lock returned
	Plan    int64 `json:",omitempty"` // when the caller plans to unlock
	// the time until which the lease is trusted without another renewal
	Expires int64    `json:",omitempty"`
	Used    [2]int64 `json:",omitzero"`  // when the caller first and last used the resource
	End     int64    `json:",omitempty"` // when it stopped trusting the lease, or called Unlock
	Lost    int64    `json:",omitempty"` // when it learned that the lease was lost
}

// void reports whether the lease had ended when Lock returned, because the
// process was stopped meanwhile.
func (t *turn) void() bool { return t.End <= t.Got }

// turnID names a turn of a process.
type turnID struct {
	client string
	id     int64
}

// record is the history of a run.
type record struct {
	run string    // the strategy
	out io.Writer // receives all reports as lines of JSON; may be nil

	mu      sync.Mutex // guards all fields below
	open    map[turnID]*turn
	turns   map[turnID]*turn // turns that were granted
	granted map[string]int64 // when each client, and each key, was last granted
	faults  []span
	left    map[string]string // what is left in each process that has closed its Client
}

// span is the time of a fault, and which locks it may have taken away.
type span struct {
	From, To int64
	Takes    loss
}

func newRecord(run string, out io.Writer) *record {
	return &record{run: run, out: out, open: map[turnID]*turn{}, turns: map[turnID]*turn{},
		granted: map[string]int64{}, left: map[string]string{}}
}

// entry is a line of a history.
type entry struct {
	Run    string
	Client string `json:",omitempty"`
	Fault  string `json:",omitempty"` // the name of a fault that was injected and healed
	Span   *span  `json:",omitempty"`
	report
}

// take records a report of a client, or of the harness. Each line of the history is one write, so
// lines of two runs do not mix.
func (r *record) take(e entry) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.takeLocked(e)
}

func (r *record) takeLocked(e entry) {
	e.Run = r.run
	if r.out != nil {
		_ = json.NewEncoder(r.out).Encode(e)
	}
	switch t := e.Turn; {
	case t != nil:
		t.client = e.Client
		r.noteLocked(turnID{e.Client, t.ID}, t)
	case e.Span != nil:
		r.faults = append(r.faults, *e.Span)
	case e.Closed:
		r.left[e.Client] = e.Left
	}
}

// noteLocked notes the present state of a turn.
func (r *record) noteLocked(id turnID, t *turn) {
	r.open[id] = t
	if t.Refused || t.End != 0 {
		delete(r.open, id)
	}
	if t.Got != 0 && !t.Refused {
		r.turns[id] = t
		r.granted[t.client] = max(r.granted[t.client], t.Got)
		r.granted[names[t.Key]] = max(r.granted[names[t.Key]], t.Got)
	}
}

// die ends the turns of a process that was killed.
func (r *record) die(client string, at int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, t := range r.open {
		if t.client != client {
			continue
		}
		ended := *t
		ended.Refused = t.Got == 0
		ended.End = min(at, t.Expires)
		r.takeLocked(entry{Client: client, report: report{Turn: &ended}})
	}
}

// holder returns the process that holds a contended key and plans to go on for the longest time, or
// "" if there is none. The plan must end after the time least.
func (r *record) holder(least int64) (client string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, t := range r.open {
		if t.Key < keys && t.Plan > least {
			least = t.Plan
			client = t.client
		}
	}

	return client
}

// over reports whether a client has closed its Client.
func (r *record) over(client string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	_, ok := r.left[client]
	return ok
}

// after returns the time at which a client, or a key, was last granted, or 0 if that was not after
// the time since.
func (r *record) after(name string, since int64) (at int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if at = r.granted[name]; at <= since {
		return 0
	}

	return at
}
