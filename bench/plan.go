package main

import (
	"fmt"
	"slices"
	"time"
)

// plan is what is measured, and for how long.
type plan struct {
	rounds   int
	budget   time.Duration // when it is spent, what has not begun is left out
	limit    time.Duration // what is under way then is left out, too
	distinct []distinct
	contests []contest
	crowds   []crowd
	degraded degraded
}

// distinct is a setting of the scenario without contention. In each round it
// has all contestants several times, a little at a time: on few processors it
// matters which one a server happens to be on, and it stays there for a while.
type distinct struct {
	goroutines int
	length     time.Duration
	times      int
}

// contest is a setting of the scenario of one key that all want.
type contest struct {
	waiters, processes int
	hold               time.Duration
	length             time.Duration
}

// crowd is a setting of the scenario of many leases.
type crowd struct {
	leases      int
	term        time.Duration
	alone       time.Duration // how long the lone caller is measured without leases
	length      time.Duration // and with them
	five        bool          // for those on five nodes, and else for all others
	unreachable bool          // is one of the five
}

// asks reports whether a contestant is to hold so many.
func (c crowd) asks(d contestant) bool {
	return d.renews && (c.leases <= small || c.five == (d.nodes == 5)) && (!c.unreachable || d.nodes == 5)
}

// small is what all are asked for.
const small = 1000

// degraded is the scenario of five masters, one slow and one down.
type degraded struct {
	delay  time.Duration // of the slow one
	pause  time.Duration // between one lock and the next
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

// full is the plan without flags.
func full() plan {
	p := plan{rounds: 3, budget: 9*time.Minute + 30*time.Second, limit: 9*time.Minute + 48*time.Second}
	for _, n := range []int{1, 16, 64, 256, 1024} {
		p.distinct = append(p.distinct, distinct{n, 70 * time.Millisecond, 2})
	}
	for _, hold := range []time.Duration{0, time.Millisecond} {
		for _, processes := range []int{1, 4} {
			for _, n := range []int{2, 8, 64, 512} {
				c := contest{n, processes, hold, 100 * time.Millisecond}
				if n >= 64 && processes == 4 && hold == 0 {
					c.length = 400 * time.Millisecond // shares need time to show
				}
				p.contests = append(p.contests, c)
			}
		}
	}
	const alone = 400 * time.Millisecond
	// Each is measured for longer than its renewals take to come round, a third
	// or, by rueidislock's default, a half of the term.
	p.crowds = []crowd{
		{leases: 0, term: 3 * time.Second, alone: alone, length: alone},
		{leases: 1000, term: 3 * time.Second, alone: alone, length: 1600 * time.Millisecond},
		{leases: 1000, term: 3 * time.Second, alone: alone, length: 3500 * time.Millisecond, unreachable: true},
		{leases: 10_000, term: 3 * time.Second, alone: alone, length: 1200 * time.Millisecond},
		{leases: 10_000, term: 30 * time.Second, alone: alone, length: 10 * time.Second, five: true},
		{leases: 100_000, term: 30 * time.Second, alone: alone, length: 10 * time.Second},
	}
	p.degraded = degraded{200 * time.Millisecond, 25 * time.Millisecond, 1500 * time.Millisecond}
	return p
}

// quick has everything happen once.
func quick() plan {
	return plan{
		rounds: 1, budget: 36 * time.Second, limit: 45 * time.Second,
		distinct: []distinct{{1, 30 * time.Millisecond, 1}, {64, 60 * time.Millisecond, 1}},
		contests: []contest{{8, 1, 0, 60 * time.Millisecond}, {8, 4, time.Millisecond, 100 * time.Millisecond}},
		crowds: []crowd{
			{leases: 100, term: 3 * time.Second, alone: 200 * time.Millisecond, length: 1200 * time.Millisecond},
			{leases: 100, term: 3 * time.Second, alone: 200 * time.Millisecond, length: 1200 * time.Millisecond, unreachable: true},
		},
		degraded: degraded{200 * time.Millisecond, 25 * time.Millisecond, 300 * time.Millisecond},
	}
}

// The scenarios.
const (
	uncontended = "uncontended"
	contended   = "contended"
	leases      = "leases"
	masters     = "masters"
)

var scenarios = []string{uncontended, contended, leases, masters}

// split sorts words into names of scenarios and of contestants.
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
