package main

import (
	"fmt"
	"io"
	"math"
	"slices"
)

// duel is the best of hasp and the best of the peers in one setting, by one
// metric, on as many nodes.
type duel struct {
	section
	metric
	five       bool
	ours, best string
	mine, his  float64
}

// ratio is above one if hasp is ahead.
func (d duel) ratio() float64 {
	switch {
	case d.mine == d.his:
		return 1
	case d.lower:
		return d.his / d.mine
	}
	return d.mine / d.his
}

// behind leaves out what is the noise of a few rounds.
func (d duel) behind() bool { return d.ratio() < 0.95 }

func (r *results) duels(p plan) (all []duel) {
	for _, s := range p.sections() {
		for _, m := range metrics[s.scenario] {
			for _, five := range []bool{false, true} {
				d := duel{section: s, metric: m, five: five}
				d.ours, d.mine = r.best(s, m, five, ours)
				d.best, d.his = r.best(s, m, five, theirs)
				d.mine, d.his = max(d.mine, 0), max(d.his, 0) // a difference may be less, by noise
				if m.rival && d.ours != "" && d.best != "" {
					all = append(all, d)
				}
			}
		}
	}
	return all
}

// best is the contestant of a group whose median is the best.
func (r *results) best(s section, m metric, five bool, group string) (name string, value float64) {
	for _, c := range r.contestants {
		if c.group != group || (c.nodes == 5) != five {
			continue
		}
		f, ok := r.figure(cell{s.scenario, s.setting, c.name}, m.name)
		if ok && !math.IsInf(f.Median, 0) && (name == "" || (f.Median < value) == m.lower && f.Median != value) {
			name, value = c.name, f.Median
		}
	}
	return name, value
}

// writeSummary shows all duels, and apart those that hasp does not win.
func (r *results) writeSummary(out io.Writer, p plan) {
	duels := r.duels(p)
	if len(duels) == 0 {
		return
	}
	head := []string{"scenario", "setting", "metric", "best of hasp", "", "best peer", "", "hasp ahead by"}
	line := func(d duel) []string {
		ratio := number(d.ratio()) + "×"
		if d.behind() {
			ratio = "**" + ratio + "**"
		}
		return []string{d.scenario, d.setting, d.title, d.ours, number(d.mine), d.best, number(d.his), ratio}
	}
	rule := []string{"---", "---", "---", "---", "--:", "---", "--:", "--:"}
	lost := slices.DeleteFunc(slices.Clone(duels), func(d duel) bool { return !d.behind() })
	fmt.Fprintf(out, "\n## where hasp is not ahead\n\nOf %d comparisons with the best peer, %d:\n\n", len(duels), len(lost))
	writeRow(out, head)
	writeRow(out, rule)
	for _, d := range lost {
		writeRow(out, line(d))
	}
	fmt.Fprint(out, "\n## all comparisons with the best peer\n\nAbove 1× hasp is better, whether more or less of the metric is.\n\n")
	writeRow(out, head)
	writeRow(out, rule)
	for _, d := range duels {
		writeRow(out, line(d))
	}
}
