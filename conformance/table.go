package conformance

import (
	"fmt"
	"slices"

	"github.com/hasplock/hasp/backend"
)

// clause is one sentence of the contract and its check.
type clause struct {
	name     string
	why      string
	says     string // the sentence of package backend that it checks
	need     need   // nil: every driver
	alone    bool   // disturbs the store, or counts what it does
	optional optional
	check    func(e *env) error
}

// optional reports whether Harness.Cannot may name a clause.
type optional int

const (
	no     optional = iota
	yes             // and then the clause must fail
	chance          // and the clause may pass by chance
)

// need returns the reason why a clause is pointless for a suite, or "".
type need func(s *suite) string

func waiter(s *suite) string {
	if !s.waiter {
		return "the driver is not a Waiter"
	}
	return ""
}

func inspector(s *suite) string {
	if !s.inspector {
		return "the driver is not an Inspector"
	}
	return ""
}

func ordered(s *suite) string {
	if !s.traits.Ordered {
		return "not Ordered by its Traits"
	}
	return ""
}

func turns(s *suite) string {
	if s.traits.Turns <= 1 {
		return "one turn on a place by its Traits"
	}
	return ""
}

func unordered(s *suite) string {
	if s.traits.Ordered {
		return "Ordered by its Traits"
	}
	return waiter(s)
}

func fenced(s *suite) string {
	if !s.traits.Fenced {
		return "not Fenced by its Traits"
	}
	return ""
}

func unfenced(s *suite) string {
	if s.traits.Fenced {
		return "Fenced by its Traits"
	}
	return ""
}

func ends(s *suite) string {
	if s.traits.Ends == backend.EndsSometime {
		return "ends a call sometime by its Traits"
	}
	return ""
}

func limited(s *suite) string {
	if s.traits.MaxTTL <= 0 {
		return "grants any term by its Traits"
	}
	return ""
}

func processes(s *suite) string {
	if s.traits.Reach == backend.Process {
		return "reaches one process by its Traits"
	}
	return ""
}

// hook is an optional part of a Harness.
type hook struct {
	name string
	has  func(h *Harness) bool
}

// hooks are all hooks, in the order of the fields. The entry of Stop covers Start.
var hooks = []hook{
	{"Store", func(h *Harness) bool { return h.Store != nil }},
	{"Stop", func(h *Harness) bool { return h.Stop != nil }},
	{"Link", func(h *Harness) bool { return h.Link != nil }},
	{"Flush", func(h *Harness) bool { return h.Flush != nil }},
	{"Kick", func(h *Harness) bool { return h.Kick != nil }},
	{"Advance", func(h *Harness) bool { return h.Advance != nil }},
	{"Commands", func(h *Harness) bool { return h.Commands != nil }},
	{"Entries", func(h *Harness) bool { return h.Entries != nil }},
	{"Sweep", func(h *Harness) bool { return h.Sweep != nil }},
	{"Others", func(h *Harness) bool { return len(h.Others) > 0 }},
}

// needs returns the need for a hook.
func needs(name string) need {
	i := slices.IndexFunc(hooks, func(h hook) bool { return h.name == name })
	return func(s *suite) string {
		if !hooks[i].has(&s.h) {
			return fmt.Sprintf("Harness.%s is nil", name)
		}
		return ""
	}
}

var (
	restarts = needs("Stop")
	link     = needs("Link")
	flush    = needs("Flush")
	kick     = needs("Kick")
	advance  = needs("Advance")
	commands = needs("Commands")
	entries  = needs("Entries")
	others   = needs("Others")
)

// all returns a need that returns the first reason of several needs.
func all(needs ...need) need {
	return func(s *suite) string {
		for _, n := range needs {
			if reason := n(s); reason != "" {
				return reason
			}
		}
		return ""
	}
}

// table has every clause, in the order in which results are reported. Clauses that
// run alone are last, because the others run before them.
var table = sorted(
	firstClauses, traitClauses, acquireClauses, termClauses, releaseClauses, renewClauses, keyClauses, fenceClauses,
	waitClauses, orderClauses, inspectClauses, closeClauses,
	lockClauses, cancelClauses, leaseClauses, unlockClauses, reentryClauses, historyClauses, otherClauses, processClauses,
	linkClauses, restartClauses, costClauses, leftoverClauses,
)

func sorted(groups ...[]clause) []clause {
	cs := slices.Concat(groups...)
	slices.SortStableFunc(cs, func(a, b clause) int {
		switch {
		case a.alone == b.alone:
			return 0
		case b.alone:
			return -1
		}
		return 1
	})
	return cs
}

func find(name string) *clause {
	for i := range table {
		if table[i].name == name {
			return &table[i]
		}
	}
	return nil
}
