package main

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"
)

// result is what came of a run.
type result struct {
	Strategy, Place string
	What            string // for people: what Place is
	Losing          bool
	Seed            uint64
	Command         string // that repeats the run
	Injected        int
	Lasted          time.Duration
	Kinds           []kind // of faults
	Found           found
	Errors          map[string]int // of Lock and Unlock, by kind
	Violations      []violation
}

// kind is what came of one kind of fault.
type kind struct {
	Name, Class           string
	Loses, Thins          bool
	Injected              int
	Held, Waited, Touched int // while somebody held a key, waited for one, did either
	Before, During, After int // grants
	Recovery              []time.Duration
	Violations            int // after it
}

// violation is a promise that was broken.
type violation struct {
	Promise string
	At      int64
	What    string
	After   string // the last fault before
}

func (n *nemesis) result(lasted time.Duration, f found) *result {
	res := &result{Strategy: n.strategy, Place: n.place, What: n.store.what, Losing: n.losing, Seed: n.seed, Command: n.command(),
		Injected: n.count, Lasted: lasted, Found: f, Errors: maps.Clone(n.rec.errs)}
	for _, v := range n.wrong {
		v.After = cmp.Or(n.before(v.At), "nothing")
		res.Violations = append(res.Violations, v)
	}
	for _, f := range n.faults {
		t := n.tally[f.name]
		if t == nil {
			continue
		}
		k := kind{Name: f.name, Class: f.class, Loses: f.loses, Thins: f.thins, Injected: t.injected, Held: t.held, Waited: t.waited, Touched: t.touched,
			Before: t.before, During: t.during, After: t.after, Recovery: t.recovery}
		for _, v := range res.Violations {
			k.Violations += one(v.After == k.Name)
		}
		slices.Sort(k.Recovery)
		res.Kinds = append(res.Kinds, k)
	}
	return res
}

// command is what repeats the run.
func (n *nemesis) command() string {
	s := fmt.Sprintf("go run ./internal/torture -strategy %s -seed %d -time %v", n.strategy, n.seed, n.whole)
	if n.place != onServer {
		s += " -on " + n.place
	}
	if n.strategy == redlock && n.nodes != leastNodes {
		s += fmt.Sprint(" -nodes ", n.nodes)
	}
	if n.program == "" {
		s += " -clocks=false"
	}
	if n.plant != "" {
		s += " -plant " + n.plant
	}
	if n.only != nil {
		s += fmt.Sprintf(" -faults %q", n.only)
	}
	return s
}

// before is the fault that was injected last before a moment.
func (n *nemesis) before(at int64) (name string) {
	var last int64
	for k, t := range n.tally {
		for _, when := range t.at {
			if when <= at && when > last {
				last, name = when, k
			}
		}
	}
	return name
}
