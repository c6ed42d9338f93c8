//go:build unix

// Command mutate plants bugs, one at a time, and runs the tests that should
// find each: exchanged operators, negated conditions, dropped statements and
// numbers that are off by one, in Go and in Lua. What no test finds is a
// promise without a test, or an edit that changes no promise; explained.txt
// lists the latter with their reasons.
//
//	go run ./internal/mutate -n 160 -seed 1
//	go run ./internal/mutate -only '^redlock/' -results results.jsonl
//	go run ./internal/mutate -only 'lease.go.*drop' -n 1000
//	go run ./internal/mutate -own -results results.jsonl
//	go run ./internal/mutate -explained
//
// A seed decides which edits are tried, in which order: first by the quick
// tests of their packages, and then, if those find nothing, by all tests. The
// work tree is left alone: go's -overlay puts the edited file in the place of
// the original. With -results a run goes on where an earlier one was
// interrupted, and tries anew what survived. The exit status is 1 if more than
// 3 percent of the mutants survive without an explanation, or if a test finds
// one that is explained.
package main

import (
	"cmp"
	"context"
	"crypto/sha256"
	_ "embed"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"
)

// A pkg says how many edits a package is given in each round, in Go and in Lua,
// and which tests should find them, beside its own and the simulation.
type pkg struct {
	dir         string
	inGo, inLua int
	more        []stage
}

// suite is the conformance suite of a strategy, which takes long.
func suite(dir string) stage { return stage{dir, "Conformance", "", "process"} }

// garbage has each strategy on Redis be sent replies that no script gives.
var garbage = stage{"internal/acceptance", "Garbage", "", "inprocess"}

var packages = []pkg{
	{".", 3, 0, []stage{suite("memlock")}},
	{"memlock", 1, 0, []stage{suite("memlock")}},
	{"filelock", 1, 0, []stage{suite("filelock")}},
	{"spinlock", 1, 1, []stage{suite("spinlock"), garbage}},
	{"pubsublock", 1, 1, []stage{suite("pubsublock"), garbage}},
	{"fairlock", 1, 1, []stage{suite("fairlock"), garbage}},
	{"redlock", 2, 1, []stage{suite("redlock"), garbage}},
	{"internal/redisstore", 1, 1, []stage{suite("spinlock"), suite("pubsublock"), garbage}},
	{"internal/redisstore/resp", 1, 0, []stage{{"internal/redisstore", "", "", "process"}, suite("spinlock"), garbage}},
	{"internal/redisstore/pubsub", 1, 0, []stage{suite("pubsublock"), suite("fairlock"), garbage}},
}

// explained is a table: file, function, edit and why no test can find it.
//
//go:embed explained.txt
var explained string

// A mutant is an edit and what became of it.
type mutant struct {
	edit
	outcome
	pkg    pkg
	round  int
	reason string // why no test can find it, if explained.txt says so
}

type outcome struct {
	State   string   // build, test, timeout, survived, or slow for slow tests to come; empty if it was not tried
	By      string   // the test that found it
	Tests   []string // all stages that ran
	Seconds float64
}

// rank is the place of e in the order of a seed. It depends on no other edit,
// so that a change of the code leaves the choice among the rest of it.
func (e edit) rank(seed uint64) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%d %s", seed, e.key()))
	return string(sum[:])
}

// choose returns mutants of all packages in the order in which they are tried.
func choose(root string, seed uint64) ([]*mutant, error) {
	var all []*mutant
	for _, p := range packages {
		inGo, inLua, err := edits(root, p.dir)
		if err != nil {
			return nil, err
		}
		add := func(es []edit, perRound int) {
			slices.SortFunc(es, func(a, b edit) int { return cmp.Compare(a.rank(seed), b.rank(seed)) })
			for i, e := range es {
				all = append(all, &mutant{edit: e, pkg: p, round: i / perRound})
			}
		}
		add(inGo, p.inGo)
		add(inLua, p.inLua)
	}
	slices.SortStableFunc(all, func(a, b *mutant) int { return cmp.Compare(a.round, b.round) })
	return all, nil
}

