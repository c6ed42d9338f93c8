package main

import (
	"fmt"
	"slices"
	"time"
)

// plan is what is measured, and for how long.
type plan struct {
	rounds   int
	budget   time.Duration // when it is spent, what is left is left out
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
	leases int
	term   time.Duration
	length time.Duration
	rounds int // of all rounds, so many have it
}

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
func (c crowd) String() string    { return fmt.Sprintf("%d leases", c.leases) }
func (d degraded) String() string { return fmt.Sprintf("one of five %v slow, one down", d.delay) }

func count(n int, one, more string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprint(n, " ", more)
}

// full is the plan without flags.
func full() plan {
	p := plan{rounds: 3, budget: 9*time.Minute + 35*time.Second}
	for _, n := range []int{1, 16, 64, 256, 1024} {
		d := distinct{n, 70 * time.Millisecond, 3}
		if n >= 256 {
			d.times = 2
		}
		p.distinct = append(p.distinct, d)
	}
	for _, hold := range []time.Duration{0, time.Millisecond} {
		for _, processes := range []int{1, 4} {
			for _, n := range []int{2, 8, 64, 512} {
				c := contest{n, processes, hold, 120 * time.Millisecond}
				if n >= 64 && processes == 4 && hold == 0 {
					c.length = 800 * time.Millisecond // shares need time to show
				}
				p.contests = append(p.contests, c)
			}
		}
	}
	p.crowds = []crowd{
		{0, 3 * time.Second, 300 * time.Millisecond, 3},
		{1000, 3 * time.Second, 1700 * time.Millisecond, 3},
		{10_000, 3 * time.Second, 1200 * time.Millisecond, 3},
		{100_000, 30 * time.Second, 10 * time.Second, 1},
	}
	p.degraded = degraded{200 * time.Millisecond, 25 * time.Millisecond, 2 * time.Second}
	return p
}

// quick has everything happen once.
func quick() plan {
	return plan{
		rounds: 1, budget: 40 * time.Second,
		distinct: []distinct{{1, 30 * time.Millisecond, 1}, {64, 60 * time.Millisecond, 1}},
		contests: []contest{{8, 1, 0, 60 * time.Millisecond}, {8, 4, time.Millisecond, 100 * time.Millisecond}},
		crowds:   []crowd{{100, 3 * time.Second, 1200 * time.Millisecond, 1}},
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
