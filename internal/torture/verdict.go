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

// verdict prints the result of a run.
func (r *result) verdict(out io.Writer) {
	what := ""
	if r.Losing {
		what = ", with faults that take locks away"
	}
	fmt.Fprintf(out, "\n## %s on %s%s: ", r.Strategy, r.What, what)
	switch {
	case len(r.Violations) == 0 && r.Found.Overlaps > 0:
		fmt.Fprintln(out, "kept by the fence only")
	case len(r.Violations) == 0:
		fmt.Fprintln(out, "kept")
	default:
		fmt.Fprintf(out, "broken %d times\n", len(r.Violations))
	}
	fmt.Fprintf(out, "\n%d processes of %d callers, %d keys, term %v; %d faults in %v. Seed %d: %s\n\n",
		seats, callers, keys, term, r.Injected, r.Lasted.Round(time.Second), r.Seed, r.Command)

	rows := [][]string{{"fault", "injected", "recovery p50", "longest", "violations"}}
	for _, k := range r.Kinds {
		rows = append(rows, append([]string{k.Name}, texts(k.Injected, percentile(k.Recovery, 50), percentile(k.Recovery, 100), k.Violations)...))
	}
	table(out, rows)

	f := r.Found
	fmt.Fprintf(out, "\n%d holds, %d of them fenced; %d ended before Lock returned; %d holders were killed, and %d learned that the lease was lost; the resource refused %d uses with an old fence.\n",
		f.Holds, f.Fenced, f.Void, f.Killed, f.Lost, f.Refused)
	if r.Losing {
		fmt.Fprintf(out, "%d times two callers held a key at once, after locks were taken away; %d times neither of them learned of it.\n", f.Overlaps, f.Unaware)
	}
	if f.Undecided {
		fmt.Fprintln(out, "porcupine ran out of time.")
	}
	var errs []string
	for _, kind := range slices.Sorted(maps.Keys(r.Errors)) {
		errs = append(errs, fmt.Sprint(r.Errors[kind], " ", kind))
	}
	fmt.Fprintf(out, "Errors: %s.\n", cmp.Or(strings.Join(errs, ", "), "none"))
	for i, v := range r.Violations {
		if i == 20 {
			fmt.Fprintf(out, "- and %d more\n", len(r.Violations)-i)
			break
		}
		fmt.Fprintf(out, "- **%s**: %s, after %q\n", v.Promise, v.What, v.After)
	}
}

func texts(all ...any) []string {
	s := make([]string, len(all))
	for i, v := range all {
		s[i] = fmt.Sprint(v)
	}
	return s
}

// percentile returns a percentile of sorted durations, by nearest rank.
func percentile(sorted []time.Duration, p int) string {
	if len(sorted) == 0 {
		return "–"
	}
	return fmt.Sprintf("%.1f ms", float64(rank(sorted, p))/1e6)
}

func rank(sorted []time.Duration, p int) time.Duration {
	return sorted[max((len(sorted)*p+99)/100, 1)-1]
}

// table prints rows as an aligned Markdown table.
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
