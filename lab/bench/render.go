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

// render puts the figures of a run into the documentation: the picture, and the parts of
// pages between <!-- bench: NAME --> and <!-- /bench -->.
func render(path, root string) error {
	r, err := readResults(path)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(root, "docs", "fast.svg"), r.picture(), 0o644); err != nil {
		return err
	}
	for _, page := range []string{"README.md", "docs/performance.md"} {
		name := filepath.Join(root, page)
		old, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		text, err := r.fill(old)
		if err != nil {
			return fmt.Errorf("%s: %w", page, err)
		}
		if err := os.WriteFile(name, text, 0o644); err != nil {
			return err
		}
	}
	return nil
}

var part = regexp.MustCompile(`(?s)<!-- bench: ([a-z0-9-]+) -->\n.*?<!-- /bench -->`)

// fill returns a page with its parts filled, as render says.
func (r *results) fill(page []byte) (filled []byte, err error) {
	p := planOf(r.Quick)
	parts := map[string]func() string{
		"run":           r.run,
		"ratios":        r.ratios,
		"free":          func() string { return r.free(1) },
		"free-five":     func() string { return r.free(5) },
		"contended64":   func() string { return r.crowded(queue(64)) },
		"contended512":  func() string { return r.crowded(queue(512)) },
		"held":          func() string { return r.crowded(queueOf1ms) },
		"held-three":    func() string { return r.crowded(p.held(3)...) },
		"held-rate":     func() string { return r.bySetting(p, "acquisitions_per_s") },
		"held-busy":     func() string { return r.bySetting(p, "held_percent") },
		"held-jain":     func() string { return r.bySetting(p, "jain_callers") },
		"held-starved":  func() string { return r.bySetting(p, "starved") },
		"held-longest":  func() string { return r.bySetting(p, "longest_wait_ms") },
		"held-commands": func() string { return r.bySetting(p, "commands_per_lock") },
		"leases":        func() string { return r.kept(p) },
	}
	filled = part.ReplaceAllFunc(page, func(old []byte) []byte {
		name := string(part.FindSubmatch(old)[1])
		write, ok := parts[name]
		if !ok {
			err = fmt.Errorf("unknown part %q", name)
			return old
		}
		return fmt.Appendf(nil, "<!-- bench: %s -->\n%s<!-- /bench -->", name, write())
	})
	return filled, err
}

// run describes the run.
func (r *results) run() string {
	text := fmt.Sprintf("%s, Redis %s, clients and servers on one machine; %s, %.0f minutes; medians of %s in which all contestants take turns. A held key is measured in one of them, for longer.\n",
		r.Machine, r.Redis, r.Began.UTC().Format(time.DateOnly), r.Took.Minutes(), count(planOf(r.Quick).rounds, "round", "rounds"))
	if len(r.Skipped) > 0 {
		text += "Not measured for lack of time: " + strings.Join(r.Skipped, "; ") + ".\n"
	}
	return text
}

// row is a row of a table: one contestant in one section.
type row struct {
	name string // in the first column
	section
	contestant string
}

// column is a column of a table.
type column struct {
	title string
	text  func(row) string
}

// table returns a table without the rows that have no figures.
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

// plain is a column of one metric, in the section of the row.
func (r *results) plain(title, metric string) column {
	return column{title, func(x row) string { return number(r.median(x.cell(x.contestant), metric)) }}
}

// of is a column of one metric, in another section.
func (r *results) of(title, metric string, in section) column {
	return column{title, func(x row) string { return number(r.median(in.cell(x.contestant), metric)) }}
}

// ratio is a column of the ratio of one metric to the bare contestant, in
// another section.
func (r *results) ratio(title, metric string, in section) column {
	return column{title, func(x row) string { return times(r.ofBare(in, x.contestant, metric)) }}
}

// both is a column of one metric and its ratio to the bare contestant, in
// another section.
func (r *results) both(title, metric string, in section) column {
	return column{title, func(x row) string {
		return fmt.Sprintf("%s (%s)", number(r.median(in.cell(x.contestant), metric)), times(r.ofBare(in, x.contestant, metric)))
	}}
}

// ofBare returns the ratio of a metric to that of the bare contestant, or NaN.
func (r *results) ofBare(s section, name, metric string) float64 {
	base := "bare"
	switch {
	case s.scenario == contended, s.scenario == fair:
		base = ringName
	case r.contestant(name).nodes == 5:
		base = "bare-quorum"
	}
	return r.median(s.cell(name), metric) / r.median(s.cell(base), metric)
}

func (r *results) contestant(name string) contestant {
	for _, c := range r.contestants {
		if c.name == name {
			return c
		}
	}
	return contestant{name: name, group: bare}
}

func times(ratio float64) string {
	if math.IsNaN(ratio) {
		return "–"
	}
	return number(ratio) + "×"
}

// number returns three significant digits, or all digits of a large integer.
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

func callers(n int) section { return section{uncontended, distinct{goroutines: n}.String()} }
func queue(n int) section   { return section{contended, contest{waiters: n, processes: 4}.String()} }

// queueOf1ms is the setting of a held key that the front page shows.
var queueOf1ms = section{fair, contest{waiters: 64, processes: 4, hold: time.Millisecond}.String()}

// held returns the settings of a held key for contestants on that many nodes.
func (p plan) held(nodes int) (all []section) {
	for _, c := range p.fair {
		if c.nodes == nodes {
			all = append(all, section{fair, c.String()})
		}
	}
	return all
}

