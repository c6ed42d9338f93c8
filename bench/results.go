package main

import (
	"encoding/json"
	"math"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"time"
)

// cell is one contestant in one setting of a scenario.
type cell struct{ scenario, setting, contestant string }

// results are the figures of all rounds.
type results struct {
	Began       time.Time
	Machine     string
	Redis       string
	Command     string
	Versions    map[string]string // of modules
	contestants []contestant
	values      map[cell]map[string][]float64
	notes       map[cell]string // in place of figures
	Skipped     []string        // for want of time
}

func newResults(all []contestant, redis, command string) *results {
	r := &results{
		Began: time.Now(), Machine: machine(), Redis: redis, Command: command, Versions: map[string]string{}, contestants: all,
		values: map[cell]map[string][]float64{}, notes: map[cell]string{},
	}
	info, _ := debug.ReadBuildInfo()
	for _, m := range info.Deps {
		r.Versions[m.Path] = m.Version
		if m.Replace != nil {
			r.Versions[m.Path] = "of this repository"
		}
	}
	return r
}

func machine() string {
	return runtime.Version() + " " + runtime.GOOS + "/" + runtime.GOARCH + ", " + count(runtime.NumCPU(), "CPU", "CPUs")
}

// add notes a round. What is no number is no figure.
func (r *results) add(c cell, f figures) {
	if r.values[c] == nil {
		r.values[c] = map[string][]float64{}
	}
	for name, v := range f {
		if !math.IsNaN(v) {
			r.values[c][name] = append(r.values[c][name], v)
		}
	}
}

// figure is a metric over all rounds.
type figure struct {
	Median  float64
	Min     float64
	Max     float64
	Samples int
}

// figure reports false if there is none.
func (r *results) figure(c cell, metric string) (figure, bool) {
	v := slices.Sorted(slices.Values(r.values[c][metric]))
	if len(v) == 0 {
		return figure{}, false
	}
	middle := v[len(v)/2]
	if len(v)%2 == 0 {
		middle = (middle + v[len(v)/2-1]) / 2
	}
	return figure{middle, v[0], v[len(v)-1], len(v)}, true
}

// percentile is that of sorted durations, by nearest rank, in microseconds.
func percentile(sorted []time.Duration, p int) float64 {
	if len(sorted) == 0 {
		return math.NaN()
	}
	return float64(sorted[(len(sorted)*p+99)/100-1].Nanoseconds()) / 1e3
}

// file is what results.json holds.
type file struct {
	Began    time.Time         `json:"began"`
	Machine  string            `json:"machine"`
	Redis    string            `json:"redis"`
	Command  string            `json:"command"`
	Quick    bool              `json:"quick"`
	Versions map[string]string `json:"versions"`
	Skipped  []string          `json:"skipped,omitempty"`
	Results  []record          `json:"results"`
}

// record is a cell as it is written.
type record struct {
	Scenario   string             `json:"scenario"`
	Setting    string             `json:"setting"`
	Contestant string             `json:"contestant"`
	Note       string             `json:"note,omitempty"`
	Figures    map[string]written `json:"figures,omitempty"`
}

// written is a figure as it is written, with its rounds. What is infinite is
// null.
type written struct {
	Median *float64   `json:"median"`
	Min    *float64   `json:"min"`
	Max    *float64   `json:"max"`
	Rounds []*float64 `json:"rounds"`
}

func finite(f float64) *float64 {
	if math.IsInf(f, 0) {
		return nil
	}
	return &f
}

// writeJSON writes all there is, in the order of the tables.
func (r *results) writeJSON(path string, p plan) error {
	all := file{r.Began, r.Machine, r.Redis, r.Command, p.rounds == 1, r.used(), r.Skipped, nil}
	for _, s := range p.sections() {
		for _, c := range r.rows(s) {
			k := cell{s.scenario, s.setting, c}
			x := record{Scenario: k.scenario, Setting: k.setting, Contestant: c, Note: r.notes[k], Figures: map[string]written{}}
			for name, rounds := range r.values[k] {
				f, _ := r.figure(k, name)
				w := written{finite(f.Median), finite(f.Min), finite(f.Max), nil}
				for _, v := range rounds {
					w.Rounds = append(w.Rounds, finite(v))
				}
				x.Figures[name] = w
			}
			all.Results = append(all.Results, x)
		}
	}
	text, err := json.MarshalIndent(all, "", "\t")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(text, '\n'), 0o644)
}

// readJSON reads what writeJSON wrote.
func readJSON(path string) (*results, plan, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, plan{}, err
	}
	var f file
	if err := json.Unmarshal(text, &f); err != nil {
		return nil, plan{}, err
	}
	p := full()
	if f.Quick {
		p = quick()
	}
	r := newResults(contestants(), f.Redis, f.Command)
	r.Began, r.Machine, r.Versions, r.Skipped = f.Began, f.Machine, f.Versions, f.Skipped
	for _, x := range f.Results {
		k := cell{x.Scenario, x.Setting, x.Contestant}
		if x.Note != "" {
			r.notes[k] = x.Note
		}
		for name, w := range x.Figures {
			for _, v := range w.Rounds {
				if v == nil {
					v = new(math.Inf(1))
				}
				r.add(k, figures{name: *v})
			}
		}
	}
	return r, p, nil
}

// used are the versions of the contestants.
func (r *results) used() map[string]string {
	v := map[string]string{}
	for _, c := range r.contestants {
		v[c.module] = r.Versions[c.module]
	}
	return v
}

// section is a setting of a scenario.
type section struct{ scenario, setting string }

func (p plan) sections() (all []section) {
	for _, d := range p.distinct {
		all = append(all, section{uncontended, d.String()})
	}
	for _, c := range p.contests {
		all = append(all, section{contended, c.String()})
	}
	for _, c := range p.crowds {
		all = append(all, section{leases, c.String()})
	}
	return append(all, section{masters, p.degraded.String()})
}

// rows are the contestants of which there is something to say.
func (r *results) rows(s section) (names []string) {
	for _, name := range append(r.names(), ringName) {
		k := cell{s.scenario, s.setting, name}
		if r.values[k] != nil || r.notes[k] != "" {
			names = append(names, name)
		}
	}
	return names
}

func (r *results) names() (names []string) {
	for _, c := range r.contestants {
		names = append(names, c.name)
	}
	return names
}
