package main

import (
	"fmt"
	"io"
	"slices"
	"time"
)

// violation is a promise that was broken.
type violation struct {
	promise string
	at      int64
	what    string
}

// again returns the command that repeats the run.
func (n *nemesis) again() string {
	s := fmt.Sprintf("go run ./torture -strategy %s -seed %d -time %v", n.strategy, n.seed, n.time)
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
func (n *nemesis) before(at int64) string {
	var last int64
	name := "nothing"
	for _, f := range n.faults {
		for _, when := range f.at {
			if when <= at && when > last {
				last, name = when, f.name
			}
		}
	}
	return name
}

// verdict prints the result of a run. f counts events that break no promise.
func (n *nemesis) verdict(out io.Writer, f found, lasted time.Duration) {
	what := ""
	if n.losing {
		what = ", with faults that take locks away"
	}
	verdict := "kept"
	switch {
	case len(n.wrong) > 0:
		verdict = fmt.Sprintf("broken %d times", len(n.wrong))
	case f.Overlaps > 0 && f.Fenced == 0:
		verdict = "two held a key at once, without a fence"
	case f.Overlaps > 0:
		verdict = "kept by the fence only"
	}
	fmt.Fprintf(out, "\n## %s on %s%s: %s\n", n.strategy, n.store.what, what, verdict)
	fmt.Fprintf(out, "\n%d processes of %d callers, %d keys and a key with %d slots, term %v; %d faults in %v. Seed %d: %s\n\n",
		seats, callers, keys, slots, n.term, n.count, lasted.Round(time.Second), n.seed, n.again())
	broken := map[string]int{} // the number of violations, by the last fault before each
	for _, v := range n.wrong {
		broken[n.before(v.at)]++
	}
	fmt.Fprintln(out, "Each fault: how many, then the median and the longest time to recovery in ms.")
	for _, f := range n.faults {
		if len(f.at) > 0 {
			fmt.Fprintf(out, "- %s: %s\n", f.name, f.figures(broken[f.name]))
		}
	}

	fmt.Fprintf(out, "\n%d holds, %d of them fenced, %d shared, %d of a slot; %d ended before Lock returned; %d holders were killed, and %d learned that the lease was lost; the resource refused %d uses with an old fence.\n",
		f.Holds, f.Fenced, f.Shared, f.Slots, f.Void, f.Killed, f.Lost, f.Refused)
	if n.losing {
		fmt.Fprintf(out, "%d times two callers held a key at once, after locks were taken away.\n", f.Overlaps)
	}
	for i, v := range n.wrong {
		if i == 20 {
			fmt.Fprintf(out, "- and %d more\n", len(n.wrong)-i)
			break
		}
		fmt.Fprintf(out, "- **%s**: %s, after %q\n", v.promise, v.what, n.before(v.at))
	}
}

// figures returns how often a fault was injected, the median and the longest recovery, and the
// number of broken promises.
func (f *fault) figures(broken int) string {
	text := fmt.Sprintf("%d×", len(f.at))
	if n := len(f.recovery); n > 0 {
		slices.Sort(f.recovery)
		text += fmt.Sprintf(": %s / %s", millis(f.recovery[(n-1)/2]), millis(f.recovery[n-1]))
	}
	if broken > 0 {
		text += fmt.Sprintf(", **broken %d×**", broken)
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
