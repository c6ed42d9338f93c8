package main

import (
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// has reports whether there are figures of the scenario of growth, or of the others.
func (r *results) has(ofGrowth bool) bool {
	for c := range r.Values {
		if strings.HasPrefix(string(c), growth+"; ") == ofGrowth {
			return true
		}
	}
	return false
}

// growthRun describes the run that measured growth.
func (r *results) growthRun() string {
	return fmt.Sprintf("%s, Redis %s, clients and servers on one machine; %s, one round.\n%s",
		r.Machine, r.Redis, r.Began.UTC().Format(time.DateOnly), r.notMeasured())
}

// growing returns a row for each contestant and setting. label returns the words for
// a setting in the name of a row.
func (r *results) growing(settings []fmt.Stringer, label func(i int) string) (rows []row) {
	for _, c := range r.contestants {
		for i, s := range settings {
			rows = append(rows, row{c.name + ", " + label(i), section{growth, s.String()}, c.name})
		}
	}
	return rows
}

func (r *results) growthKeys(p plan) string {
	rows := r.growing(stringers(p.growth.keys), func(i int) string {
		k := p.growth.keys[i]
		return fmt.Sprintf("%s of %v", number(float64(k.leases)), k.term)
	})
	return r.table(rows,
		r.plain("lone pair p50 µs", "p50_us"), r.plain("p99 µs", "p99_us"), r.plain("client CPU µs", "client_us_per_pair"), r.plain("server CPU µs", "server_us_per_pair"),
		r.plain("taken/s", "taken_per_s"), r.plain("renewals/s", "renewals_per_s"), r.plain("client CPU µs/renewal", "client_us_per_renewal"), r.plain("server CPU µs/renewal", "server_us_per_renewal"),
		r.plain("p99 µs beside renewals", "renewing_p99_us"), r.plain("client bytes/lease", "client_bytes_per_lease"), r.plain("server bytes/lease", "server_bytes_per_lease"), r.plain("lost", "lost"),
	)
}

// growthContests is a table of callers of one key: those with a hold, one in each
// process, or those without.
func (r *results) growthContests(p plan, hold bool) string {
	all := p.queues(func(c contest) bool { return (c.hold > 0) == hold })
	rows := r.growing(stringers(all), func(i int) string {
		s := count(all[i].processes, "process", "processes")
		if !hold {
			s = number(float64(all[i].waiters)) + " in " + s
		}
		return s
	})
	columns := []column{
		r.plain("acquisitions/s", "acquisitions_per_s"), r.plain("commands", "commands_per_lock"),
		r.plain("client CPU µs", "client_us_per_lock"), r.plain("server CPU µs", "server_us_per_lock"), r.plain("longest wait ms", "longest_wait_ms"),
	}
	if hold {
		columns = append(columns, r.plain("key held %", "held_percent"), r.plain("Jain, processes", "jain_processes"))
	} else {
		columns = append(columns, r.plain("Jain, callers", "jain_callers"), r.plain("client bytes/waiter", "client_bytes_per_waiter"), r.plain("server bytes/waiter", "server_bytes_per_waiter"))
	}
	return r.table(rows, columns...)
}

func (r *results) growthNodes(p plan) string {
	rows := r.growing(stringers(p.growth.nodes), func(i int) string { return p.growth.nodes[i].String() })
	return r.table(rows,
		r.plain("lone pair p50 µs", "p50_us"), r.plain("p99 µs", "p99_us"), r.plain("commands", "commands_per_pair"),
		r.plain("client CPU µs", "client_us_per_pair"), r.plain("server CPU µs, all nodes", "server_us_per_pair"),
	)
}

func stringers[T fmt.Stringer](all []T) (s []fmt.Stringer) {
	for _, x := range all {
		s = append(s, x)
	}
	return s
}

// queues returns some of the contests for one key.
func (p plan) queues(include func(contest) bool) (some []contest) {
	for _, c := range p.growth.contests {
		if include(c) {
			some = append(some, c)
		}
	}
	return some
}

// growthPicture returns the picture of growth as SVG: the CPU time of clients and
// servers for one operation, in four diagrams with the same axis.
func (r *results) growthPicture(p plan) []byte {
	s := newSVG(1080)
	panel := func(dx, dy int, title, unit string, sizes []int, settings []fmt.Stringer, of string) {
		var curves []curve
		for _, c := range r.contestants {
			k := curve{name: c.name, color: colors[c.name], width: 3}
			for _, x := range settings {
				in := section{growth, x.String()}.cell(c.name)
				k.values = append(k.values, r.median(in, "client_us_per_"+of)+r.median(in, "server_us_per_"+of))
			}
			curves = append(curves, k)
		}
		fmt.Fprintf(s, "<g transform=\"translate(%d,%d)\">\n", dx, dy)
		s.diagram(title, unit, sizes, 1, 100_000, curves)
		fmt.Fprintln(s, "</g>")
	}

	var sizes []int
	for _, k := range p.growth.keys {
		sizes = append(sizes, k.leases)
	}
	panel(0, 0, "A pair of a lone caller, CPU µs", "leases held by its Client", sizes, stringers(p.growth.keys), "pair")
	contests := func(dx, dy int, title, unit string, include func(contest) bool) {
		all := p.queues(include)
		var sizes []int
		for _, c := range all {
			sizes = append(sizes, c.waiters)
		}
		panel(dx, dy, title, unit, sizes, stringers(all), "lock")
	}
	contests(540, 0, "One key, hold 0: an acquisition, CPU µs", "callers in one process", func(c contest) bool { return c.hold == 0 && c.processes == 1 })
	contests(0, 380, "One key, hold 1 ms: an acquisition, CPU µs", "processes with one caller each", func(c contest) bool { return c.hold > 0 })
	sizes = nil
	for _, n := range p.growth.nodes {
		sizes = append(sizes, int(n))
	}
	panel(540, 380, "redlock: a pair of a lone caller, CPU µs", "nodes", sizes, stringers(p.growth.nodes), "pair")
	return s.end()
}

// system is a column of the table of what systems bear. Its figures are on the page.
type system struct {
	name        string
	contestant  string
	servers     float64 // that each pair and each renewal goes to; the figures are their sums
	masters     float64 // among which the keys are spread
	pairs       string  // part with the figures of pairs
	part, lease string  // part and setting with the figures of leases
}

var systems = []system{
	{"one Redis, spinlock", "hasp-spinlock", 1, 1, "free", "growth-keys", "100,000 of 15s"},
	{"one Redis, fairlock", "hasp-fairlock", 1, 1, "free", "growth-keys", "100,000 of 15s"},
	{"a cluster of 10, spinlock", "hasp-spinlock", 1, 10, "free", "growth-keys", "100,000 of 15s"},
	{"redlock of five", "hasp-redlock", 5, 1, "free-five", "growth-keys", "10,000 of 12s"},
	{"etcd, one member", "etcd", 1, 1, "free", "leases", "10,000 leases of 3s"},
}

// scale is the table of what systems bear, by the figures of the page. It has three
// significant digits.
func scale(page []byte) string {
	var out strings.Builder
	line := func(cells []string) { fmt.Fprintln(&out, "| "+strings.Join(cells, " | ")+" |") }
	head := []string{""}
	for _, s := range systems {
		head = append(head, s.name)
	}
	line(head)
	fmt.Fprintln(&out, "| --- "+strings.Repeat("| --: ", len(systems))+"|")

	const gib = 1 << 30
	of := func(part, row, column string) float64 { return onPage(page, part, row, column) }
	var (
		pair    = func(s system) float64 { return of(s.pairs, s.contestant, "server CPU µs") / s.servers }
		client  = func(s system) float64 { return of(s.pairs, s.contestant, "client CPU µs") }
		rate    = func(s system) float64 { return s.masters * 1e6 / pair(s) }
		leases  = func(s system, column string) float64 { return of(s.part, s.contestant+", "+s.lease, column) }
		renewal = func(s system) float64 { return leases(s, "server CPU µs/renewal") / s.servers }
		record  = func(s system) float64 { return leases(s, "server bytes/lease") / s.servers }
		lease   = func(s system) float64 { return leases(s, "client bytes/lease") }
		waiters = func(s system, column string) float64 {
			return of("growth-waiters", s.contestant+", 10,000 in 1 process", column)
		}
		waiter = func(s system) float64 { return waiters(s, "client bytes/waiter") }
		entry  = func(s system) float64 { return waiters(s, "server bytes/waiter") }
		term   = func(seconds float64) func(system) float64 {
			return func(s system) float64 { return s.masters * 1e6 / renewal(s) * seconds / 3 }
		}
	)
	for _, x := range []struct {
		title string
		of    func(system) float64
	}{
		{"*a* server CPU µs per pair, on each server", pair},
		{"**pairs/s** with a core of each server: masters × 1,000,000 / *a*", rate},
		{"*b* client CPU µs per pair", client},
		{"client cores for that: pairs/s × *b* / 1,000,000", func(s system) float64 { return rate(s) * client(s) / 1e6 }},
		{"*c* server CPU µs per renewal, on each server", renewal},
		{"**leases of 30 s** that a core of each server renews: masters × 10 × 1,000,000 / *c*", term(30)},
		{"the same, of 10 minutes: × 20", term(600)},
		{"*d* bytes per lease, on each server", record},
		{"leases in a GiB of each server: masters × 2³⁰ / *d*", func(s system) float64 { return s.masters * gib / record(s) }},
		{"*e* bytes per lease, in the client", lease},
		{"leases in a GiB of a client: 2³⁰ / *e*", func(s system) float64 { return gib / lease(s) }},
		{"*f* bytes per waiter, in the client", waiter},
		{"**waiters** in a GiB of a client: 2³⁰ / *f*", func(s system) float64 { return gib / waiter(s) }},
		{"*g* bytes per waiter, on its server", entry},
		{"waiters in a GiB of the server: 2³⁰ / *g*", func(s system) float64 {
			if g := entry(s); g >= 1 {
				return gib / g
			}
			return math.NaN() // they take nothing there
		}},
		{"**one hot key**, hold 0, 64 callers: acquisitions/s", func(s system) float64 { return of("contended64", s.contestant, "acquisitions/s") }},
	} {
		cells := []string{x.title}
		for _, s := range systems {
			cells = append(cells, number(rounded(x.of(s))))
		}
		line(cells)
	}
	return out.String()
}

// rounded returns three significant digits of a large number.
func rounded(f float64) float64 {
	if !(f >= 1000) { // also if it is NaN
		return f
	}
	unit := math.Pow(10, math.Floor(math.Log10(f))-2)
	return math.Round(f/unit) * unit
}

// onPage returns a figure in a table between marks, or NaN.
func onPage(page []byte, name, row, column string) float64 {
	for _, m := range part.FindAllSubmatch(page, -1) {
		if string(m[1]) != name {
			continue
		}
		var head []string
		for line := range strings.Lines(string(m[0])) {
			cells := strings.Split(strings.Trim(line, "| \n"), " | ")
			if head == nil {
				if strings.HasPrefix(line, "| ") {
					head = strings.Split(strings.TrimSpace(line), " | ")
				}
				continue
			}
			if cells[0] != row {
				continue
			}
			for i, title := range head {
				if strings.TrimRight(title, " |") == column && i < len(cells) {
					figure := strings.ReplaceAll(leading.FindString(cells[i]), ",", "")
					if f, err := strconv.ParseFloat(figure, 64); err == nil {
						return f
					}
				}
			}
		}
	}
	return math.NaN()
}

// leading is the number at the beginning of a cell; a ratio may follow it.
var leading = regexp.MustCompile(`^-?[0-9.,]+`)
