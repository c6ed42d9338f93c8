package main

import (
	"bytes"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// pages are files with generated parts. A part is between <!-- bench: NAME --> and <!-- /bench -->.
var pages = []string{"README.md", "docs/performance.md"}

// fillPages puts the figures of a run into the generated parts of pages. It fails if a table has no
// figures. If write is false, fillPages only makes this check, and changes no file.
func (r *results) fillPages(root string, write bool) error {
	files := map[string][]byte{}
	for _, page := range pages {
		old, err := os.ReadFile(filepath.Join(root, page))
		if err != nil {
			return err
		}
		if files[page], err = r.fill(old); err != nil {
			return fmt.Errorf("%s: %w", page, err)
		}
	}

	if !write {
		return nil
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(root, name), text, 0o644); err != nil {
			return err
		}
	}

	return nil
}

// parts maps the name of each table of the pages and of results.md to the table.
func (r *results) parts() map[string]string {
	p := planOf(r.Quick)
	return map[string]string{
		"front":        r.front(p),
		"free":         r.free(p, 1, "bare"),
		"free-five":    r.free(p, 5, "bare-quorum"),
		"contended":    r.crowded(p.sections(contended)[0]),
		"apart":        r.crowded(p.sections(apart)[len(p.settings[apart])-1]),
		"by-waiters":   r.bySetting(p.sections(contended), "acquisitions/s"),
		"held":         r.crowded(p.held(1)[0]),
		"held-five":    r.crowded(p.held(5)[0]),
		"held-longest": r.bySetting(p.held(1), "longest wait ms"),
		"again":        r.repeated(p),
		"lockall":      r.atOnce(p),
		"leases":       r.kept(p),
	}
}

var part = regexp.MustCompile(`(?s)<!-- bench: ([a-z0-9-]+) -->\n.*?<!-- /bench -->`)

// fill returns a page with its parts filled. If no part describes the run, each table names its
// commit and date.
func (r *results) fill(page []byte) (filled []byte, err error) {
	parts := r.parts()
	described := bytes.Contains(page, []byte("<!-- bench: run -->"))
	filled = part.ReplaceAllFunc(page, func(old []byte) []byte {
		name := string(part.FindSubmatch(old)[1])
		text := r.run()
		if name != "run" {
			table, ok := parts[name]
			switch {
			case !ok:
				err = fmt.Errorf("unknown part %q", name)
			case !hasRows(table):
				err = fmt.Errorf("part %q has no figures", name)
			}
			text = table
			if !described {
				text += fmt.Sprintf("\nCommit %s, %s.\n", r.Commit, r.date())
			}
		}
		return fmt.Appendf(nil, "<!-- bench: %s -->\n%s<!-- /bench -->", name, text)
	})

	return filled, err
}

func (r *results) date() string { return r.Began.UTC().Format(time.DateOnly) }

// run returns a sentence that describes the run.
func (r *results) run() string {
	return fmt.Sprintf("Commit %s, %s, %.0f minutes; %s, Redis %s, clients and servers on one machine.\n", r.Commit, r.date(), r.Took.Minutes(), r.Machine, r.Redis)
}

// row is a row of a table: one contestant in one section.
type row struct {
	name string // in the first column
	section
	contestant string
}

// column is a column of a table, with the text of the column's cell in a row.
type column struct {
	title string
	text  func(row) string
}

// table returns a table in Markdown. It leaves out the rows that have no figures.
func (r *results) table(rows []row, columns []column) string {
	var out strings.Builder
	write := func(cells []string) { fmt.Fprintln(&out, "| "+strings.Join(cells, " | ")+" |") }
	head := []string{""}
	for _, c := range columns {
		head = append(head, c.title)
	}
	write(head)
	fmt.Fprintln(&out, "| --- "+strings.Repeat("| --: ", len(columns))+"|")
	for _, x := range rows {
		if r.Values[x.cell(x.contestant)] == nil {
			continue
		}
		line := []string{x.name}
		for _, c := range columns {
			line = append(line, c.text(x))
		}
		write(line)
	}

	return out.String()
}

// hasRows reports whether a table has more than its head.
func hasRows(table string) bool { return strings.Count(table, "\n") > 2 }

// metrics returns columns that show metrics in the row's section. The title of each column is the
// name of its metric.
func (r *results) metrics(names ...string) (all []column) {
	for _, name := range names {
		all = append(all, column{name, func(x row) string {
			return number(r.median(x.cell(x.contestant), name))
		}})
	}
	return all
}

// of returns a column that shows a metric in the given section.
func (r *results) of(title, metric string, in section) column {
	return column{title, func(x row) string {
		return number(r.median(in.cell(x.contestant), metric))
	}}
}

