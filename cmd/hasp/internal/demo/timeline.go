package demo

import (
	"cmp"
	"math"
	"slices"
	"time"
)

// state is what a worker does at a moment.
type state int

const (
	idle state = iota
	waiting
	holding
	dead // killed while it held the lock, and the term has not ended
)

// span is a stretch of time in one state. All times of a timeline count from
// its beginning.
type span struct {
	state    state
	from, to time.Duration // to is openEnd while the span lasts
}

const openEnd = time.Duration(math.MaxInt64)

// lane is the part of one worker process in the timeline.
type lane struct {
	pid    int
	done   int // increments
	killed bool
	ended  bool
	spans  []span
}

// timeline says which worker waited, held the lock or was killed at what time,
// and how the number grew.
type timeline struct {
	began   time.Time
	lanes   []lane
	number  []point // as the workers wrote it
	killed  *death  // nil before the kill
	queue   []int   // the lanes that waited at queueAt, in the store's order
	queueAt time.Duration
}

// point is a number that a worker wrote, and when.
type point struct {
	at time.Duration
	n  int
}

// death is the kill of a holder, and what followed.
type death struct {
	lane     int
	at       time.Duration
	heir     int // the lane of the next holder; -1 before there is one
	takeover time.Duration
}

// now is the present, in the timeline's time.
func (t *timeline) now() time.Duration { return time.Since(t.began) }

// addLane adds a lane for a process.
func (t *timeline) addLane(pid int) { t.lanes = append(t.lanes, lane{pid: pid}) }

// enter begins a state of a lane, and ends the one before. The first hold after
// the kill ends the killed worker's hold.
func (t *timeline) enter(i int, s state, at time.Duration) {
	l := &t.lanes[i]
	if n := len(l.spans); n > 0 && l.spans[n-1].to == openEnd {
		l.spans[n-1].to = max(at, l.spans[n-1].from)
	}
	if s != idle {
		l.spans = append(l.spans, span{s, at, openEnd})
	}
	if d := t.killed; s == holding && d != nil && d.heir < 0 {
		d.heir, d.takeover = i, at-d.at
		t.enter(d.lane, idle, at)
	}
}

// kill records that a holder was killed.
func (t *timeline) kill(i int, at time.Duration) {
	t.killed = &death{lane: i, at: at, heir: -1}
	t.lanes[i].killed = true
	t.enter(i, dead, at)
}

// at returns the span of a lane at a time.
func (l *lane) at(d time.Duration) span {
	i, _ := slices.BinarySearchFunc(l.spans, d, func(s span, d time.Duration) int {
		if s.from <= d {
			return -1
		}
		return 1
	})
	if i == 0 || l.spans[i-1].to <= d {
		return span{state: idle}
	}
	return l.spans[i-1]
}

// in returns the lanes that are in a state at a time.
func (t *timeline) in(s state, at time.Duration) []int {
	var is []int
	for i := range t.lanes {
		if t.lanes[i].at(at).state == s {
			is = append(is, i)
		}
	}
	return is
}

// inLine returns the lanes that wait at a time, in the order in which the store
// will serve them: first those in the queue, then those that have come since
// queueAt.
func (t *timeline) inLine(at time.Duration) []int {
	lanes := t.in(waiting, at)
	since := func(i int) time.Duration { return t.lanes[i].at(at).from }
	place := func(i int) int {
		p := slices.Index(t.queue, i)
		if p < 0 || since(i) > t.queueAt { // a place in the queue was for an earlier wait
			return len(t.queue)
		}
		return p
	}
	slices.SortFunc(lanes, func(a, b int) int {
		return cmp.Or(cmp.Compare(place(a), place(b)), cmp.Compare(since(a), since(b)))
	})
	return lanes
}

// done is the number of increments that the workers report.
func (t *timeline) done() int {
	sum := 0
	for _, l := range t.lanes {
		sum += l.done
	}
	return sum
}

// ended returns all spans that have ended.
func (t *timeline) ended() []span {
	var all []span
	for _, l := range t.lanes {
		for _, s := range l.spans {
			if s.to != openEnd {
				all = append(all, s)
			}
		}
	}
	return all
}

// lengths returns the lengths of all ended spans of a state, sorted.
func (t *timeline) lengths(in state) []time.Duration {
	var ds []time.Duration
	for _, s := range t.ended() {
		if s.state == in {
			ds = append(ds, s.to-s.from)
		}
	}
	slices.Sort(ds)
	return ds
}

// end is when the last span ended.
func (t *timeline) end() time.Duration {
	var end time.Duration
	for _, s := range t.ended() {
		end = max(end, s.to)
	}
	return end
}

// heldAtOnce is the largest number of lanes that held the lock at one time.
func (t *timeline) heldAtOnce() int {
	most := 0
	for _, l := range t.lanes {
		for _, s := range l.spans {
			if s.state == holding {
				most = max(most, len(t.in(holding, s.from)))
			}
		}
	}
	return most
}
