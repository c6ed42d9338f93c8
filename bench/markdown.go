package main

import (
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
)

// writeMarkdown writes all tables.
func (r *results) writeMarkdown(out io.Writer, p plan) {
	fmt.Fprintf(out, "# hasp beside its peers\n\n%s; Redis %s; medians of %s, with least and most; begun %s by `%s`.\n",
		r.Machine, r.Redis, count(p.rounds, "round", "rounds"), r.Began.UTC().Format("2006-01-02 15:04 MST"), r.Command)
	fmt.Fprintln(out, "Compare figures of one run with one another, and not with those of another machine or moment.")
	if len(r.Skipped) > 0 {
		fmt.Fprintf(out, "\nLeft out for want of time: %s.\n", strings.Join(r.Skipped, "; "))
	}
	r.writeSummary(out, p)
	title := ""
	for _, s := range p.sections() {
		rows := r.rows(s)
		if len(rows) == 0 {
			continue
		}
		if s.scenario != title {
			title = s.scenario
			fmt.Fprintf(out, "\n## %s\n\n%s\n", title, abouts[title])
		}
		r.writeTable(out, s, rows)
	}
	r.writeGrowth(out, p)
	r.writeContestants(out)
}

func (r *results) writeTable(out io.Writer, s section, rows []string) {
	columns := metrics[s.scenario]
	head := []string{"contestant"}
	for _, m := range columns {
		head = append(head, m.title)
		if m.ofBare {
			head = append(head, "of bare")
		}
	}
	fmt.Fprintf(out, "\n### %s: %s\n\n", s.scenario, s.setting)
	writeRow(out, head)
	writeRule(out, len(head))
	for _, name := range rows {
		k := cell{s.scenario, s.setting, name}
		if note := r.notes[k]; note != "" && r.values[k] == nil {
			writeRow(out, append([]string{name, note}, make([]string, len(head)-2)...))
			continue
		}
		line := []string{name}
		for _, m := range columns {
			f, ok := r.figure(k, m.name)
			line = append(line, f.text(ok, m.spread))
			if m.ofBare {
				line = append(line, times(r.ofBare(k, m.name)))
			}
		}
		writeRow(out, line)
	}
}

// ofBare is the ratio to what is bare, and NaN if that was not measured.
func (r *results) ofBare(k cell, metric string) float64 {
	base := k
	switch {
	case k.scenario == contended:
		base.contestant = ringName
	case r.contestant(k.contestant).nodes == 5:
		base.contestant = "bare-quorum"
	default:
		base.contestant = "bare"
	}
	f, ok1 := r.figure(k, metric)
	b, ok2 := r.figure(base, metric)
	if !ok1 || !ok2 || b.Median == 0 {
		return math.NaN()
	}
	return f.Median / b.Median
}

func times(ratio float64) string {
	if math.IsNaN(ratio) {
		return "–"
	}
	return number(ratio) + "×"
}

func (r *results) contestant(name string) contestant {
	for _, c := range r.contestants {
		if c.name == name {
			return c
		}
	}
	return contestant{name: name, group: limit}
}

func (f figure) text(ok, spread bool) string {
	switch {
	case !ok:
		return "–"
	case spread && f.Samples > 1:
		return fmt.Sprintf("%s (%s…%s)", number(f.Median), number(f.Min), number(f.Max))
	}
	return number(f.Median)
}

// number is three digits that count, or all of a large whole.
func number(f float64) string {
	switch a := math.Abs(f); {
	case math.IsInf(f, 0):
		return "∞"
	case a >= 100 || f == math.Trunc(f):
		return thousands(strconv.FormatFloat(math.Round(f), 'f', 0, 64))
	case a >= 10:
		return strconv.FormatFloat(f, 'f', 1, 64)
	default:
		return strconv.FormatFloat(f, 'f', 2, 64)
	}
}

func thousands(digits string) string {
	if len(digits) <= 3 || digits[0] == '-' {
		return digits
	}
	return thousands(digits[:len(digits)-3]) + "," + digits[len(digits)-3:]
}

func writeRow(out io.Writer, cells []string) {
	fmt.Fprintln(out, "| "+strings.Join(cells, " | ")+" |")
}

// writeRule is what follows the head of a table whose first column is names.
func writeRule(out io.Writer, columns int) {
	fmt.Fprintln(out, "| --- "+strings.Repeat("| --: ", columns-1)+"|")
}

func (r *results) writeContestants(out io.Writer) {
	fmt.Fprint(out, "\n## contestants\n\nTerms are 30 s, but where a table says another.\n\n")
	writeRow(out, []string{"contestant", "module", "version", "set"})
	writeRow(out, []string{"---", "---", "---", "---"})
	for _, c := range r.contestants {
		writeRow(out, []string{c.name, c.module, r.Versions[c.module], c.set})
	}
}
