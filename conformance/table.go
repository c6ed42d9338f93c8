package conformance

import (
	"slices"

	"github.com/hasplock/hasp/backend"
)

// How the suite is built:
//
//   - The table has a row for each clause. Rows and checks are in clause_*.go, and
//     in roundtrip.go for calls that take several round trips.
//   - A check is a list of steps. verdict.go says how a step fails. driver.go has steps on a
//     driver, and client.go on a Client.
//   - env.go has the environment of one try of a check. child.go has both sides of child processes.
//   - suite.go runs the table, for Check in conformance.go and for Run in run.go.

// clause checks one sentence of the contract.
type clause struct {
	name     string
	why      string
	says     string // the sentence of package backend that the clause checks
	need     need   // what the clause needs of the driver and the Harness; nil if nothing
	alone    bool   // runs alone, because it disturbs the store or counts calls
	optional bool   // Harness.Cannot may name the clause, which must then fail
	check    func(e *env)
}

// table has every clause, in the order of the results.
var table = sorted(
	acquireClauses, termClauses, releaseClauses, renewClauses, keyClauses, fenceClauses,
	keepClauses, sharedClauses, waitClauses, wakeClauses, orderClauses, inspectClauses, listClauses,
	closeClauses,
	historyClauses, otherClauses, processClauses,
	linkClauses, restartClauses, costClauses, leftoverClauses,
)

// pair returns a check that opens two drivers and passes them to the given check.
func pair(check func(e *env, a, b *driver)) func(e *env) {
	return func(e *env) { check(e, e.open(), e.open()) }
}

// pairOn does the same as the function pair, and also passes a new key.
func pairOn(check func(e *env, a, b *driver, key string)) func(e *env) {
	return func(e *env) { check(e, e.open(), e.open(), e.key()) }
}

// sorted returns all clauses. Those that run alone come last.
func sorted(groups ...[]clause) []clause {
	var others, alone []clause
	for _, c := range slices.Concat(groups...) {
		if c.alone {
			alone = append(alone, c)
		} else {
			others = append(others, c)
		}
	}
	return append(others, alone...)
}

// alone marks cs to run alone.
func alone(cs []clause) []clause {
	for i := range cs {
		cs[i].alone = true
	}
	return cs
}

// given adds the need n to each clause in cs, before the clause's own need.
func given(n need, cs []clause) []clause {
	for i, c := range cs {
		cs[i].need = all(n, c.need)
	}
	return cs
}

// need returns the reason why a clause cannot run in a suite, or "".
type need func(s *suite) string

// missing returns n(s), or "" if n is nil.
func (n need) missing(s *suite) string {
	if n == nil {
		return ""
	}
	return n(s)
}

// These are the needs of clauses that depend on the driver.
var (
	waiter = needs("the driver is neither a Waiter nor a Waker", func(s *suite) bool {
		return s.waiter
	})
	wakes     = needs("the driver is not a Waker", func(s *suite) bool { return s.waker })
	inspector = needs("the driver is not an Inspector", func(s *suite) bool { return s.inspector })
	shown     = needs("the driver is neither an Inspector nor a Lister", func(s *suite) bool {
		return s.inspector || s.lister
	})
	lister = needs("the driver is not a Lister", func(s *suite) bool { return s.lister })
	ends   = needs("ends a call sometime by its Traits", func(s *suite) bool {
		return s.traits.Cancellation != backend.CancelNone
	})
	limited = needs("grants any term by its Traits", func(s *suite) bool {
		return s.traits.MaxTTL > 0
	})
	processes = needs("reaches one process by its Traits", func(s *suite) bool {
		return s.traits.Reach != backend.Process
	})
)

// These are the needs of clauses that check a trait, and of those that check its absence.
var (
	ordered, notOrdered = either("Ordered", func(t backend.Traits) bool { return t.Ordered })
	fenced, unfenced    = either("Fenced", func(t backend.Traits) bool { return t.Fenced })
	keeps, unkept       = either("MinHold", func(t backend.Traits) bool { return t.MinHold })
	shares, unshared    = either("Shared", func(t backend.Traits) bool { return t.Shared })
)

// either returns the needs of clauses that apply to drivers with a trait, and of clauses that apply
// to drivers without that trait.
func either(trait string, has func(t backend.Traits) bool) (with, without need) {
	trait += " by its Traits"
	with = needs("not "+trait, func(s *suite) bool { return has(s.traits) })
	without = needs(trait, func(s *suite) bool { return !has(s.traits) })
	return with, without
}

// These are the needs of clauses that depend on a hook of the Harness.
var (
	restarts = needsHook("Stop")
	link     = needsHook("Link")
	flush    = needsHook("Flush")
	kick     = needsHook("Kick")
	commands = needsHook("Commands")
	entries  = needsHook("Entries")
	others   = needsHook("Others")
)

// needs returns a need that gives this reason unless met(s) is true.
func needs(reason string, met func(s *suite) bool) need {
	return func(s *suite) string {
		if met(s) {
			return ""
		}
		return reason
	}
}

// all combines several needs into one, whose reason is the first reason that one of them gives.
func all(needs ...need) need {
	return func(s *suite) string {
		for _, n := range needs {
			if reason := n.missing(s); reason != "" {
				return reason
			}
		}
		return ""
	}
}

// hooks lists the hooks of a Harness in the order of its fields. Stop stands for Start as well.
var hooks = []string{
	"Store", "Stop", "Link", "Flush", "Kick", "Commands", "Entries", "Sweep", "Others",
}

func needsHook(name string) need {
	return needs("Harness."+name+" is nil", func(s *suite) bool { return s.h.has(name) })
}
