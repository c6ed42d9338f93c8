package main

import (
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
		"free":         r.free(p, 1),
		"free-five":    r.free(p, 5),
		"contended":    r.crowded(p.sections(contended)[0]),
		"by-waiters":   r.bySetting(p.sections(contended), "acquisitions_per_s"),
		"held":         r.crowded(p.held(1)[0]),
		"held-five":    r.crowded(p.held(5)[0]),
		"held-longest": r.bySetting(p.held(1), "longest_wait_ms"),
		"again":        r.repeated(p),
		"lockall":      r.atOnce(p),
		"leases":       r.kept(p),
	}
}

var part = regexp.MustCompile(`(?s)<!-- bench: ([a-z0-9-]+) -->\n.*?<!-- /bench -->`)

// fill returns a page with its parts filled. Each table names its commit and date.
func (r *results) fill(page []byte) (filled []byte, err error) {
	parts := r.parts()
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
			text = fmt.Sprintf("%s\nCommit %s, %s.\n", table, r.Commit, r.date())
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
func (r *results) table(rows []row, columns ...column) string {
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

// plain returns a column that shows a metric in the row's section.
func (r *results) plain(title, metric string) column {
	return column{title, func(x row) string {
		return number(r.median(x.cell(x.contestant), metric))
	}}
}

// of returns a column that shows a metric in the given section.
func (r *results) of(title, metric string, in section) column {
	return column{title, func(x row) string {
		return number(r.median(in.cell(x.contestant), metric))
	}}
}

// both returns a column that shows a metric in the given section, and the ratio to the same metric
// of a bare contestant.
func (r *results) both(title, metric string, in section) column {
	return column{title, func(x row) string {
		return fmt.Sprintf("%s (%s)", number(r.median(in.cell(x.contestant), metric)),
			times(r.ofBare(in, x.contestant, metric)))
	}}
}

// ofBare returns a contestant's metric divided by that of a bare contestant. It may be NaN.
func (r *results) ofBare(s section, name, metric string) float64 {
	base := "bare"
	switch {
	case s.scenario == contended, s.scenario == fair:
		base = ringName
	case slices.ContainsFunc(r.contestants,
		func(c contestant) bool { return c.name == name && c.nodes == 5 }):
		base = "bare-quorum"
	}

	return r.median(s.cell(name), metric) / r.median(s.cell(base), metric)
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
	busy := p.apart()
	var rows []row
	for _, name := range shown {
		rows = append(rows, row{name, busy, name})
	}
	shares := column{"smallest and largest share", func(x row) string {
		cell := x.cell(x.contestant)
		return times(r.median(cell, "smallest_share")) + " to " +
			times(r.median(cell, "largest_share"))
	}}

	return r.table(rows,
		r.of("a free key, "+r.goroutines(callers(1))+": pairs/s", "pairs_per_s", callers(1)),
		r.of(r.goroutines(callers(64)), "pairs_per_s", callers(64)),
		r.plain("one key, held for 1 ms each: acquisitions/s", "acquisitions_per_s"),
		r.plain("longest wait ms", "longest_wait_ms"),
		shares,
	)
}

func (r *results) free(p plan, nodes int) string {
	var columns []column
	for _, s := range p.sections(uncontended) {
		columns = append(columns, r.both(r.goroutines(s), "pairs_per_s", s))
	}
	return r.table(r.rows(callers(64), nodes), append(columns,
		r.plain("commands", "commands_per_pair"), r.plain("bytes", "bytes_per_pair"),
		r.plain("allocations", "allocs_per_pair"),
		r.plain("client CPU µs", "client_us_per_pair"),
		r.plain("server CPU µs", "server_us_per_pair"))...)
}

// crowded returns the table of a section in which callers contend for one key.
func (r *results) crowded(s section) string {
	return r.table(r.rows(s, 0),
		r.plain("acquisitions/s", "acquisitions_per_s"), r.plain("key held %", "held_percent"),
		r.plain("changes of holder/s", "holders_per_s"),
		r.plain("changes of process/s", "changes_per_s"),
		r.plain("between processes, p50 µs", "between_p50_us"),
		r.plain("commands", "commands_per_lock"), r.plain("longest wait ms", "longest_wait_ms"),
		r.plain("Jain, callers", "jain_callers"), r.plain("Jain, processes", "jain_processes"),
		r.plain("starved", "starved"),
	)
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
			columns = append(columns, column{x.name,
				func(y row) string { return number(r.median(y.cell(x.name), metric)) }})
		}
	}

	return r.table(rows, columns...)
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

	return r.table(rows,
		r.plain("renewals/s", "renewals_per_s"),
		r.plain("client, % of a core", "client_keeping_percent"),
		r.plain("server, % of a core", "server_keeping_percent"),
		r.plain("client bytes/lease", "client_bytes_per_lease"), r.plain("lost", "lost"),
		r.plain("lone pair p50 µs", "p50_us"), r.plain("p99 µs", "p99_us"),
	)
}
