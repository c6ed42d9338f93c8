package main

import (
	"fmt"
	"io"
	"math"
	"strings"
	"time"
)

// table is one of Markdown.
type table struct{ out io.Writer }

func newTable(out io.Writer, title string, columns ...any) *table {
	fmt.Fprintf(out, "\n### %s\n\n", title)
	t := &table{out}
	t.row(columns...)
	fmt.Fprintln(out, "|"+strings.Repeat("---|", len(columns)))
	return t
}

func (t *table) row(cells ...any) {
	texts := make([]string, len(cells))
	for i, c := range cells {
		texts[i] = fmt.Sprint(c)
		if f, ok := c.(float64); ok {
			texts[i] = decimal(f)
		}
	}
	fmt.Fprintln(t.out, "| "+strings.Join(texts, " | ")+" |")
}

func decimal(f float64) string {
	switch {
	case math.IsNaN(f), math.IsInf(f, 0):
		return "–"
	case f == math.Trunc(f):
		return fmt.Sprintf("%.0f", f)
	}
	return fmt.Sprintf("%.2f", f)
}

// percentile is that of sorted durations, by nearest rank, in microseconds.
func percentile(sorted []time.Duration, p int) float64 {
	if len(sorted) == 0 {
		return math.NaN()
	}
	return float64(sorted[(len(sorted)*p+99)/100-1].Microseconds())
}

// goals are what the figures should be, and were.
type goals struct{ list []goal }

type goal struct {
	what  string
	got   float64
	most  float64
	where string
}

// atMost notes a figure; of several for one goal, the worst stands.
func (g *goals) atMost(most, got float64, where, what string) {
	for i := range g.list {
		if o := &g.list[i]; o.what == what {
			if got > o.got {
				o.got, o.where = got, where
			}
			return
		}
	}
	g.list = append(g.list, goal{what, got, most, where})
}

func (g *goals) print(out io.Writer) {
	t := newTable(out, "Goals", "goal", "at most", "got", "at", "met")
	for _, o := range g.list {
		met := "yes"
		if !(o.got <= o.most) {
			met = "**no**"
		}
		t.row(o.what, o.most, o.got, o.where, met)
	}
}
