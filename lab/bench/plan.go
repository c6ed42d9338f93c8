package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"
)

// plan says what is measured, and for how long.
type plan struct {
	rounds int
	// of each scenario; a setting may be measured several times in a row
	settings map[string][]setting
}

// setting is a setting of a scenario.
type setting interface {
	String() string
	measure(context.Context, *bench, contestant) (figures, error)
}

// sections returns the sections of a scenario, each once.
func (p plan) sections(scenario string) (all []section) {
	for _, s := range p.settings[scenario] {
		all = append(all, section{scenario, s.String()})
	}
	return slices.Compact(all)
}

// held returns the sections of the scenario "fair" for contestants on that many nodes.
func (p plan) held(nodes int) (all []section) {
	for _, s := range p.settings[fair] {
		if s.(contest).nodes == nodes {
			all = append(all, section{fair, s.String()})
		}
	}
	return all
}

// distinct is a setting of the scenario without contention. In each round every contestant has
// several short turns, because on a machine with few processors the figures depend on the processor
// on which a server runs, and a server stays on one processor for a while.
type distinct struct {
	goroutines int
	keys       int // the number of keys that each goroutine has
	length     time.Duration
}

// contest is a setting of the scenarios with one contended key. In the scenario "fair", contestants
// have long turns, because shares and longest waits mean little until each caller has had the key
// several times.
type contest struct {
	waiters, processes int
	hold               time.Duration
	length             time.Duration
	trip               time.Duration // added to each round trip
	think              time.Duration // mean pause of a caller between two turns
	// the number of nodes of the contestants that take part; 0 means any number
	nodes int
}

// warmup is the longest time from the start of a contest to its window, not counting queueing.
const warmup = 400 * time.Millisecond

// queueing is added to the warmup for each caller, because thousands of callers that arrive at once
// take a while to queue.
const queueing = 200 * time.Microsecond

// repetition is the setting of the scenario in which one caller locks one key again and again.
type repetition struct {
	length time.Duration
	think  time.Duration // mean pause of the caller of another process
}

// crowd is a setting of the scenario of many leases. A lone caller is measured without leases
// first, and then beside the leases.
type crowd struct {
	leases int
	term   time.Duration
	length time.Duration // of the part with leases
	// if true, for contestants on five nodes; otherwise for those on one node or on etcd
	five bool
}

// alone is the length of the part without leases.
const alone = 400 * time.Millisecond

func (d distinct) String() string {
	s := count(d.goroutines, "goroutine")
	if d.keys == 1 {
		s += ", one key each"
	}
	return s
}

func (c contest) String() string {
	s := fmt.Sprintf("%d waiters, %d processes", c.waiters, c.processes)
	if c.hold > 0 {
		s += fmt.Sprintf(", hold %v", c.hold)
	}
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
	if c.five {
		s += ", five nodes"
	}
	return s
}

// count returns a number of things. It adds the plural s to the name of one thing.
func count(n int, thing string) string {
	if n != 1 {
		thing += "s"
	}
	return number(float64(n)) + " " + thing
}

// planOf returns the plan with or without --quick. The pages show more about the first settings of
// the scenarios "contended", "apart" and "fair" than about the others.
func planOf(quick bool) plan {
	const (
		ms = time.Millisecond
		s  = time.Second
	)
	if quick {
		return plan{rounds: 1, settings: map[string][]setting{
			uncontended: {distinct{1, keysEach, 30 * ms}, distinct{64, 1, 60 * ms},
				distinct{64, keysEach, 60 * ms}},
			contended: {
				contest{waiters: 8, processes: 4, length: 60 * ms},
				contest{waiters: 2, processes: 2, length: 60 * ms},
			},
			apart: {contest{waiters: 4, processes: 4, hold: ms, length: 60 * ms}},
			fair: {
				contest{waiters: 8, processes: 2, hold: ms, length: 100 * ms, trip: ms, think: ms,
					nodes: 1},
				contest{waiters: 8, processes: 2, hold: ms, length: 100 * ms, nodes: 5},
			},
			leases: {
				crowd{leases: 100, term: 3 * s, length: 1200 * ms},
				crowd{leases: 100, term: 3 * s, length: 1200 * ms, five: true},
			},
			again:   {repetition{300 * ms, 50 * ms}},
			lockAll: {several{8, ms, 100 * ms}},
		}}
	}

	settings := map[string][]setting{
		contended: { // the callers' shares of the key show only after some time
			contest{waiters: 64, processes: 4, length: 400 * ms},
			contest{waiters: 512, processes: 4, length: 400 * ms},
			contest{waiters: 2, processes: 2, length: 100 * ms}, // two Clients
		},
		apart: {
			contest{waiters: 64, processes: 64, hold: ms, length: s},
			contest{waiters: 64, processes: 64, length: s},
		},
		// Each length is longer than the interval between renewals, which is a third of the term.
		leases: {
			crowd{leases: 10_000, term: 6 * s, length: 6 * s},
			crowd{leases: 10_000, term: 30 * s, length: 10 * s, five: true},
			crowd{leases: 100_000, term: 30 * s, length: 10 * s},
		},
		again:   {repetition{4 * s, 20 * ms}},
		lockAll: {several{8, ms, s}, several{64, ms, 2 * s}},
	}

	for _, d := range []distinct{{1, keysEach, 0}, {64, keysEach, 0}, {256, keysEach, 0},
		{1024, 1, 0}, {1024, keysEach, 0}} {
		d.length = 70 * ms
		settings[uncontended] = append(settings[uncontended], d, d)
	}

	for _, c := range []contest{
		{}, {processes: 2}, {processes: 8}, {trip: ms}, {trip: 10 * ms}, {think: 100 * ms},
		{hold: 10 * ms}, {hold: 10 * ms, trip: 10 * ms}, {nodes: 5},
	} {
		c.waiters = 64
		c.processes = cmp.Or(c.processes, 4)
		c.hold = cmp.Or(c.hold, ms)
		c.nodes = cmp.Or(c.nodes, 1)
		c.length = 1100*ms + 300*c.hold // several turns of each caller
		settings[fair] = append(settings[fair], c)
	}

	return plan{rounds: 3, settings: settings}
}

// The scenarios. The last four have long turns, and are measured in the first round only.
const (
	uncontended = "uncontended"
	contended   = "contended"
	apart       = "apart" // as contended, and each waiter has a process
	leases      = "leases"
	fair        = "fair"
	again       = "again"
	lockAll     = "lockall"
)

var scenarios = []string{uncontended, contended, apart, leases, fair, again, lockAll}

// split separates words into names of scenarios, parts of contestants' names, and parts of
// settings' texts, which have spaces. If no word names a scenario, split returns all scenarios.
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
