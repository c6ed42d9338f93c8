package demo

import (
	"cmp"
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

// track is one worker process. All times are counted from the beginning of the timeline.
type track struct {
	pid    int
	done   int // how many increments it has reported
	killed bool
	failed string // why the worker says that it has failed; empty if it has not
	state  state
	since  time.Duration // when it entered the state
	waited time.Duration // how long its last wait took; 0 if it did not wait
}

// timeline records what the workers do. Its methods are called in order of time.
type timeline struct {
	began  time.Time
	lanes  []track
	atOnce int           // the most workers that held the lock at the same time
	end    time.Duration // the time of the last change of a state
	death  *death        // nil before the kill
}

// death records the kill of a holder, and which worker got the lock after it.
type death struct {
	lane     int
	at       time.Duration
	heir     int // the lane of the next holder; -1 before there is one
	takeover time.Duration
}

// enter records that the worker in lane i enters a state. The first hold after the kill is the
// takeover.
func (t *timeline) enter(i int, s state, at time.Duration) {
	l := &t.lanes[i]
	t.end = max(t.end, at)
	switch {
	case l.state == waiting:
		l.waited = at - l.since
	case s != idle:
		l.waited = 0
	}
	l.state, l.since = s, at

	if s != holding {
		return
	}
	t.atOnce = max(t.atOnce, len(t.in(holding)))
	if d := t.death; d != nil && d.heir < 0 {
		d.heir, d.takeover = i, at-d.at
	}
}

// kill records that a holder was killed.
func (t *timeline) kill(i int, at time.Duration) {
	t.death = &death{lane: i, at: at, heir: -1}
	t.lanes[i].killed = true
	t.enter(i, idle, at)
}

// in returns the lanes that are in a state, in the order in which they entered it.
func (t *timeline) in(s state) []int {
	var lanes []int
	for i := range t.lanes {
		if t.lanes[i].state == s {
			lanes = append(lanes, i)
		}
	}
	slices.SortStableFunc(lanes, func(a, b int) int { return cmp.Compare(t.lanes[a].since, t.lanes[b].since) })
	return lanes
}

func (t *timeline) done() int {
	sum := 0
	for _, l := range t.lanes {
		sum += l.done
	}
	return sum
}
