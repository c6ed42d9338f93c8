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
	limit    time.Duration // after it, the turn in progress is left out
	distinct []distinct
	contests []contest // of a key that is not held
	fair     []contest // of a key that is held
	crowds   []crowd
	degraded degraded
	growth   growthPlan
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

// crowd is a setting of the scenario of many leases. A lone caller is measured
// without leases first, and then beside them.
type crowd struct {
	leases      int
	term        time.Duration
	length      time.Duration // of the part with leases
	five        bool          // for contestants on five nodes; otherwise for the others
	unreachable bool          // one of the five nodes is unreachable
	acquiring   time.Duration // how long taking the leases may last; 0 means the default
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

// growthPlan has the sizes for which the scenario of growth measures hasp.
type growthPlan struct {
	budget   time.Duration // after it, no turn begins
	nodes    []quorumSize
	length   time.Duration // of the pairs of a lone caller
	contests []contest
	keys     []crowd
}

// quorumSize is a number of nodes of redlock.
type quorumSize int

func (n quorumSize) String() string { return count(int(n), "node", "nodes") }

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
			contests: []contest{{waiters: 8, processes: 4, length: 60 * ms}},
			fair: []contest{
				{waiters: 8, processes: 2, hold: ms, length: 100 * ms, trip: ms, think: ms, nodes: 1},
				{waiters: 8, processes: 2, hold: ms, length: 100 * ms, nodes: 3},
			},
			crowds: []crowd{
				{leases: 100, term: 3 * s, length: 1200 * ms},
				{leases: 100, term: 3 * s, length: 1200 * ms, unreachable: true},
			},
			degraded: degraded{200 * ms, 25 * ms, 300 * ms},
			growth: growthPlan{
				budget: 36 * s, nodes: []quorumSize{1, 3}, length: 50 * ms,
				contests: []contest{
					{waiters: 100, processes: 1, length: 60 * ms, nodes: 1},
					{waiters: 2, processes: 2, hold: ms, length: 100 * ms, nodes: 1},
				},
				keys: []crowd{{leases: 100, term: 3 * s, length: 1200 * ms}},
			},
		}
	}
	p := plan{
		rounds: 3, budget: 1430 * s, limit: 1450 * s,
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
		degraded: degraded{200 * ms, 25 * ms, 1500 * ms},
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

	// Each length of keys is enough for one renewal of each lease. A single lease and
	// a hundred are too few for figures of renewals. The terms are longer for more
	// leases, because they take longer to take and to renew.
	p.growth = growthPlan{
		budget: 285 * s, nodes: []quorumSize{1, 3, 5, 9, 15}, length: s,
		keys: []crowd{
			{leases: 1, term: 6 * s},
			{leases: 100, term: 6 * s},
			{leases: 10_000, term: 12 * s, length: 4200 * ms},
			{leases: 100_000, term: 15 * s, length: 5500 * ms},
			{leases: 1_000_000, term: 60 * s, length: 21 * s, acquiring: 25 * s},
		},
	}
	grow := func(waiters, processes int, hold, length time.Duration) {
		p.growth.contests = append(p.growth.contests, contest{waiters: waiters, processes: processes, hold: hold, length: length, nodes: 1})
	}
	for _, n := range []int{1, 4, 16, 64} {
		grow(n, n, ms, time.Duration(n)*30*ms+s)
	}
	for _, n := range []int{1, 10, 100} {
		grow(n, 1, 0, s)
	}
	grow(100, 4, 0, s)
	for _, processes := range []int{1, 4} {
		grow(1000, processes, 0, 2*s)
	}
	for _, processes := range []int{1, 4} {
		grow(10_000, processes, 0, 4*s)
	}
	return p
}

// The scenarios.
const (
	uncontended = "uncontended"
	contended   = "contended"
	fair        = "fair" // measured in the first round only, because its turns are long
	leases      = "leases"
	masters     = "masters"
	growth      = "growth" // measured once, and only if --only names it
)

var (
	usual     = []string{uncontended, contended, leases, masters, fair}
	scenarios = append(slices.Clone(usual), growth)
)

// split separates the names of scenarios, parts of names of contestants, and parts
// of the texts of settings, which have spaces. Without a scenario it returns the usual ones.
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
		names = usual
	}
	return names, others, settings
}
