package main

import (
	"bytes"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

// render puts the figures of a run into the documentation: a picture, and
// what stands in pages between <!-- bench: NAME --> and <!-- /bench -->.
func render(path, root string) error {
	r, p, err := readJSON(path)
	if err != nil {
		return err
	}
	if err := r.headline(p, filepath.Join(root, "docs", "fast.svg")); err != nil {
		return err
	}
	for _, page := range []string{"README.md", "docs/performance.md"} {
		name := filepath.Join(root, page)
		old, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		text, err := r.fill(old, p)
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

// parts are what a page may ask for.
var parts = map[string]func(*results, plan) string{
	"run":          (*results).run,
	"ratios":       func(r *results, _ plan) string { return r.ratios() },
	"behind-list":  (*results).behindList,
	"free":         func(r *results, _ plan) string { return r.free(1) },
	"free-five":    func(r *results, _ plan) string { return r.free(5) },
	"contended64":  func(r *results, _ plan) string { return r.crowded(64) },
	"contended512": func(r *results, _ plan) string { return r.crowded(512) },
	"leases":       (*results).kept,
	"masters":      (*results).degraded,
}

func (r *results) fill(page []byte, p plan) (filled []byte, err error) {
	filled = part.ReplaceAllFunc(page, func(old []byte) []byte {
		name := string(part.FindSubmatch(old)[1])
		write, ok := parts[name]
		if !ok {
			err = fmt.Errorf("no such part: %s", name)
			return old
		}
		return fmt.Appendf(nil, "<!-- bench: %s -->\n%s<!-- /bench -->", name, write(r, p))
	})
	return filled, err
}

// run says what the figures are of.
func (r *results) run(p plan) string {
	text := fmt.Sprintf("%s, Redis %s, clients and servers on one machine; %s; medians of %s in which all contestants take turns.\n",
		r.Machine, r.Redis, r.Began.UTC().Format(time.DateOnly), count(p.rounds, "round", "rounds"))
	if len(r.Skipped) > 0 {
		text += "Not measured for want of time: " + strings.Join(r.Skipped, "; ") + ".\n"
	}
	return text
}

// column is one of a table whose rows are contestants in settings.
type column struct {
	title string
	text  func(cell) string
}

// table leaves out rows that have no figures.
func (r *results) table(first string, rows []row, columns []column) string {
	var out bytes.Buffer
	head := []string{first}
	for _, c := range columns {
		head = append(head, c.title)
	}
	writeRow(&out, head)
	writeRule(&out, len(head))
	for _, x := range rows {
		if r.values[x.cell] == nil {
			continue
		}
		line := []string{x.name}
		for _, c := range columns {
			line = append(line, c.text(x.cell))
		}
		writeRow(&out, line)
	}
	return out.String()
}

type row struct {
	name string
	cell
}

// plain is a column of one metric, in its own setting or in another one.
func (r *results) plain(title, metric string, in ...section) column {
	return column{title, func(k cell) string {
		f, ok := r.figure(moved(k, in), metric)
		return f.text(ok, false)
	}}
}

// both is a figure with its ratio to what is bare.
func (r *results) both(title, metric string, in section) column {
	return column{title, func(k cell) string {
		k = moved(k, []section{in})
		f, ok := r.figure(k, metric)
		return fmt.Sprintf("%s (%s)", f.text(ok, false), times(r.ofBare(k, metric)))
	}}
}

// ratio is only that.
func (r *results) ratio(title, metric string, in section) column {
	return column{title, func(k cell) string { return times(r.ofBare(moved(k, []section{in}), metric)) }}
}

func moved(k cell, in []section) cell {
	for _, s := range in {
		k.scenario, k.setting = s.scenario, s.setting
	}
	return k
}

func callers(n int) section { return section{uncontended, distinct{goroutines: n}.String()} }
func queue(n int) section   { return section{contended, contest{waiters: n, processes: 4}.String()} }

// everybody is a row of each contestant on as many nodes, 1 standing for an
// etcd, too, and 0 for any.
func (r *results) everybody(s section, nodes int) (rows []row) {
	for _, c := range r.contestants {
		if nodes == 0 || (nodes == 5) == (c.nodes == 5) {
			rows = append(rows, row{c.name, cell{s.scenario, s.setting, c.name}})
		}
	}
	if s.scenario == contended {
		rows = append(rows, row{ringName, cell{s.scenario, s.setting, ringName}})
	}
	return rows
}

// Those that the front page shows.
var shown = []string{"hasp-spinlock", "hasp-pubsublock", "hasp-fairlock", "redislock", "redsync", "rueidislock", "etcd"}

// ratios is the table of the front page.
func (r *results) ratios() string {
	var rows []row
	for _, name := range append(slices.Clone(shown), "hasp-redlock", "redsync-5") {
		label := name
		if r.contestant(name).nodes == 5 {
			label += ", five nodes"
		}
		rows = append(rows, row{label, cell{uncontended, callers(64).setting, name}})
	}
	return r.table("", rows, []column{
		r.ratio("a free key, 1 goroutine", "pairs_per_s", callers(1)),
		r.ratio("64", "pairs_per_s", callers(64)),
		r.ratio("1,024", "pairs_per_s", callers(1024)),
		r.ratio("one key, 64 waiters: acquisitions", "acquisitions_per_s", queue(64)),
		r.ratio("changes of holder", "holders_per_s", queue(64)),
		r.plain("commands each", "commands_per_lock", queue(64)),
		r.plain("longest wait, ms", "longest_wait_ms", queue(64)),
	})
}

// behind are the headline figures in which a peer is ahead: pairs, what they
// allocate, one key over four processes, leases, and five masters.
func (r *results) behind(p plan) (all []string) {
	headline := func(d duel) bool {
		switch d.metric.name {
		case "pairs_per_s", "client_keeping_percent", "lock_p50_ms":
			return true
		case "allocs_per_pair":
			return d.section == callers(64)
		case "acquisitions_per_s", "holders_per_s", "longest_wait_ms":
			return d.section == queue(64) || d.section == queue(512)
		}
		return false
	}
	var duels []duel
	for _, d := range r.duels(p) {
		if headline(d) && d.behind() {
			duels = append(duels, d)
		}
	}
	for len(duels) > 0 {
		first := duels[0]
		var settings, names []string
		least, most := math.Inf(1), 0.0
		duels = slices.DeleteFunc(duels, func(d duel) bool {
			if d.scenario != first.scenario || d.metric != first.metric || d.five != first.five {
				return false
			}
			settings = append(settings, d.setting)
			if !slices.Contains(names, d.best) {
				names = append(names, d.best)
			}
			least, most = min(least, 1/d.ratio()), max(most, 1/d.ratio())
			return true
		})
		by := times(most)
		if times(least) != by {
			by = times(least) + " to " + by
		}
		all = append(all, fmt.Sprintf("%s, %s (%s, %s)", first.title, several(settings), strings.Join(names, " or "), by))
	}
	return all
}

// several are settings with the unit of the last one.
func several(settings []string) string {
	last := settings[len(settings)-1]
	_, unit, _ := strings.Cut(last, " ")
	for i := range settings[:len(settings)-1] {
		settings[i] = strings.TrimSuffix(settings[i], " "+unit)
	}
	return strings.Join(settings, ", ")
}

func (r *results) behindList(p plan) string {
	return "- " + strings.Join(append(r.behind(p), "nothing else of these"), "\n- ") + "\n"
}

func (r *results) free(nodes int) string {
	micros := func(title, metric string) column {
		return column{title, func(k cell) string {
			f, ok := r.figure(k, metric)
			f.Median *= 10 // seconds for 100,000
			return f.text(ok, false)
		}}
	}
	return r.table("", r.everybody(callers(64), nodes), []column{
		r.both("1 goroutine", "pairs_per_s", callers(1)),
		r.both("64", "pairs_per_s", callers(64)),
		r.both("256", "pairs_per_s", callers(256)),
		r.both("1,024", "pairs_per_s", callers(1024)),
		r.plain("commands", "commands_per_pair"), r.plain("bytes", "bytes_per_pair"), r.plain("allocations", "allocs_per_pair"),
		micros("client CPU µs", "client_cpu_s_per_100k"), micros("server CPU µs", "server_cpu_s_per_100k"),
	})
}

func (r *results) crowded(waiters int) string {
	return r.table("", r.everybody(queue(waiters), 0), []column{
		r.plain("acquisitions/s", "acquisitions_per_s"), r.plain("changes of holder/s", "holders_per_s"), r.plain("changes of process/s", "changes_per_s"),
		r.both("between processes, p50 µs", "between_p50_us", queue(waiters)), r.plain("commands", "commands_per_lock"), r.plain("longest wait ms", "longest_wait_ms"),
		{"shares", func(k cell) string {
			least, ok := r.figure(k, "share_least")
			most, _ := r.figure(k, "share_most")
			return least.text(ok, false) + "…" + most.text(ok, false)
		}},
	})
}

// kept has each contestant with the most leases that it was asked for, and
// with none.
func (r *results) kept(p plan) string {
	var rows []row
	for _, c := range slices.Backward(p.crowds) {
		for _, x := range r.everybody(section{leases, c.String()}, 0) {
			had := slices.ContainsFunc(rows, func(y row) bool { return y.contestant == x.contestant })
			if r.values[x.cell] != nil && (!had || c.unreachable || c.leases == 0) {
				rows = append(rows, row{x.name + ", " + c.String(), x.cell})
			}
		}
	}
	return r.table("", rows, []column{
		r.plain("renewals/s", "renewals_per_s"), r.plain("client, % of a core", "client_core_percent"), r.plain("for the leases", "client_keeping_percent"),
		r.plain("server, % of a core", "server_core_percent"), r.plain("for the leases", "server_keeping_percent"), r.plain("goroutines", "goroutines"),
		r.plain("client bytes/lease", "client_bytes_per_lease"), r.plain("lost", "lost"), r.plain("lone pair p50 µs", "p50_us"), r.plain("p99 µs", "p99_us"),
		r.plain("its Lock p99 µs", "lock_p99_us"),
	})
}

func (r *results) degraded(p plan) string {
	return r.table("", r.everybody(section{masters, p.degraded.String()}, 5), []column{
		r.plain("lock p50 ms", "lock_p50_ms"), r.plain("p99 ms", "lock_p99_ms"), r.plain("unlock p50 ms", "unlock_p50_ms"), r.plain("p99 ms", "unlock_p99_ms"),
		r.plain("keys left behind, per 100 pairs", "orphans_per_100"),
	})
}

// headline is the picture of the front page.
func (r *results) headline(p plan, path string) error {
	const wide, high, left = 1000, 360, 560
	s := newSVG(wide, high)
	lines := r.lines(p.pictures()[0], append([]string{"bare"}, shown[:6]...))
	if len(lines) > 0 {
		if err := s.chart(0, left, "Lock and Unlock, a key of one's own", "goroutines", "pairs/s", lines); err != nil {
			return err
		}
	}
	var all []stack
	for _, name := range append(slices.Clone(shown), ringName) {
		k := cell{contended, queue(64).setting, name}
		whole, ok := r.figure(k, "acquisitions_per_s")
		changes, _ := r.figure(k, "holders_per_s")
		if ok {
			all = append(all, stack{name, shade(r.contestant(name).group, r.place(name)), whole.Median, changes.Median})
		}
	}
	if len(all) == 0 {
		return s.write(path)
	}
	if err := s.bars(left, wide, "One key, 64 waiters, 4 processes", "acquisitions/s (full colour: by another caller)", all); err != nil {
		return err
	}
	return s.write(path)
}
