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

// before returns the name of the last fault that was injected before a moment.
func (r *run) before(at int64) (name string) {
	var last int64
	for _, f := range r.faults {
		for _, when := range f.at {
			if when <= at && when > last {
				last = when
				name = f.name
			}
		}
	}

	return name
}

// verdict prints the result of a run.
func (r *run) verdict(out io.Writer) {
	f := r.found
	verdict := "kept"
	switch {
	case len(r.wrong) > 0:
		verdict = fmt.Sprintf("broken %d times", len(r.wrong))
	case f.Overlaps > 0:
		verdict = "kept by the fence only"
	}

	fmt.Fprintf(out, `
## %s on %s: %s

%d faults, %d holds; %d leases ended before Lock returned. The resource refused %d uses with an old fence. %d times two callers held a key at once, after locks were taken away. Again:
go run ./torture -strategy %s -seed %d -time %v -on %s -nodes %d -plant %q -faults %q

Each fault: how many, then the median and the longest time to recovery in ms.
`, r.name(), r.store.what, verdict, r.count, f.Holds, f.Void, f.Refused, f.Overlaps,
		r.strategy, r.seed, r.time, r.place, r.nodes, r.plant, r.only)
	for _, fault := range r.faults {
		if all := slices.Sorted(slices.Values(fault.recovery)); len(all) > 0 {
			last := len(all) - 1
			fmt.Fprintf(out, "- %s: %d×: %d / %d\n", fault.name, len(fault.at),
				all[last/2].Milliseconds(), all[last].Milliseconds())
		}
	}

	for i, v := range r.wrong {
		if i == 20 {
			fmt.Fprintf(out, "- and %d more\n", len(r.wrong)-i)
			break
		}
		fmt.Fprintf(out, "%v, after %q\n", v, r.before(v.at))
	}
}

// writeResults writes a page with a row for each strategy.
func (o options) writeResults(file string, strategies []string, runs map[string]*run) error {
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
	for _, name := range strategies {
		page += "| " + name
		for _, r := range []*run{runs[name], runs[name+losingRun]} {
			if r == nil {
				page += strings.Repeat(" | –", 5)
				continue
			}
			page += fmt.Sprintf(" | %d | %d", r.count, r.found.Holds)
			if r.losing {
				page += fmt.Sprintf(" | %d", r.found.Overlaps)
			} else {
				var slowest time.Duration
				for _, f := range r.faults {
					slowest = max(slowest, slices.Max(append(f.recovery, 0)))
				}
				page += fmt.Sprintf(" | %.1f s", slowest.Seconds())
			}
			page += fmt.Sprintf(" | %d | %d", r.found.Refused, len(r.wrong))
		}
		page += " |\n"
	}

	return os.WriteFile(file, []byte(page), 0o644)
}
