package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
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

// before returns the name of the last fault that was injected before a moment.
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

// verdict prints the result of a run. The argument f counts events that break no promise.
func (n *nemesis) verdict(out io.Writer, f found, lasted time.Duration) {
	n.found = f
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
	broken := map[string]int{} // for each fault, the number of violations between this fault and the next fault
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
		ms := func(i int) int64 { return f.recovery[i].Milliseconds() }
		text += fmt.Sprintf(": %d / %d", ms((n-1)/2), ms(n-1))
	}
	if broken > 0 {
		text += fmt.Sprintf(", **broken %d×**", broken)
	}
	return text
}

// writeResults writes a page with a row for each strategy.
func (o options) writeResults(file string, names []string, runs map[string]*nemesis) error {
	commit, err := exec.Command("git", "log", "-1", "--format=%h of %cs").Output()
	if err != nil {
		return err
	}
	page := fmt.Sprintf(`# Torture

Commit %s, seed %d, %s, %d CPUs, %v for each strategy.

Each strategy runs with faults that keep its data. Then it runs for a third of the time with faults
that take locks away, which files do not have. [guarantees.md](../guarantees.md#how-a-run-works)
describes a run. *Late writes* are uses of the resource by a caller whose key already had a later
holder. Without a fence each of them is a lost update. With the fence the resource refused them all.

| strategy | faults | holds | slowest recovery | late writes | broken promises | faults that take locks away | holds | two at once | late writes | broken promises |
|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|
`, bytes.TrimSpace(commit), o.seed, runtime.Version(), runtime.NumCPU(), o.time)
	for _, name := range names {
		page += "| " + name
		for _, n := range []*nemesis{runs[name], runs[name+losingRun]} {
			switch {
			case n == nil:
				page += strings.Repeat(" | –", 5)
			case !n.losing:
				var slowest time.Duration
				for _, f := range n.faults {
					slowest = max(slowest, slices.Max(append(f.recovery, 0)))
				}
				page += fmt.Sprintf(" | %d | %d | %.1f s | %d | %d", n.count, n.found.Holds, slowest.Seconds(), n.found.Refused, len(n.wrong))
			default:
				page += fmt.Sprintf(" | %d | %d | %d | %d | %d", n.count, n.found.Holds, n.found.Overlaps, n.found.Refused, len(n.wrong))
			}
		}
		page += " |\n"
	}
	return os.WriteFile(file, []byte(page), 0o644)
}
