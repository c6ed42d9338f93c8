package main

import (
	"cmp"
	"fmt"
	"io"
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
	Kinds      []kind
	Found      found
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
		Injected: n.count, Lasted: lasted, Term: n.term, Found: f}
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

// verdict prints the result of a run.
func (r *result) verdict(out io.Writer) {
	what := ""
	if r.Losing {
		what = ", with faults that take locks away"
	}
	verdict := "kept"
	switch {
	case len(r.Violations) > 0:
		verdict = fmt.Sprintf("broken %d times", len(r.Violations))
	case r.Found.Overlaps > 0 && r.Found.Fenced == 0:
		verdict = "two held a key at once, without a fence"
	case r.Found.Overlaps > 0:
		verdict = "kept by the fence only"
	}
	fmt.Fprintf(out, "\n## %s on %s%s: %s\n", r.Strategy, r.What, what, verdict)
	fmt.Fprintf(out, "\n%d processes of %d callers, %d keys and a key with %d slots, term %v; %d faults in %v. Seed %d: %s\n\n",
		seats, callers, keys, slots, r.Term, r.Injected, r.Lasted.Round(time.Second), r.Seed, r.Command)
	fmt.Fprintln(out, "Each fault: how many, then the median and the longest time to recovery in ms.")
	for _, k := range r.Kinds {
		fmt.Fprintf(out, "- %s: %s\n", k.Name, k)
	}

	f := r.Found
	fmt.Fprintf(out, "\n%d holds, %d of them fenced, %d shared, %d of a slot; %d ended before Lock returned; %d holders were killed, and %d learned that the lease was lost; the resource refused %d uses with an old fence.\n",
		f.Holds, f.Fenced, f.Shared, f.Slots, f.Void, f.Killed, f.Lost, f.Refused)
	if r.Losing {
		fmt.Fprintf(out, "%d times two callers held a key at once, after locks were taken away.\n", f.Overlaps)
	}
	for i, v := range r.Violations {
		if i == 20 {
			fmt.Fprintf(out, "- and %d more\n", len(r.Violations)-i)
			break
		}
		fmt.Fprintf(out, "- **%s**: %s, after %q\n", v.Promise, v.What, v.After)
	}
}

// String has the number of faults, the median and the longest recovery, and the number of
// broken promises.
func (k kind) String() string {
	text := fmt.Sprintf("%d×", k.Injected)
	if n := len(k.Recovery); n > 0 {
		text += fmt.Sprintf(": %s / %s", millis(k.Recovery[(n-1)/2]), millis(k.Recovery[n-1]))
	}
	if k.Violations > 0 {
		text += fmt.Sprintf(", **broken %d×**", k.Violations)
	}
	return text
}

// millis returns milliseconds, with two digits at least.
func millis(d time.Duration) string {
	digits := 0
	if d < 10*time.Millisecond {
		digits = 1
	}
	return fmt.Sprintf("%.*f", digits, float64(d)/1e6)
}