// explain marks the mutants that the table names, and returns the rows that
// name no edit.
func explain(all []*mutant, table string) (stale []string) {
	byKey := map[string]*mutant{}
	for _, m := range all {
		byKey[m.key()] = m
	}
	for row := range strings.Lines(table) {
		row = strings.TrimSuffix(row, "\n")
		i := strings.LastIndexByte(row, '\t')
		if i < 0 || strings.HasPrefix(row, "#") {
			continue
		}
		if m := byKey[row[:i]]; m != nil {
			m.reason = row[i+1:]
		} else {
			stale = append(stale, row)
		}
	}
	return stale
}

var (
	n         = flag.Int("n", 160, "how many mutants that compile")
	seed      = flag.Uint64("seed", 1, "which edits are tried")
	only      = flag.String("only", "", "a regular expression for \"file:line: function: edit\"")
	reasoned  = flag.Bool("explained", false, "try those that are explained")
	tests     = flag.String("tests", "", "run only these, such as \"redlock TestRenew\", on what has survived")
	own       = flag.Bool("own", false, "run only the tests of the package that is edited")
	parallel  = flag.Int("parallel", 2, "how many mutants at a time")
	results   = flag.String("results", "", "a file that keeps results, for a run in slices")
	printOnly = flag.Bool("list", false, "print the edits, and try none")
)

func main() {
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	ok, err := run(ctx)
	if err != nil {
		fmt.Fprintln(os.Stderr, "mutate:", err)
		os.Exit(2)
	}
	if !ok || ctx.Err() != nil {
		os.Exit(1)
	}
}

// run tries mutants and reports whether the tests are good enough.
func run(ctx context.Context) (bool, error) {
	match, err := regexp.Compile(*only)
	if err != nil {
		return false, err
	}
	root, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}").Output()
	if err != nil {
		return false, err
	}
	dir, err := os.MkdirTemp("", "mutate")
	if err != nil {
		return false, err
	}
	defer os.RemoveAll(dir)
	r := &runner{root: strings.TrimSpace(string(root)), dir: dir, baselines: map[stage]baseline{}}

	all, err := choose(r.root, *seed)
	if err != nil {
		return false, err
	}
	for _, row := range explain(all, explained) {
		fmt.Println("explained, but no edit of the code as it is:", row)
	}
	all = slices.DeleteFunc(all, func(m *mutant) bool {
		return !match.MatchString(m.String()) || *reasoned && m.reason == ""
	})
	if *printOnly {
		for _, m := range all {
			fmt.Println(m)
		}
		return true, nil
	}

	q := &queue{mutants: all, n: *n}
	r.keep = func(record) error { return nil }
	if *results != "" {
		if err := q.resume(r, *results); err != nil {
			return false, err
		}
	}
	passes := []bool{true, false}
	if *tests != "" {
		passes = passes[:1]
	}
	for _, quick := range passes {
		for _, s := range q.stages(quick) {
			if err := r.measure(ctx, s); err != nil {
				return false, err
			}
		}
		if err := q.pass(ctx, r, quick); err != nil {
			return false, err
		}
	}
	return q.summary(os.Stdout, *seed), nil
}

// A queue hands out mutants until n have been tried.
type queue struct {
	mutants []*mutant
	n       int

	mu      sync.Mutex
	started int // how many of n are being tried or have been
	next    int
}

// stages returns the stages that a pass needs: of each package with mutants to try
// the first one, which has its quick tests, or all of them.
func (q *queue) stages(quick bool) (needed []stage) {
	q.next, q.started = 0, 0
	for m := q.take(quick); m != nil; m = q.take(quick) {
		stages := m.pkg.stages()
		if quick {
			stages = stages[:1]
		}
		for _, s := range stages {
			if !slices.Contains(needed, s) {
				needed = append(needed, s)
			}
		}
	}
	return needed
}

