package conformance

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"runtime/pprof"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
)

const (
	patience   = 20 * time.Second // for an event that must happen
	limit      = 2 * time.Minute  // for one try of a clause
	concurrent = 8                // clauses at a time; they mostly wait
	tries      = 4                // of a clause whose failure a slow machine may have caused; each doubles the terms
)

// suite is one run of the table.
type suite struct {
	h         Harness
	store     string
	stop      func()
	traits    backend.Traits
	waiter    bool
	inspector bool
	lister    bool
	id        string       // makes this run's keys unique
	serial    atomic.Int64 // of keys
	childArgs []string     // arguments of child processes; nil for the program's own
}

// newSuite starts the store and opens a first driver for its traits. The driver
// stays open until stop, because a store in memory may last only while a driver is
// open.
func newSuite(ctx context.Context, h Harness, childArgs []string) (*suite, error) {
	if err := h.check(); err != nil {
		return nil, err
	}
	h.setDefaults()
	s := &suite{h: h, id: strings.ToLower(rand.Text()[:8]), childArgs: childArgs, stop: func() {}}
	if h.Store != nil {
		store, stop, err := h.Store(ctx)
		if err != nil {
			return nil, fmt.Errorf("conformance: start the store: %w", err)
		}
		s.store = store
		if stop != nil {
			s.stop = stop
		}
	}

	d, err := h.Open(ctx, s.store)
	if err == nil && d == nil {
		err = errors.New("nil driver")
	}
	if err != nil {
		s.stop()
		return nil, fmt.Errorf("conformance: open a driver: %w", err)
	}

	s.traits = d.Traits()
	s.h.Term = s.granted(s.h.Term)
	_, s.waiter = d.(backend.Waiter)
	_, s.inspector = d.(backend.Inspector)
	_, s.lister = d.(backend.Lister)

	// The driver goes before its store.
	stopStore := s.stop
	s.stop = func() {
		d.Close()
		stopStore()
	}

	return s, nil
}

// granted returns the term that the driver grants if it is asked for ttl.
func (s *suite) granted(ttl time.Duration) time.Duration {
	ttl = max(ttl, s.traits.MinTTL)
	if unit := s.traits.TTLUnit; unit > 0 {
		ttl = (ttl + unit - 1) / unit * unit
	}
	return ttl
}

// clauses returns the clauses that the Harness has selected.
func (s *suite) clauses() []*clause {
	var cs []*clause
	for i := range table {
		if c := &table[i]; s.h.Only == nil || s.h.Only(c.name) {
			cs = append(cs, c)
		}
	}
	return cs
}

// start runs all clauses in the background and returns the channels of their
// results, in order.
func (s *suite) start(ctx context.Context) []chan Result {
	cs := s.clauses()
	results := make([]chan Result, len(cs))
	for i := range results {
		results[i] = make(chan Result, 1)
	}
	go s.runAll(ctx, cs, results)
	return results
}

// runAll runs clauses and sends their results. A clause that runs alone waits until
// the clauses before it have ended.
func (s *suite) runAll(ctx context.Context, cs []*clause, results []chan Result) {
	var wg sync.WaitGroup
	room := make(chan struct{}, concurrent)
	hopeless := false

	for i, c := range cs {
		switch {
		case hopeless:
			results[i] <- c.skipped(whyHopeless)
		case c.alone || c.name == firstClause:
			wg.Wait()
			r := s.run(ctx, c)
			hopeless = r.hopeless()
			results[i] <- r
		default:
			room <- struct{}{}
			wg.Go(func() {
				results[i] <- s.run(ctx, c)
				<-room
			})
		}
	}

	wg.Wait()
}

// whyHopeless is the reason of the skips after the first clause has failed.
const whyHopeless = `not tried, since "` + firstClause + `" has failed`

// hopeless reports whether the first clause has failed, so that the others would
// fail as well.
func (r Result) hopeless() bool { return r.Name == firstClause && r.Status == Fail }

func (c *clause) skipped(reason string) Result {
	return Result{Name: c.name, Why: c.why, Contract: c.says, Status: Skip, Reason: reason}
}

// run runs one clause.
func (s *suite) run(ctx context.Context, c *clause) Result {
	if reason := c.need.missing(s); reason != "" {
		return c.skipped(reason)
	}

	r := Result{Name: c.name, Why: c.why, Contract: c.says}
	began := time.Now()
	err := s.repeat(ctx, c)
	r.Elapsed = time.Since(began)

	cannot, declared := s.h.Cannot[c.name]
	var skip *skipError
	switch {
	case errors.As(err, &skip):
		r.Status, r.Reason = Skip, skip.reason
	case declared && err != nil:
		r.Status, r.Reason = Skip, cannot+" ("+err.Error()+")"
	case declared && c.optional == yes:
		r.Status, r.Err = Fail, fmt.Errorf("the clause is met, although Harness.Cannot declares that it cannot be (%s): remove the declaration", cannot)
	case err != nil && c.optional != no:
		r.Status, r.Err = Fail, fmt.Errorf("%w (a store that cannot meet this clause may declare it in Harness.Cannot)", err)
	case err != nil:
		r.Status, r.Err = Fail, err
	}
	return r
}

// repeat tries a clause until its outcome is not a slowError, tries times at most.
func (s *suite) repeat(ctx context.Context, c *clause) error {
	for n := 0; ; n++ {
		term := s.h.Term << n
		stalls := watchStalls()
		err := s.once(ctx, c, term)
		stalled := stalls()

		var slow *slowError
		last := n == tries-1
		switch {
		case !errors.As(err, &slow) || ctx.Err() != nil:
			return err
		case last && stalled > term/4:
			return &skipError{fmt.Sprintf("this machine is too slow: this process did not run for %v of a term of %v (%v)", stalled, term, err)}
		case last:
			return err
		}
	}
}

// watchStalls measures the longest time for which this process did not run a
// goroutine that was due. It ends when the caller calls stop.
func watchStalls() (stop func() time.Duration) {
	const tick = 10 * time.Millisecond
	quit, longest := make(chan struct{}), make(chan time.Duration)
	go func() {
		var worst time.Duration
		last := time.Now()
		t := time.NewTicker(tick)
		defer t.Stop()

		for {
			select {
			case <-t.C: // late by the time of a stall
				worst = max(worst, time.Since(last)-tick)
				last = time.Now()
			case <-quit:
				longest <- worst
				return
			}
		}
	}()

	return func() time.Duration {
		close(quit)
		return <-longest
	}
}

// once tries a clause once, with all its goroutines under one label.
func (s *suite) once(ctx context.Context, c *clause, term time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	e := newEnv(ctx, s, term)
	label := fmt.Sprintf("%s %s %d", s.id, c.name, s.serial.Add(1))
	done := make(chan error, 1)
	go pprof.Do(ctx, pprof.Labels(labelName, label), func(context.Context) {
		err := e.try(func() { c.check(e) })
		e.close()
		done <- err
	})

	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}

	// The check sees the end of ctx as well, and its error may say what it waited
	// for.
	grace := time.NewTimer(patience)
	defer grace.Stop()

	select {
	case err := <-done:
		return err
	case <-grace.C:
		return fmt.Errorf("a call does not return: %w; goroutines:\n%s", ctx.Err(), stacks(label))
	}
}
