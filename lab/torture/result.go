package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"time"
)

// verdict prints the result of a run.
func (r *run) verdict(out io.Writer) {
	f := r.found
	fmt.Fprintf(out, `
## %s on %s: %d promises broken

%d faults, %d holds; %d leases ended before Lock returned. The resource refused %d uses with an old fence. %d times two callers held a key at once, after locks were taken away. Again:
go run ./torture -strategy %s -seed %d -time %v -on %s -nodes %d

Each fault: how many, then the median and the longest time to recovery in ms.
`, r.strategy, r.store.what, len(r.wrong), r.count, f.holds, f.void, f.refused, f.overlaps,
		r.strategy, r.seed, r.time, r.place, r.nodes)
	for _, fault := range r.faults {
		if all := slices.Sorted(slices.Values(fault.recovery)); len(all) > 0 {
			last := len(all) - 1
			fmt.Fprintf(out, "- %s: %d×: %d / %d\n", fault.name, len(all),
				all[last/2].Milliseconds(), all[last].Milliseconds())
		}
	}

	for _, v := range r.wrong[:min(len(r.wrong), 20)] {
		fmt.Fprintln(out, v)
	}
}

// writeResults writes a page with a row for each run.
func (o options) writeResults(file string, runs []*run) error {
	commit, err := exec.Command("git", "log", "-1", "--format=%h of %cs").Output()
	if err != nil {
		return err
	}
	page := fmt.Appendf(nil, `# Torture

Commit %s, seed %d, %s, %d CPUs, %v for each strategy.

[guarantees.md](../guarantees.md#how-a-run-works) describes a run. *Two at once* counts how often
two callers held a key at the same time, because a fault had taken a lock away; files have no such
faults. *Late writes* are uses of the resource by a caller whose key already had a later holder.
Without a fence each of them is a lost update. With the fence the resource refused them all.

| strategy | faults | holds | slowest recovery | two at once | late writes | broken promises |
|---|--:|--:|--:|--:|--:|--:|
`, bytes.TrimSpace(commit), o.seed, runtime.Version(), runtime.NumCPU(), o.time)
	for _, r := range runs {
		var slowest time.Duration
		for _, f := range r.faults {
			slowest = max(slowest, slices.Max(append(f.recovery, 0)))
		}
		page = fmt.Appendf(page, "| %s | %d | %d | %.1f s | %d | %d | %d |\n", r.strategy, r.count,
			r.found.holds, slowest.Seconds(), r.found.overlaps, r.found.refused, len(r.wrong))
	}

	return os.WriteFile(file, page, 0o644)
}