func times(ratio float64) string {
	if math.IsNaN(ratio) {
		return "–"
	}
	return number(ratio) + "×"
}

// number formats f. A fraction has two decimals below 10, one decimal below 100, and none above.
func number(f float64) string {
	digits := 2
	switch a := math.Abs(f); {
	case math.IsNaN(f):
		return "–"
	case math.IsInf(f, 0):
		return "∞"
	case a >= 100 || f == math.Trunc(f):
		digits = 0
	case a >= 10:
		digits = 1
	}

	text := strconv.FormatFloat(f, 'f', digits, 64)
	if digits == 0 {
		for i := len(text) - 3; i > 0 && text[i-1] != '-'; i -= 3 {
			text = text[:i] + "," + text[i:]
		}
	}

	return text
}

func callers(n int) section {
	return section{uncontended, distinct{goroutines: n, keys: keysEach}.String()}
}

// goroutines returns the title of a column of the scenario "uncontended". One goroutine may be
// pinned.
func (r *results) goroutines(s section) string {
	if s == callers(1) && r.Pinned {
		return s.setting + ", pinned"
	}
	return s.setting
}

// rows returns a row for each contestant on that many nodes, or for all contestants if nodes is 0.
// etcd counts as one node.
func (r *results) rows(s section, nodes int) (rows []row) {
	for _, c := range r.contestants {
		if nodes == 0 || (nodes == 5) == (c.nodes == 5) {
			rows = append(rows, row{c.name, s, c.name})
		}
	}
	return rows
}

// shown are the contestants that the front page shows.
var shown = []string{"hasp-spinlock", "rueidislock", "hasp-etcdlock", "etcd", "hasp-pglock",
	"postgres-advisory"}

// front returns the table of the front page.
func (r *results) front(p plan) string {
	busy := p.sections(apart)[0]
	var rows []row
	for _, name := range shown {
		rows = append(rows, row{name, busy, name})
	}
	shares := column{"smallest and largest share", func(x row) string {
		cell := x.cell(x.contestant)
		return times(r.median(cell, "smallest share")) + " to " +
			times(r.median(cell, "largest share"))
	}}

	return r.table(rows, []column{
		r.of("a free key, "+r.goroutines(callers(1))+": pairs/s", "pairs/s", callers(1)),
		r.of(r.goroutines(callers(64)), "pairs/s", callers(64)),
		r.of("one key, held for 1 ms each: acquisitions/s", "acquisitions/s", busy),
		r.of("longest wait ms", "longest wait ms", busy),
		shares,
	})
}

// free returns the table of the scenario "uncontended" for contestants on that many nodes. Each
// figure is compared to that of the contestant base.
func (r *results) free(p plan, nodes int, base string) string {
	var columns []column
	for _, s := range p.sections(uncontended) {
		columns = append(columns, column{r.goroutines(s), func(x row) string {
			own := r.median(s.cell(x.contestant), "pairs/s")
			return fmt.Sprintf("%s (%s)", number(own), times(own/r.median(s.cell(base), "pairs/s")))
		}})
	}

	return r.table(r.rows(callers(64), nodes), append(columns,
		r.metrics("commands", "bytes", "allocations", "client CPU µs", "server CPU µs")...))
}

// crowded returns the table of a section in which callers contend for one key.
func (r *results) crowded(s section) string {
	return r.table(r.rows(s, 0), r.metrics("acquisitions/s", "key held %", "changes of holder/s",
		"changes of process/s", "between processes, p50 µs", "commands", "longest wait ms",
		"Jain, callers", "Jain, processes", "starved"))
}

// bySetting returns a table of one metric, with a row for each setting. The columns are the
// contestants that have figures in the first setting.
func (r *results) bySetting(settings []section, metric string) string {
	var rows []row
	var columns []column
	for _, s := range settings {
		rows = append(rows, row{s.setting, s, ringName})
	}
	for _, x := range r.rows(settings[0], 0) {
		if r.Values[x.cell(x.name)] != nil {
			columns = append(columns, column{x.name, func(y row) string {
				return number(r.median(y.cell(x.name), metric))
			}})
		}
	}

	return r.table(rows, columns)
}

// kept returns the table of many leases.
func (r *results) kept(p plan) string {
	var rows []row
	for _, s := range slices.Backward(p.sections(leases)) {
		for _, x := range r.rows(s, 0) {
			x.name += ", " + s.setting
			rows = append(rows, x)
		}
	}

	return r.table(rows, r.metrics("renewals/s", "client, % of a core", "server, % of a core",
		"client bytes/lease", "lost", "lone pair p50 µs", "p99 µs"))
}
