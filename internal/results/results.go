// Package results writes what was measured as Markdown, beside what it should be.
package results

import (
	"fmt"
	"io"
	"math"
	"strings"
	"time"
)

// Table is one of Markdown.
type Table struct{ out io.Writer }

// NewTable writes the head of a table.
func NewTable(out io.Writer, title string, columns ...any) *Table {
	fmt.Fprintf(out, "\n### %s\n\n", title)
	t := &Table{out}
	t.Row(columns...)
	fmt.Fprintln(out, "|"+strings.Repeat("---|", len(columns)))
	return t
}

// Row writes a row.
func (t *Table) Row(cells ...any) {
	texts := make([]string, len(cells))
	for i, c := range cells {
		texts[i] = fmt.Sprint(c)
		if f, ok := c.(float64); ok {
			texts[i] = Decimal(f)
		}
	}
	fmt.Fprintln(t.out, "| "+strings.Join(texts, " | ")+" |")
}

// Decimal is f with two places, or none if it is whole.
func Decimal(f float64) string {
	switch {
	case math.IsNaN(f), math.IsInf(f, 0):
		return "–"
	case f == math.Trunc(f):
		return fmt.Sprintf("%.0f", f)
	}
	return fmt.Sprintf("%.2f", f)
}

// Percentile is that of sorted durations, by nearest rank, in microseconds.
func Percentile(sorted []time.Duration, p int) float64 {
	if len(sorted) == 0 {
		return math.NaN()
	}
	return float64(sorted[(len(sorted)*p+99)/100-1].Microseconds())
}

// Goals are what the figures should be, and were.
type Goals struct{ list []goal }

type goal struct {
	what  string
	got   float64
	most  float64
	where string
}

// AtMost notes a figure; of several for one goal, the worst stands.
func (g *Goals) AtMost(most, got float64, where, what string) {
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

// Print writes them as a table.
func (g *Goals) Print(out io.Writer) {
	t := NewTable(out, "Goals", "goal", "at most", "got", "at", "met")
	for _, o := range g.list {
		met := "yes"
		if !(o.got <= o.most) {
			met = "**no**"
		}
		t.Row(o.what, o.most, o.got, o.where, met)
	}
}
