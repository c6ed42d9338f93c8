package main

import (
	"cmp"
	"slices"
	"time"
)

// state is what a worker does at a moment.
type state int

const (
	idle state = iota
	waiting
	holding
	dead // killed while holding: the key stays locked until the term ends
)

// span is a stretch of time in one state. All times of a timeline count from
// its beginning.
type span struct {
	state    state
	from, to time.Duration // to is openEnd while it lasts
}

const openEnd = time.Duration(1<<63 - 1)

// lane is one worker process.
type lane struct {
	pid    int
	insted int // of which worker it goes on with the work, from 1; 0 if of none
	done   int // increments
	killed bool
	ended  bool
	spans  []span
}

// timeline is who held, waited and died, and what became of the number.
type timeline struct {
	began  time.Time
	lanes  []lane
	number []point // as the workers wrote it
	killed *death
	queue  []int         // lanes that waited, in order, at the last look into the store
	looked time.Duration // when that began
}

// point is a number written at a time.
type point struct {
	at time.Duration
	n  int
}

// death is that of a holder, and what followed.
type death struct {
	lane     int
	at       time.Duration
	heir     int // lane of the next holder, or -1 so far
	takeover time.Duration
}

// now is the present, in the timeline's time.
func (t *timeline) now() time.Duration { return time.Since(t.began) }

// enter puts a lane into a state at a time.
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

// kill notes that a holder was killed.
func (t *timeline) kill(i int, at time.Duration) {
	t.killed = &death{lane: i, at: at, heir: -1}
	t.lanes[i].killed = true
	t.enter(i, dead, at)
}

// at returns the span a lane is in at a time.
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

// inLine returns the lanes that wait at a time, in the order in which the
// store will serve them: that of the queue, and then those who came since.
func (t *timeline) inLine(at time.Duration) []int {
	who := t.in(waiting, at)
	since := func(i int) time.Duration { return t.lanes[i].at(at).from }
	place := func(i int) int {
		p := slices.Index(t.queue, i)
		if p < 0 || since(i) > t.looked { // the place was that of an earlier wait
			return len(t.queue)
		}
		return p
	}
	slices.SortFunc(who, func(a, b int) int {
		return cmp.Or(cmp.Compare(place(a), place(b)), cmp.Compare(since(a), since(b)))
	})
	return who
}

// done is how many increments were made, by the workers' own account.
func (t *timeline) done() int {
	sum := 0
	for _, l := range t.lanes {
		sum += l.done
	}
	return sum
}

// lengths returns how long all ended spans of a state were, sorted.
func (t *timeline) lengths(s state) []time.Duration {
	var ds []time.Duration
	for _, l := range t.lanes {
		for _, sp := range l.spans {
			if sp.state == s && sp.to != openEnd {
				ds = append(ds, sp.to-sp.from)
			}
		}
	}
	slices.Sort(ds)
	return ds
}

// end is when the last span ended.
func (t *timeline) end() time.Duration {
	var end time.Duration
	for _, l := range t.lanes {
		for _, sp := range l.spans {
			if sp.to != openEnd {
				end = max(end, sp.to)
			}
		}
	}
	return end
}

// crowd is the largest number of lanes that held at once.
func (t *timeline) crowd() int {
	type step struct {
		at time.Duration
		by int
	}
	var steps []step
	for _, l := range t.lanes {
		for _, sp := range l.spans {
			if sp.state == holding {
				steps = append(steps, step{sp.from, 1}, step{sp.to, -1})
			}
		}
	}
	slices.SortFunc(steps, func(a, b step) int {
		if a.at != b.at {
			return int(min(max(a.at-b.at, -1), 1))
		}
		return a.by - b.by // who ends at an instant makes room for who begins
	})
	most, n := 0, 0
	for _, s := range steps {
		n += s.by
		most = max(most, n)
	}
	return most
}
