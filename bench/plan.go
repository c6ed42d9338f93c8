package main

import (
	"fmt"
	"slices"
	"time"
)

// plan says what is measured, and for how long.
type plan struct {
	rounds   int
	budget   time.Duration // after it, no turn begins
	limit    time.Duration // after it, the turn in progress is left out
	distinct []distinct
	contests []contest
	crowds   []crowd
	degraded degraded
}

// distinct is a setting of the scenario without contention. In each round every
// contestant has several short turns: with few processors the figures depend on
// the processor that a server happens to run on, and it stays there for a while.
type distinct struct {
	goroutines int
	length     time.Duration
	times      int
}

// contest is a setting of the scenario with one contended key.
type contest struct {
	waiters, processes int
	hold               time.Duration
	length             time.Duration
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

// degraded is the setting with five masters, of which one is slow and one down.
type degraded struct {
	delay  time.Duration // of the slow one
	pause  time.Duration // between two locks
	length time.Duration
}

func (d distinct) String() string { return count(d.goroutines, "goroutine", "goroutines") }

func (c contest) String() string {
	return fmt.Sprintf("%d waiters, %s, hold %v", c.waiters, count(c.processes, "process", "processes"), c.hold)
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

func (d degraded) String() string { return fmt.Sprintf("one of five %v slow, one down", d.delay) }

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
			rounds: 1, budget: 36 * s, limit: 45 * s,
			distinct: []distinct{{1, 30 * ms, 1}, {64, 60 * ms, 1}},
			contests: []contest{{8, 1, 0, 60 * ms}, {8, 4, ms, 100 * ms}},
			crowds: []crowd{
				{leases: 100, term: 3 * s, length: 1200 * ms},
				{leases: 100, term: 3 * s, length: 1200 * ms, unreachable: true},
			},
			degraded: degraded{200 * ms, 25 * ms, 300 * ms},
		}
	}
	p := plan{
		rounds: 3, budget: 570 * s, limit: 588 * s,
		contests: []contest{
			{64, 4, 0, 400 * ms}, {512, 4, 0, 400 * ms}, // shares need time to show
			{2, 4, 0, 100 * ms}, {64, 1, 0, 100 * ms}, {64, 4, ms, 400 * ms},
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
		degraded: degraded{200 * ms, 25 * ms, 1500 * ms},
	}
	for _, n := range []int{1, 16, 64, 256, 1024} {
		p.distinct = append(p.distinct, distinct{n, 70 * ms, 2})
	}
	return p
}

// The scenarios.
const (
	uncontended = "uncontended"
	contended   = "contended"
	leases      = "leases"
	masters     = "masters"
)

var scenarios = []string{uncontended, contended, leases, masters}

// split separates the names of scenarios from those of contestants. Without a
// scenario it returns all.
func split(words []string) (names, others []string) {
	for _, w := range words {
		if slices.Contains(scenarios, w) {
			names = append(names, w)
		} else {
			others = append(others, w)
		}
	}
	if names == nil {
		names = scenarios
	}
	return names, others
}
