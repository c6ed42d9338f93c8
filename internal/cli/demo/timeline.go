package demo

import (
	"cmp"
	"math"
	"slices"
	"time"
)

// state says what a worker does.
type state string

const (
	idle    state = ""
	waiting state = "waiting"
	holding state = "holding"
)

// span is a time in which a worker is in one state. All times are counted from the beginning of the
// timeline.
type span struct {
	State    state
	From, To time.Duration // To is openEnd while the span lasts
}

const openEnd = time.Duration(math.MaxInt64)

// track has the spans of one worker process.
type track struct {
	PID    int
	done   int // how many increments it has reported
	killed bool
	failed string // why the worker says that it has failed; empty if it has not
	Spans  []span
}

// timeline records when each worker waited, held the lock or was killed.
type timeline struct {
	began  time.Time
	Lanes  []track
	Number int           // the last number that was written
	Death  *death        // nil before the kill
	End    time.Duration // the time of the last change of a state
}

// death records the kill of a holder, and which worker got the lock after it.
type death struct {
	Lane     int
	At       time.Duration
	Heir     int // the lane of the next holder; -1 before there is one
	Takeover time.Duration
}

// enter ends the present span of lane i and begins one in state s. The first hold after the kill is
// the takeover.
func (t *timeline) enter(i int, s state, at time.Duration) {
	l := &t.Lanes[i]
	t.End = max(t.End, at)
	if n := len(l.Spans); n > 0 && l.Spans[n-1].To == openEnd {
		// A report that is late by more than lag may be older than the span. Do not let To be
		// before From.
		l.Spans[n-1].To = max(at, l.Spans[n-1].From)
	}

	if s != idle {
		l.Spans = append(l.Spans, span{s, at, openEnd})
	}

	if d := t.Death; s == holding && d != nil && d.Heir < 0 {
		d.Heir, d.Takeover = i, at-d.At
	}
}

// kill records that a holder was killed.
func (t *timeline) kill(i int, at time.Duration) {
	t.Death = &death{Lane: i, At: at, Heir: -1}
	t.Lanes[i].killed = true
	t.enter(i, idle, at)
}

func (l *track) at(d time.Duration) span {
	for _, s := range slices.Backward(l.Spans) {
		if s.From <= d && d < s.To {
			return s
		}
	}
	return span{}
}

// in returns the lanes that are in state s at the time at, in the order in which they entered it.
func (t *timeline) in(s state, at time.Duration) []int {
	var lanes []int
	for i := range t.Lanes {
		if t.Lanes[i].at(at).State == s {
			lanes = append(lanes, i)
		}
	}
	slices.SortStableFunc(lanes, func(a, b int) int {
		return cmp.Compare(t.Lanes[a].at(at).From, t.Lanes[b].at(at).From)
	})
	return lanes
}

func (t *timeline) done() int {
	sum := 0
	for _, l := range t.Lanes {
		sum += l.done
	}
	return sum
}

// lengths returns the sorted lengths of all spans of a state that have ended.
func (t *timeline) lengths(in state) []time.Duration {
	var ds []time.Duration
	for _, l := range t.Lanes {
		for _, s := range l.Spans {
			if s.State == in && s.To != openEnd {
				ds = append(ds, s.To-s.From)
			}
		}
	}
	slices.Sort(ds)
	return ds
}

// heldAtOnce returns how many lanes held the lock at the same time, at most.
func (t *timeline) heldAtOnce() int {
	most := 0
	for _, l := range t.Lanes {
		for _, s := range l.Spans {
			if s.State == holding {
				most = max(most, len(t.in(holding, s.From)))
			}
		}
	}
	return most
}
