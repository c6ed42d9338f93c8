package rig

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

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
	table(out, byFault([]*result{r}, func(*result, kind) bool { return true }))
	fmt.Fprintln(out, "\nA cell: how many faults, then the median and the longest time to recovery in ms.")

	f := r.Found
	fmt.Fprintf(out, "\n%d holds, %d of them fenced, %d shared, %d of a slot; %d ended before Lock returned; %d holders were killed, and %d learned that the lease was lost; the resource refused %d uses with an old fence.\n",
		f.Holds, f.Fenced, f.Shared, f.Slots, f.Void, f.Killed, f.Lost, f.Refused)
	if r.Losing {
		fmt.Fprintf(out, "%d times two callers held a key at once, after locks were taken away; %d times neither of them learned of it.\n", f.Overlaps, f.Unaware)
	}
	if r.Rejoined > 0 {
		fmt.Fprintf(out, "After the last fault every process had a key within %s ms.\n", millis(r.Rejoined))
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

// sum adds up one kind of fault over all runs of a strategy.
type sum struct {
	injected, violations int
	recovery             []time.Duration
}

func (s *sum) add(k kind) {
	s.injected += k.Injected
	s.violations += k.Violations
	s.recovery = append(s.recovery, k.Recovery...)
}

// String is a cell of a table: the number of faults, the median and the longest
// recovery, and the number of broken promises.
func (s *sum) String() string {
	if s == nil {
		return "–"
	}
	text := fmt.Sprintf("%d×", s.injected)
	if n := len(s.recovery); n > 0 {
		slices.Sort(s.recovery)
		text += fmt.Sprintf(": %s / %s", millis(s.recovery[(n-1)/2]), millis(s.recovery[n-1]))
	}
	if s.violations > 0 {
		text += fmt.Sprintf(", **broken %d×**", s.violations)
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

// byFault is a table of faults by strategy.
func byFault(runs []*result, has func(*result, kind) bool) [][]string {
	type cell struct{ fault, strategy string }
	cells := map[cell]*sum{}
	var faults []kind
	var columns []string
	for _, r := range runs {
		for _, k := range r.Kinds {
			if k.Injected == 0 || !has(r, k) {
				continue
			}
			if !slices.ContainsFunc(faults, func(f kind) bool { return f.Name == k.Name }) {
				faults = append(faults, k)
			}
			if !slices.Contains(columns, r.Strategy) {
				columns = append(columns, r.Strategy)
			}
			at := cell{k.Name, r.Strategy}
			if cells[at] == nil {
				cells[at] = &sum{}
			}
			cells[at].add(k)
		}
	}

	slices.SortFunc(columns, inOrder)
	slices.SortStableFunc(faults, func(a, b kind) int { return one(a.Loses) - one(b.Loses) })
	rows := [][]string{append([]string{"fault", "one holder at a time"}, columns...)}
	for _, f := range faults {
		row := []string{f.Name, f.promise()}
		for _, column := range columns {
			row = append(row, cells[cell{f.Name, column}].String())
		}
		rows = append(rows, row)
	}
	return rows
}

// inOrder compares two strategies by their places in the tables. Those of other modules
// are the last ones.
func inOrder(a, b string) int {
	place := func(name string) uint { return uint(slices.Index(strategies, name)) }
	return cmp.Compare(place(a), place(b))
}

// promise says whether exclusion is kept.
func (k kind) promise() string {
	switch {
	case k.Loses:
		return "**by the fence only**; holders learn of it"
	case k.Thins:
		return "kept; a holder may learn that its lease is lost"
	}
	return "kept"
}

// total adds up all runs of a strategy at a place.
type total struct {
	strategy, what            string
	lasted                    time.Duration
	holds                     int
	faults                    int           // that take no locks away
	two, left, other          int           // broken promises
	rejoined                  time.Duration // the longest of all runs
	losses, overlaps, unaware int           // with faults that take locks away
}

func (t *total) add(r *result) {
	t.lasted += r.Lasted
	t.holds += r.Found.Holds
	t.rejoined = max(t.rejoined, r.Rejoined)
	if r.Losing {
		t.losses += r.Injected
		t.overlaps += r.Found.Overlaps
		t.unaware += r.Found.Unaware
	} else {
		t.faults += r.Injected
	}
	for _, v := range r.Violations {
		switch v.Promise {
		case "one at a time", "order", "slots":
			t.two++
		case "leftovers":
			t.left++
		default:
			t.other++
		}
	}
}

// totals returns a table of some runs, by strategy and place.
func totals(runs []*result, has func(*result) bool) [][]string {
	var all []*total
	for _, r := range runs {
		if !has(r) {
			continue
		}
		i := slices.IndexFunc(all, func(t *total) bool { return t.strategy == r.Strategy && t.what == r.What })
		if i < 0 {
			i = len(all)
			all = append(all, &total{strategy: r.Strategy, what: r.What})
		}
		all[i].add(r)
	}
	slices.SortStableFunc(all, func(a, b *total) int { return inOrder(a.strategy, b.strategy) })

	rows := [][]string{{"strategy", "on", "minutes", "faults", "holds", "two at once", "left behind", "other broken promises", "with loss: faults", "two at once, separated by the fence", "holders that learned of it", "ms from the last fault until every client had a key"}}
	for _, t := range all {
		row := texts(t.strategy, t.what, fmt.Sprintf("%.0f", t.lasted.Minutes()), t.faults, t.holds, t.two, t.left, t.other)
		if t.losses == 0 {
			row = append(row, "–", "–", "–")
		} else {
			row = append(row, texts(t.losses, t.overlaps, fmt.Sprintf("%d of %d", t.overlaps-t.unaware, t.overlaps))...)
		}
		rows = append(rows, append(row, millis(t.rejoined)))
	}
	return rows
}

func texts(all ...any) []string {
	s := make([]string, len(all))
	for i, v := range all {
		s[i] = fmt.Sprint(v)
	}
	return s
}

// table prints rows as an aligned Markdown table.
func table(out io.Writer, rows [][]string) {
	widths := make([]int, len(rows[0]))
	for _, r := range rows {
		for i, c := range r {
			widths[i] = max(widths[i], utf8.RuneCountInString(c))
		}
	}
	for i, r := range rows {
		for j, c := range r {
			pad := strings.Repeat(" ", widths[j]-utf8.RuneCountInString(c))
			if j > 0 {
				c, pad = pad+c, ""
			}
			fmt.Fprint(out, "| ", c, pad, " ")
		}
		fmt.Fprintln(out, "|")
		if i == 0 {
			for j, w := range widths {
				align := "-"
				if j > 0 {
					align = ":"
				}
				fmt.Fprint(out, "|", strings.Repeat("-", w+1), align)
			}
			fmt.Fprintln(out, "|")
		}
	}
}
