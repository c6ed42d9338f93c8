package main

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"
)

// section is a setting of a scenario.
type section struct{ scenario, setting string }

// cell names the figures of one contestant in one section.
type cell string

func (s section) cell(contestant string) cell {
	return cell(s.scenario + "; " + s.setting + "; " + contestant)
}

// results are the figures of all rounds.
type results struct {
	Began   time.Time
	Took    time.Duration
	Machine string
	Commit  string // of the repository
	Redis   string // the version of Redis
	// in turns with one goroutine, this process ran on one processor and the servers on another
	Pinned bool
	Quick  bool
	Notes  []string // faults of peers, and turns without figures
	Values map[cell]map[string][]float64

	contestants []contestant
}

func newResults(all []contestant) *results {
	commit, _ := exec.Command("git", "describe", "--always", "--dirty", "--exclude=*").Output()
	return &results{
		Began: time.Now(),
		Machine: fmt.Sprintf("%s %s/%s, %s", runtime.Version(), runtime.GOOS, runtime.GOARCH,
			count(runtime.NumCPU(), "CPU")),
		Commit: cmp.Or(strings.TrimSpace(string(commit)), "unknown"),
		Pinned: runtime.NumCPU() > 1,
		Values: map[cell]map[string][]float64{}, contestants: all,
	}
}

// add adds the figures of a turn. It leaves out what is not a finite number.
func (r *results) add(c cell, f figures) {
	if r.Values[c] == nil {
		r.Values[c] = map[string][]float64{}
	}
	for name, v := range f {
		if !math.IsNaN(v) && !math.IsInf(v, 0) {
			r.Values[c][name] = append(r.Values[c][name], v)
		}
	}
}

// note adds a line to the notes.
func (r *results) note(format string, args ...any) {
	r.Notes = append(r.Notes, strings.TrimSpace(fmt.Sprintf(format, args...)))
	fmt.Fprintln(os.Stderr, r.Notes[len(r.Notes)-1])
}

// median returns the median of a metric over all rounds, or NaN.
func (r *results) median(c cell, metric string) float64 {
	v := slices.Sorted(slices.Values(r.Values[c][metric]))
	switch n := len(v); {
	case n == 0:
		return math.NaN()
	case n%2 == 0:
		return (v[n/2] + v[n/2-1]) / 2
	default:
		return v[n/2]
	}
}

// percentile returns a percentile by nearest rank, in microseconds.
func percentile(all []time.Duration, p int) float64 {
	if len(all) == 0 {
		return math.NaN()
	}
	slices.Sort(all)
	return float64(all[(len(all)*p+99)/100-1].Nanoseconds()) / 1e3
}

// write writes results.md to a directory.
func (r *results) write(dir string) error {
	r.Took = time.Since(r.Began)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	page := filepath.Join(dir, "results.md")
	if err := os.WriteFile(page, r.page(), 0o644); err != nil {
		return err
	}
	fmt.Fprintf(os.Stderr, "%4.0fs  see %s\n", r.Took.Seconds(), page)
	return nil
}

// page returns results.md: all tables that have figures.
func (r *results) page() []byte {
	out := fmt.Appendf(nil, "# hasp and other libraries\n\n%s", r.run())
	parts := r.parts()
	for _, name := range slices.Sorted(maps.Keys(parts)) {
		if hasRows(parts[name]) {
			out = fmt.Appendf(out, "\n## %s\n\n%s", name, parts[name])
		}
	}
	if len(r.Notes) > 0 {
		out = fmt.Appendf(out, "\n## Notes\n\n- %s\n", strings.Join(r.Notes, "\n- "))
	}
	return out
}