// rows returns a row for each contestant on that many nodes. etcd counts as one node; nodes 0
// selects all.
func (r *results) rows(s section, nodes int) (rows []row) {
	for _, c := range r.contestants {
		if nodes == 0 || (nodes == 5) == (c.nodes == 5) {
			rows = append(rows, row{c.name, s, c.name})
		}
	}
	if s.scenario == contended || s.scenario == fair {
		rows = append(rows, row{ringName, s, ringName})
	}
	return rows
}

// shown are the contestants on one node that the front page shows.
var shown = []string{"hasp-spinlock", "hasp-pubsublock", "hasp-fairlock", "redislock", "redsync", "rueidislock", "etcd"}

// ratios is the table of the front page.
func (r *results) ratios() string {
	var rows []row
	for _, name := range shown {
		rows = append(rows, row{name, queue(64), name})
	}
	for _, name := range []string{"hasp-redlock", "redsync-5"} {
		rows = append(rows, row{name + ", five nodes", queue(64), name})
	}
	return r.table(rows,
		r.ratio("a free key, 1 goroutine", "pairs_per_s", callers(1)),
		r.ratio("64", "pairs_per_s", callers(64)),
		r.ratio("1,024", "pairs_per_s", callers(1024)),
		r.ratio("one key, hold 0: acquisitions", "acquisitions_per_s", queue(64)),
		r.of("commands each", "commands_per_lock", queue(64)),
		r.of("longest wait, ms", "longest_wait_ms", queue(64)),
		r.ratio("hold 1 ms: acquisitions", "acquisitions_per_s", queueOf1ms),
		r.of("commands each", "commands_per_lock", queueOf1ms),
		r.of("longest wait, ms", "longest_wait_ms", queueOf1ms),
		r.of("Jain's index", "jain_callers", queueOf1ms),
	)
}

func (r *results) free(nodes int) string {
	return r.table(r.rows(callers(64), nodes),
		r.both("1 goroutine", "pairs_per_s", callers(1)),
		r.both("64", "pairs_per_s", callers(64)),
		r.both("256", "pairs_per_s", callers(256)),
		r.both("1,024", "pairs_per_s", callers(1024)),
		r.plain("commands", "commands_per_pair"), r.plain("bytes", "bytes_per_pair"), r.plain("allocations", "allocs_per_pair"),
		r.plain("client CPU µs", "client_us_per_pair"), r.plain("server CPU µs", "server_us_per_pair"),
	)
}

// crowded is a table of contested keys. Several settings are parts of the rows'
// names.
func (r *results) crowded(settings ...section) string {
	var rows []row
	for _, s := range settings {
		for _, x := range r.rows(s, 0) {
			if len(settings) > 1 {
				x.name += ", " + s.setting
			}
			rows = append(rows, x)
		}
	}
	return r.table(rows,
		r.plain("acquisitions/s", "acquisitions_per_s"), r.plain("key held %", "held_percent"),
		r.plain("changes of holder/s", "holders_per_s"), r.plain("changes of process/s", "changes_per_s"), r.plain("between processes, p50 µs", "between_p50_us"),
		r.plain("commands", "commands_per_lock"), r.plain("longest wait ms", "longest_wait_ms"),
		r.plain("Jain, callers", "jain_callers"), r.plain("Jain, processes", "jain_processes"), r.plain("starved", "starved"),
	)
}

// bySetting is a table of one metric. Each row is a setting of a held key, and
// each column a contestant.
func (r *results) bySetting(p plan, metric string) string {
	var rows []row
	var columns []column
	for _, s := range p.held(1) {
		_, name, _ := strings.Cut(s.setting, ", ") // without the number of waiters, which is always the same
		rows = append(rows, row{name, s, ringName})
	}
	for _, x := range r.rows(queueOf1ms, 1) {
		if c := r.contestant(x.name); c.fair && c.nodes == 1 || x.name == ringName {
			columns = append(columns, column{x.name, func(y row) string { return number(r.median(y.cell(x.name), metric)) }})
		}
	}
	return r.table(rows, columns...)
}

// kept has each contestant with its largest number of leases, without leases,
// and with an unreachable node.
func (r *results) kept(p plan) string {
	var rows []row
	for _, c := range slices.Backward(p.crowds) {
		s := section{leases, c.String()}
		for _, x := range r.rows(s, 0) {
			had := slices.ContainsFunc(rows, func(y row) bool { return y.contestant == x.contestant })
			if r.Values[s.cell(x.contestant)] != nil && (!had || c.unreachable || c.leases == 0) {
				x.name += ", " + c.String()
				rows = append(rows, x)
			}
		}
	}
	return r.table(rows,
		r.plain("renewals/s", "renewals_per_s"), r.plain("client, % of a core", "client_core_percent"), r.plain("for the leases", "client_keeping_percent"),
		r.plain("server, % of a core", "server_core_percent"), r.plain("for the leases", "server_keeping_percent"), r.plain("goroutines", "goroutines"),
		r.plain("client bytes/lease", "client_bytes_per_lease"), r.plain("lost", "lost"), r.plain("lone pair p50 µs", "p50_us"), r.plain("p99 µs", "p99_us"),
		r.plain("its Lock p99 µs", "lock_p99_us"),
	)
}
