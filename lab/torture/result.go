package main

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"
)

// result is the result of a run.
type result struct {
	Strategy   string
	What       string // a description of the store
	Losing     bool
	Seed       uint64
	Command    string // repeats the run
	Injected   int    // faults
	Lasted     time.Duration
	Term       time.Duration
	Rejoined   time.Duration // after the last fault, until every client had a key
	Kinds      []kind
	Found      found
	Errors     map[string]int // of Lock and Unlock, by kind
	Violations []violation
}

// kind counts one kind of fault.
type kind struct {
	Name       string
	Injected   int
	Recovery   []time.Duration // sorted
	Violations int             // of which this was the last fault before
}

// violation is a promise that was broken.
type violation struct {
	Promise string
	At      int64
	What    string
	After   string // the last fault before it
}

func (n *nemesis) result(lasted time.Duration, f found) *result {
	res := &result{Strategy: n.strategy, What: n.store.what, Losing: n.losing, Seed: n.seed, Command: n.again(),
		Injected: n.count, Lasted: lasted, Term: n.term, Rejoined: n.rejoined, Found: f, Errors: maps.Clone(n.rec.errs)}
	for _, v := range n.wrong {
		v.After = cmp.Or(n.before(v.At), "nothing")
		res.Violations = append(res.Violations, v)
	}
	for _, f := range n.faults {
		if len(f.at) == 0 {
			continue
		}
		k := kind{Name: f.name, Injected: len(f.at), Recovery: f.recovery}
		for _, v := range res.Violations {
			k.Violations += one(v.After == k.Name)
		}
		slices.Sort(k.Recovery)
		res.Kinds = append(res.Kinds, k)
	}
	return res
}

// again returns the command that repeats the run.
func (n *nemesis) again() string {
	s := fmt.Sprintf("go run ./torture -strategy %s -seed %d -time %v", n.strategy, n.seed, n.whole)
	if n.place != onServer {
		s += " -on " + n.place
	}
	if n.strategy == redlock && n.nodes != leastNodes {
		s += fmt.Sprint(" -nodes ", n.nodes)
	}
	if n.plant != "" {
		s += " -plant " + n.plant
	}
	if n.only != nil {
		s += fmt.Sprintf(" -faults %q", n.only)
	}
	return s
}

// before returns the last fault that was injected before a moment.
func (n *nemesis) before(at int64) (name string) {
	var last int64
	for _, f := range n.faults {
		for _, when := range f.at {
			if when <= at && when > last {
				last, name = when, f.name
			}
		}
	}
	return name
}
