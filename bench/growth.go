package main

import (
	"fmt"
	"io"
	"math"
	"slices"
)

// growth is a row of settings that differ in size only.
type growth struct {
	title    string
	unit     string
	settings []point
}

func (p plan) growths() []growth {
	keys := growth{title: "keys, eight for each goroutine", unit: "goroutines"}
	for _, d := range p.distinct {
		keys.settings = append(keys.settings, point{section{uncontended, d.String()}, float64(d.goroutines)})
	}
	all := []growth{keys}
	for _, c := range p.contests {
		title := fmt.Sprintf("waiters of one key, %s, hold %v", count(c.processes, "process", "processes"), c.hold)
		i := slices.IndexFunc(all, func(g growth) bool { return g.title == title })
		if i < 0 {
			i, all = len(all), append(all, growth{title: title, unit: "waiters"})
		}
		all[i].settings = append(all[i].settings, point{section{contended, c.String()}, float64(c.waiters)})
	}
	held := growth{title: "leases held", unit: "leases"}
	for _, c := range p.crowds {
		if !c.five && !c.unreachable {
			held.settings = append(held.settings, point{section{leases, c.String()}, float64(c.leases)})
		}
	}
	return append(all, held)
}

// writeGrowth shows what a lock costs over keys, waiters and leases.
func (r *results) writeGrowth(out io.Writer, p plan) {
	fmt.Fprintln(out, "\n## growth\n\nThe same figures over the number of keys, of waiters, and of leases held. The last column is the largest to the smallest setting.")
	for _, g := range p.growths() {
		if len(g.settings) < 2 {
			continue
		}
		for _, m := range metrics[g.settings[0].scenario] {
			if m.grows {
				r.writeOver(out, g, m)
			}
		}
	}
}

func (r *results) writeOver(out io.Writer, g growth, m metric) {
	head := []string{g.unit}
	for _, s := range g.settings {
		head = append(head, number(s.x))
	}
	var lines [][]string
	for _, name := range r.names() {
		line, first, last, n := []string{name}, math.NaN(), math.NaN(), 0
		for _, s := range g.settings {
			f, ok := r.figure(cell{s.scenario, s.setting, name}, m.name)
			line = append(line, f.text(ok, false))
			switch {
			case !ok:
				continue
			case n == 0:
				first = f.Median
			}
			last = f.Median
			n++
		}
		ratio := last / first
		if first <= 0 || last < 0 || math.IsInf(ratio, 0) {
			ratio = math.NaN()
		}
		if n > 1 {
			lines = append(lines, append(line, times(ratio)))
		}
	}
	if lines == nil {
		return
	}
	fmt.Fprintf(out, "\n### %s over %s\n\n", m.title, g.title)
	writeRow(out, append(head, ""))
	writeRule(out, len(head)+1)
	for _, line := range lines {
		writeRow(out, line)
	}
}
