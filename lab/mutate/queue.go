//go:build unix

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"
)

// queue hands out mutants until n have been tried.
type queue struct {
	mutants []*mutant
	n       int

	mu      sync.Mutex // guards all below
	started int        // how many of n are being tried or have been tried
	next    int
}

// pass tries mutants that were not tried yet: by quick tests, or by all tests.
func (q *queue) pass(ctx context.Context, r *runner, quick bool) error {
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
		return nil // an interrupted run prints its summary
	}
	return context.Cause(working)
}

// record is a line of the file of results: a mutant, or how a stage runs without
// one.
type record struct {
	Mutant   *mutant   `json:",omitempty"`
	Stage    *stage    `json:",omitempty"`
	Baseline *baseline `json:",omitempty"`
}

// resume reads the results of earlier runs. Of several results of a mutant the last
// counts. Those of this run are appended.
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
	// Each record is one write, so those of two workers do not mix.
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
		if m.State != broken {
			q.started++
		}
		if quick && m.State == "" || !quick && (m.State == slow || m.State == survived) {
			return m
		}
	}
	return nil
}

// done prints and keeps the outcome of m. An edit that does not compile is no
// mutant, and does not count.
func (q *queue) done(m *mutant, r *runner) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	fmt.Printf("%-8s %5.1f s  %s  %s\n", m.State, m.Seconds, m.edit, m.By)
	if m.State == broken {
		q.started--
	}
	return r.keep(record{Mutant: m})
}

// summary prints the survivors and the figures. It reports whether at most 3 %
// survived without an explanation, and no test found a mutant that is explained.
func (q *queue) summary(w io.Writer, seed uint64) bool {
	const isExplained = "explained"
	count, ok := map[string]int{}, true
	for _, m := range q.mutants[:q.next] {
		state := m.State
		switch {
		case state == survived && m.reason != "":
			state = isExplained
		case state == survived:
			fmt.Fprintf(w, "\nsurvived: %s\n\t%s\n", m.edit, strings.Join(m.Tests, "\n\t"))
		case (state == killed || state == timedout) && m.reason != "":
			fmt.Fprintf(w, "\nexplained, but found by %s: %s\n", m.By, m.edit)
			ok = false
		}
		count[state]++
	}
	total := count[killed] + count[timedout] + count[survived] + count[isExplained]
	percent := 100 * float64(count[survived]) / max(1, float64(total))
	fmt.Fprintf(w, "\nseed %d: %d mutants: %d killed by a test, %d by a time-out, %d survived (%.1f %%), %d explained; %d more did not compile\n",
		seed, total, count[killed], count[timedout], count[survived], percent, count[isExplained], count[broken])
	return ok && percent <= 3
}
