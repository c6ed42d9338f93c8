package main

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// plan says what is measured, and for how long.
type plan struct {
	rounds   int
	budget   time.Duration // after it, no turn begins
	distinct []distinct
	contests []contest // of a key that is not held
	fair     []contest // of a key that is held
	crowds   []crowd
	again    repetition
}

// distinct is a setting of the scenario without contention. In each round every
// contestant has several short turns: with few processors the figures depend on
// the processor that a server happens to run on, and it stays there for a while.
type distinct struct {
	goroutines int
	length     time.Duration
	times      int
}

// contest is a setting of the scenarios with one contended key.
type contest struct {
	waiters, processes int
	hold               time.Duration
	length             time.Duration
	trip               time.Duration // added to each round trip
	think              time.Duration // mean pause of a caller between two turns
	nodes              int           // of the contestants; 0 means any
}

// warmup is the longest time before the part of a contest that counts, without queueing.
const warmup = 400 * time.Millisecond

// queueing is how much longer it is for each caller, because thousands that arrive
// at once take a while to queue.
const queueing = 200 * time.Microsecond

// includes reports whether the setting is for a contestant.
func (c contest) includes(d contestant) bool {
	if c.nodes == 0 {
		return d.waits
	}
	return d.fair && c.nodes == d.nodes
}

// repetition is the setting of the scenario in which one caller locks one key again and again.
type repetition struct {
	length time.Duration
	think  time.Duration // mean pause of the caller of another process
}

// crowd is a setting of the scenario of many leases. A lone caller is measured
// without leases first, and then beside them.
type crowd struct {
	leases      int
	term        time.Duration
	length      time.Duration // of the part with leases
	five        bool          // for contestants on five nodes; otherwise for the others
	unreachable bool          // one of the five nodes is unreachable
}

// alone is the length of the part without leases.
const alone = 400 * time.Millisecond

// small is the largest number of leases that all contestants hold, on one node
// and on five.
const small = 1000

// includes reports whether the setting is for a contestant.
func (c crowd) includes(d contestant) bool {
	five := d.nodes == 5
	return d.renews && c.leases <= d.most && (c.leases <= small || c.five == five) && (!c.unreachable || five)
}

func (d distinct) String() string { return count(d.goroutines, "goroutine", "goroutines") }

func (c contest) String() string {
	s := fmt.Sprintf("%d waiters, %s, hold %v", c.waiters, count(c.processes, "process", "processes"), c.hold)
	if c.trip > 0 {
		s += fmt.Sprintf(", round trip %v", c.trip)
	}
	if c.think > 0 {
		s += fmt.Sprintf(", think time %v", c.think)
	}
	if c.nodes > 1 {
		s += fmt.Sprintf(", %d nodes", c.nodes)
	}
	return s
}

func (s repetition) String() string {
	return fmt.Sprintf("one key again and again, another process every %v", s.think)
}

func (c crowd) String() string {
	s := fmt.Sprintf("%s leases of %v", number(float64(c.leases)), c.term)
	if c.five && c.leases > small {
		s += ", five nodes"
	}
	if c.unreachable {
		s += ", one of five nodes unreachable"
	}
	return s
}

func count(n int, one, more string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprint(n, " ", more)
}

// planOf returns the plan with or without --quick.
func planOf(quick bool) plan {
	const ms, s = time.Millisecond, time.Second
	if quick {
		return plan{
			rounds: 1, budget: 36 * s,
			distinct: []distinct{{1, 30 * ms, 1}, {64, 60 * ms, 1}},
			contests: []contest{{waiters: 8, processes: 4, length: 60 * ms}},
			fair: []contest{
				{waiters: 8, processes: 2, hold: ms, length: 100 * ms, trip: ms, think: ms, nodes: 1},
				{waiters: 8, processes: 2, hold: ms, length: 100 * ms, nodes: 3},
			},
			crowds: []crowd{
				{leases: 100, term: 3 * s, length: 1200 * ms},
				{leases: 100, term: 3 * s, length: 1200 * ms, unreachable: true},
			},
			again: repetition{300 * ms, 50 * ms},
		}
	}
	p := plan{
		rounds: 3, budget: 1430 * s, again: repetition{3 * s, 100 * ms},
		contests: []contest{
			{waiters: 64, processes: 4, length: 400 * ms}, {waiters: 512, processes: 4, length: 400 * ms}, // shares need time to show
			{waiters: 2, processes: 4, length: 100 * ms}, {waiters: 64, processes: 1, length: 100 * ms},
		},
		// Each length is longer than the interval between renewals: a third of the
		// term, or half of it by rueidislock's default.
		crowds: []crowd{
			{leases: 0, term: 3 * s, length: alone},
			{leases: 1000, term: 3 * s, length: 1600 * ms},
			{leases: 1000, term: 3 * s, length: 3500 * ms, unreachable: true},
			{leases: 10_000, term: 3 * s, length: 1200 * ms},
			{leases: 10_000, term: 30 * s, length: 10 * s, five: true},
			{leases: 100_000, term: 30 * s, length: 10 * s},
		},
	}
	for _, n := range []int{1, 16, 64, 256, 1024} {
		p.distinct = append(p.distinct, distinct{n, 70 * ms, 2})
	}

	for _, c := range []contest{{hold: ms, length: 1500 * ms}, {hold: 10 * ms, length: 4 * s}} { // several turns of each caller
		c.waiters, c.nodes = 64, 1
		for _, c.trip = range []time.Duration{0, ms, 10 * ms} {
			for _, c.processes = range []int{2, 4, 8} {
				p.fair = append(p.fair, c)
			}
			three := c
			three.processes, three.nodes = 4, 3
			p.fair = append(p.fair, three)
		}
	}
	p.fair = append(p.fair, contest{waiters: 64, processes: 4, hold: ms, length: 1500 * ms, think: 100 * ms, nodes: 1})

	return p
}

// The scenarios.
const (
	uncontended = "uncontended"
	contended   = "contended"
	fair        = "fair" // measured in the first round only, because its turns are long
	leases      = "leases"
	again       = "again" // measured in the first round only
)

var scenarios = []string{uncontended, contended, leases, fair, again}

// split separates the names of scenarios, parts of names of contestants, and parts
// of the texts of settings, which have spaces. Without a scenario it returns all of them.
func split(words []string) (names, others, settings []string) {
	for _, w := range words {
		switch {
		case slices.Contains(scenarios, w):
			names = append(names, w)
		case strings.Contains(w, " "):
			settings = append(settings, w)
		default:
			others = append(others, w)
		}
	}
	if names == nil {
		names = scenarios
	}
	return names, others, settings
}
