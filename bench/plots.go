package main

import (
	"image/color"
	"math"
	"path/filepath"

	"gonum.org/v1/plot/plotter"
)

// picture is a metric over the size of a setting.
type picture struct {
	file, title, x, y string
	metric            string
	points            []point
}

// point is a setting.
type point struct {
	section
	x float64
}

func (p plan) pictures() []picture {
	var keys, held, instant, working []point
	for _, d := range p.distinct {
		keys = append(keys, point{section{uncontended, d.String()}, float64(d.goroutines)})
	}
	for _, c := range p.contests {
		at := point{section{contended, c.String()}, float64(c.waiters)}
		switch {
		case c.processes == 1:
		case c.hold == 0:
			instant = append(instant, at)
		default:
			working = append(working, at)
		}
	}
	for _, c := range p.crowds {
		if c.five || c.unreachable {
			continue
		}
		held = append(held, point{section{leases, c.String()}, float64(max(c.leases, 100))})
	}
	const four = ", over 4 processes"
	return []picture{
		{"uncontended-pairs", "Lock and Unlock of distinct keys", "goroutines", "pairs/s", "pairs_per_s", keys},
		{"uncontended-p99", "Lock and Unlock of distinct keys: p99", "goroutines", "µs", "p99_us", keys},
		{"growth-client-cpu", "What a pair costs its process", "goroutines", "CPU s per 100,000 pairs", "client_cpu_s_per_100k", keys},
		{"growth-server-cpu", "What a pair costs the server", "goroutines", "CPU s per 100,000 pairs", "server_cpu_s_per_100k", keys},
		{"contended-acquisitions", "One key" + four, "waiters", "acquisitions/s", "acquisitions_per_s", instant},
		{"contended-changes", "One key" + four + ": it goes to another process", "waiters", "changes/s", "changes_per_s", instant},
		{"contended-handover", "One key, held for 1 ms" + four + ": hand-over between them, p50", "waiters", "µs", "between_p50_us", working},
		{"growth-commands", "One key" + four + ": what an acquisition costs the server", "waiters", "commands", "commands_per_lock", instant},
		{"growth-longest", "One key" + four + ": the longest wait", "waiters", "ms", "longest_wait_ms", instant},
		{"growth-leases-pair", "A lone pair beside held leases, p50", "leases (none at 100)", "µs", "p50_us", held},
		{"growth-leases-p99", "A lone pair beside held leases, p99", "leases (none at 100)", "µs", "p99_us", held},
		{"leases-cpu", "Keeping leases", "leases (none at 100)", "% of a core, client", "client_keeping_percent", held},
	}
}

// draw writes those pictures that have a line to show.
func (r *results) draw(dir string, p plan) error {
	for _, pic := range p.pictures() {
		lines := r.lines(pic, append(r.names(), ringName))
		if len(lines) == 0 {
			continue
		}
		const wide, high = 900, 520
		s := newSVG(wide, high)
		if err := s.chart(0, wide, pic.title, pic.x, pic.y, lines); err != nil {
			return err
		}
		if err := s.write(filepath.Join(dir, pic.file+".svg")); err != nil {
			return err
		}
	}
	return nil
}

// lines are those of contestants that have more than a point.
func (r *results) lines(pic picture, names []string) (all []series) {
	for _, name := range names {
		l := series{name: name, group: r.contestant(name).group, place: r.place(name), at: r.line(pic, name)}
		if len(l.at) > 1 {
			all = append(all, l)
		}
	}
	return all
}

// line leaves out what a logarithmic axis has no place for.
func (r *results) line(pic picture, name string) (points plotter.XYs) {
	for _, at := range pic.points {
		f, ok := r.figure(cell{at.scenario, at.setting, name}, pic.metric)
		if ok && f.Median > 0 && !math.IsInf(f.Median, 0) {
			points = append(points, plotter.XY{X: at.x, Y: f.Median})
		}
	}
	return points
}

// Colours that people tell apart who see fewer of them, for hasp; others for
// the peers, and greys for what is bare.
var palettes = map[string][]color.RGBA{
	ours: {{0x00, 0x72, 0xb2, 0xff}, {0xd5, 0x5e, 0x00, 0xff}, {0x00, 0x9e, 0x73, 0xff}, {0xcc, 0x79, 0xa7, 0xff}},
	theirs: {
		{0xe6, 0x9f, 0x00, 0xff}, {0x8c, 0x56, 0x4b, 0xff}, {0x94, 0x67, 0xbd, 0xff}, {0x17, 0xbe, 0xcf, 0xff}, {0xbc, 0xbd, 0x22, 0xff},
		{0xe3, 0x77, 0xc2, 0xff}, {0xa0, 0x20, 0x20, 0xff}, {0x30, 0x80, 0x30, 0xff}, {0x60, 0x60, 0xff, 0xff},
	},
	limit: {{0x20, 0x20, 0x20, 0xff}, {0x70, 0x70, 0x70, 0xff}, {0xa8, 0xa8, 0xa8, 0xff}},
}

func shade(group string, place int) color.RGBA {
	palette := palettes[group]
	return palette[place%len(palette)]
}

// place is where a contestant stands in its group.
func (r *results) place(name string) (i int) {
	group := r.contestant(name).group
	for _, c := range r.contestants {
		if c.name == name {
			break
		}
		if c.group == group {
			i++
		}
	}
	return i
}
