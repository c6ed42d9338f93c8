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
	_, s.waiter = d.(backend.Waiter)
	_, s.inspector = d.(backend.Inspector)
	stopStore := s.stop
	s.stop = func() {
		d.Close()
		stopStore()
	}
	return s, nil
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
func (s *suite) start(ctx context.Context) []<-chan Result {
	cs := s.clauses()
	results := make([]<-chan Result, len(cs))
	into := make([]chan Result, len(cs))
	for i := range cs {
		into[i] = make(chan Result, 1)
		results[i] = into[i]
	}
	go func() {
		var wg sync.WaitGroup
		room := make(chan struct{}, concurrent)
		hopeless := false
		for i, c := range cs {
			if hopeless {
				into[i] <- c.skipped(whyHopeless)
				continue
			}
			if c.alone || c.name == firstClause {
				wg.Wait()
				r := s.run(ctx, c)
				hopeless = r.hopeless()
				into[i] <- r
				continue
			}
			room <- struct{}{}
			wg.Go(func() {
				into[i] <- s.run(ctx, c)
				<-room
			})
		}
		wg.Wait()
	}()
	return results
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
	if c.need != nil {
		if reason := c.need(s); reason != "" {
			return c.skipped(reason)
		}
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
	case err != nil:
		r.Status, r.Err = Fail, err
	}
	return r
}

// skipError ends a clause that turns out to be pointless.
type skipError struct{ reason string }

func (e *skipError) Error() string { return e.reason }

// slowError is a failure that a slow machine or a wrong driver may have caused. It
// counts if it also happens with the longest terms.
type slowError struct{ error }

func (e *slowError) Unwrap() error { return e.error }

func slow(format string, args ...any) error { return &slowError{fmt.Errorf(format, args...)} }

// repeat tries a clause until its outcome is not a slowError, tries times at most.
func (s *suite) repeat(ctx context.Context, c *clause) error {
	for n := 0; ; n++ {
		term := s.h.Term << n
		stalls := watchStalls()
		err := s.once(ctx, c, term)
		stalled := stalls()
		var slow *slowError
		if !errors.As(err, &slow) || ctx.Err() != nil {
			return err
		}
		if n == tries-1 {
			if stalled > term/4 {
				return &skipError{fmt.Sprintf("this machine is too slow: this process did not run for %v of a term of %v (%v)", stalled, term, err)}
			}
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
			case <-t.C:
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
	e := &env{suite: s, ctx: ctx, term: term, held: map[string]holding{}}
	label := fmt.Sprintf("%s %s %d", s.id, c.name, s.serial.Add(1))
	done := make(chan error, 1)
	go pprof.Do(ctx, pprof.Labels(labelName, label), func(context.Context) {
		err := e.try(func() error { return c.check(e) })
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