// pass tries mutants that were not tried by quick tests, or by all.
func (q *queue) pass(ctx context.Context, r *runner, quick bool) error {
	if ctx.Err() != nil {
		return nil
	}
	working, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	var workers sync.WaitGroup
	q.next, q.started = 0, 0
	for range *parallel {
		workers.Go(func() {
			for m := q.take(quick); m != nil && working.Err() == nil; m = q.take(quick) {
				began := time.Now()
				o, err := r.try(working, m, quick)
				if working.Err() != nil {
					return
				}
				m.outcome = o
				m.Seconds = time.Since(began).Seconds()
				if err := errors.Join(err, q.done(m, r)); err != nil {
					fail(err)
				}
			}
		})
	}
	workers.Wait()
	if ctx.Err() != nil {
		return nil
	}
	return context.Cause(working)
}

// A record is a line of the file of results: a mutant, or how a stage runs
// without one.
type record struct {
	Mutant   *mutant   `json:",omitempty"`
	Stage    *stage    `json:",omitempty"`
	Baseline *baseline `json:",omitempty"`
}

// resume reads the results of earlier runs, of which the last counts, and has
// those of this run appended.
func (q *queue) resume(r *runner, name string) error {
	f, err := os.OpenFile(name, os.O_APPEND|os.O_CREATE|os.O_RDWR, 0o666)
	if err != nil {
		return err
	}
	byKey := map[string]*mutant{}
	for _, m := range q.mutants {
		byKey[m.key()] = m
	}
	for dec := json.NewDecoder(f); ; {
		var rec record
		if err := dec.Decode(&rec); err == io.EOF {
			break
		} else if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if rec.Mutant == nil {
			r.baselines[*rec.Stage] = *rec.Baseline
		} else if m := byKey[rec.Mutant.key()]; m != nil {
			m.outcome = rec.Mutant.outcome
		}
	}
	// Each record is one write, so that those of two workers do not mix.
	r.keep = func(rec record) error { return json.NewEncoder(f).Encode(rec) }
	return nil
}

// take returns the next mutant to try, or nil if there is none.
func (q *queue) take(quick bool) *mutant {
	q.mu.Lock()
	defer q.mu.Unlock()
	for q.started < q.n && q.next < len(q.mutants) {
		m := q.mutants[q.next]
		q.next++
		if m.State != "build" {
			q.started++
		}
		switch m.State {
		case "":
			if quick && *tests == "" {
				return m
			}
		case "slow", "survived":
			if !quick || *tests != "" {
				return m
			}
		}
	}
	return nil
}

// done prints and keeps what became of m. One that does not compile is none.
func (q *queue) done(m *mutant, r *runner) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	fmt.Printf("%-8s %5.1f s  %s  %s\n", m.State, m.Seconds, m.edit, m.By)
	if m.State == "build" {
		q.started--
	}
	return r.keep(record{Mutant: m})
}

// summary prints the survivors and the figures, and reports whether at most 3 %
// survived without an explanation, and every explanation is true.
func (q *queue) summary(w io.Writer, seed uint64) bool {
	count, total, ok := map[string]int{}, 0, true
	for _, m := range q.mutants[:q.next] {
		state := m.State
		switch {
		case state == "survived" && m.reason != "":
			state = "explained"
		case state == "survived":
			fmt.Fprintf(w, "\nsurvived: %s\n\t%s\n", m.edit, strings.Join(m.Tests, "\n\t"))
		case state != "" && state != "slow" && m.reason != "":
			fmt.Fprintf(w, "\nexplained, but found by %s: %s\n", m.By, m.edit)
			ok = false
		}
		count[state]++
		if state != "" && state != "build" && state != "slow" {
			total++
		}
	}
	percent := 100 * float64(count["survived"]) / max(1, float64(total))
	fmt.Fprintf(w, "\nseed %d: %d mutants: %d killed by a test, %d by a time-out, %d survived (%.1f %%), %d explained; %d more did not compile\n",
		seed, total, count["test"], count["timeout"], count["survived"], percent, count["explained"], count["build"])
	return ok && percent <= 3
}
