package main

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"
)

// verdict prints what came of a run, for people.
func (n *nemesis) verdict(out io.Writer, lasted time.Duration, f found) {
	what := ""
	if n.losing {
		what = ", with faults that take locks away"
	}
	fmt.Fprintf(out, "\n## %s on %s%s: ", n.strategy, n.store.what, what)
	if len(n.wrong) == 0 {
		fmt.Fprintln(out, "kept")
	} else {
		fmt.Fprintf(out, "%d VIOLATIONS\n", len(n.wrong))
	}
	fmt.Fprintf(out, "\n%d processes of %d callers, %d keys, term %v; %d faults in %v. Seed %d: %s\n\n",
		seats, callers, keys, n.term, n.count, lasted.Round(time.Second), n.seed, n.command())

	rows := [][]string{{"fault", "injected", "while held", "waited for", "grants before", "during", "after", "recovery p50", "longest", "violations"}}
	blame := n.blame()
	for _, f := range n.faults {
		t := n.tally[f.name]
		if t == nil {
			continue
		}
		slices.Sort(t.recovery)
		rows = append(rows, append([]string{f.name}, texts(t.injected, t.held, t.waited, t.before, t.during, t.after,
			percentile(t.recovery, 50), percentile(t.recovery, 100), blame[f.name])...))
	}
	table(out, rows)

	fmt.Fprintf(out, "\n%d holds, %d of them fenced, %d over before their callers saw them; %d holders killed, %d told that they lost the lease; %d uses of the resource refused for an old fence.\n",
		f.holds, f.fenced, f.void, f.killed, f.told, f.refused)
	if n.losing {
		fmt.Fprintf(out, "%d times two held a key at once, after locks were taken away; %d times the first was not told.\n", f.overlaps, f.untold)
	}
	if f.undecided {
		fmt.Fprintln(out, "porcupine did not come to an end.")
	}
	var errs []string
	for _, kind := range slices.Sorted(maps.Keys(n.rec.errs)) {
		errs = append(errs, fmt.Sprint(n.rec.errs[kind], " ", kind))
	}
	fmt.Fprintf(out, "Errors: %s.\n", cmp.Or(strings.Join(errs, ", "), "none"))
	for i, v := range n.wrong {
		if i == 20 {
			fmt.Fprintf(out, "- and %d more\n", len(n.wrong)-i)
			break
		}
		fmt.Fprintf(out, "- **%s**: %s, after %q\n", v.promise, v.what, cmp.Or(n.before(v.at), "nothing"))
	}
}

// command is what repeats the run.
func (n *nemesis) command() string {
	s := fmt.Sprintf("go run ./internal/torture -strategy %s -seed %d -time %v", n.strategy, n.seed, n.time)
	if n.place != onServer {
		s += " -on " + n.place
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

// blame counts violations by the last fault before them.
func (n *nemesis) blame() map[string]int {
	by := map[string]int{}
	for _, v := range n.wrong {
		by[n.before(v.at)]++
	}
	return by
}

func texts(all ...any) []string {
	s := make([]string, len(all))
	for i, v := range all {
		s[i] = fmt.Sprint(v)
	}
	return s
}

// percentile is that of sorted durations, by nearest rank.
func percentile(sorted []time.Duration, p int) string {
	if len(sorted) == 0 {
		return "–"
	}
	d := sorted[max((len(sorted)*p+99)/100, 1)-1]
	return fmt.Sprintf("%.1f ms", float64(d)/1e6)
}

// table prints rows as Markdown that is aligned.
func table(out io.Writer, rows [][]string) {
	widths := make([]int, len(rows[0]))
	for _, r := range rows {
		for i, c := range r {
			widths[i] = max(widths[i], len([]rune(c)))
		}
	}
	for i, r := range rows {
		for j, c := range r {
			pad := strings.Repeat(" ", widths[j]-len([]rune(c)))
			if j > 0 {
				c, pad = pad+c, ""
			}
			fmt.Fprint(out, "| ", c, pad, " ")
		}
		fmt.Fprintln(out, "|")
		if i == 0 {
			for j, w := range widths {
				fmt.Fprint(out, "|", strings.Repeat("-", w+1), map[bool]string{true: ":", false: "-"}[j > 0])
			}
			fmt.Fprintln(out, "|")
		}
	}
}
