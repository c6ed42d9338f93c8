package conformance

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"runtime/pprof"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/stall"
)

const (
	limit      = 5 * time.Minute // the longest time of one try; a try that takes longer hangs
	concurrent = 8               // how many clauses run at the same time; they mostly sleep
	tries      = 4               // how often a clause is tried at most; see the method repeat
)

// allowance is how much time a try of a clause has.
type allowance struct {
	term     time.Duration // the term of a hold that expires
	long     time.Duration // the term of a hold that outlasts the try
	timeout  time.Duration // the bound of a call to the store
	patience time.Duration // the time for an event that must happen
	promptly time.Duration // the time for the return of a call whose context has ended
}

// paceOf returns the allowance of try n; the first try is 0. From try to try, the field term grows
// fourfold, and the other fields double. The field long stays below Traits.MaxTTL, and the field
// term is at most an eighth of the field long, unless Harness.Term is longer.
func (s *suite) paceOf(n int) allowance {
	p := allowance{
		term:     s.h.Term << (2 * n),
		long:     s.h.Long << n,
		timeout:  s.h.Timeout << n,
		patience: 20 * time.Second << n,
		promptly: 50 * time.Millisecond << n,
	}

	maxTTL := s.traits.MaxTTL
	if maxTTL > 0 {
		// Stay below MaxTTL with room to spare, because Extend adds the drift to the term that it
		// asks for.
		p.long = min(p.long, maxTTL-2*backend.Drift(maxTTL))
	}

	// A long hold must outlast a clause, which may last for several terms.
	p.term = s.rounded(max(s.h.Term, min(p.term, p.long/8)))
	return p
}

// suite is the state of one run of the suite.
type suite struct {
	h         Harness
	store     string
	stop      func()
	traits    backend.Traits
	waiter    bool // the driver is a Waiter or a Waker; see the function wait
	waker     bool
	inspector bool
	lister    bool
	id        string       // part of each key, so that keys of two runs differ
	serial    atomic.Int64 // the number of the last key or label
	hopeless  atomic.Bool  // the first clause has failed, so the others are skipped
	childArgs []string     // arguments of child processes; nil means the program's own arguments
}

// newSuite starts the store, and opens a driver to learn its Traits. This driver stays open until
// stop is called, because a store in memory may lose its data when its last driver is closed.
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
	s.h.Term = s.rounded(s.h.Term)
	_, s.waker = d.(backend.Waker)
	_, s.waiter = d.(backend.Waiter)
	s.waiter = s.waiter || s.waker
	_, s.inspector = d.(backend.Inspector)
	_, s.lister = d.(backend.Lister)

	// Close the driver before its store.
	stopStore := s.stop
	s.stop = func() {
		d.Close()
		stopStore()
	}

	return s, nil
}

// rounded returns ttl, rounded up as the driver's Traits say that the driver rounds terms.
func (s *suite) rounded(ttl time.Duration) time.Duration {
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

// start runs all clauses in the background. It returns one channel for the result of each clause,
// in the order of the clauses. Each channel has room for its result, so that sending it never
// blocks.
func (s *suite) start(ctx context.Context) []chan Result {
	cs := s.clauses()
	results := make([]chan Result, len(cs))
	for i := range results {
		results[i] = make(chan Result, 1)
	}
	go s.runAll(ctx, cs, results)
	return results
}

// runAll runs clauses and sends their results. Before a clause that must run alone, it waits until
// the others have ended. The first clause also runs alone, because if it fails, the others are
// skipped.
func (s *suite) runAll(ctx context.Context, cs []*clause, results []chan Result) {
	var wg sync.WaitGroup
	room := make(chan struct{}, concurrent) // has one element for each running clause
	for i, c := range cs {
		if c.alone || c.name == firstClause {
			wg.Wait()
			results[i] <- s.run(ctx, c)
			continue
		}
		room <- struct{}{}
		wg.Go(func() {
			results[i] <- s.run(ctx, c)
			<-room
		})
	}

	wg.Wait()
}

const whyHopeless = `not tried, since "` + firstClause + `" has failed`

// run tries c, unless c must be skipped, and returns the result.
func (s *suite) run(ctx context.Context, c *clause) Result {
	r := Result{Name: c.name, Why: c.why, Contract: c.says}
	r.Reason = c.need.missing(s)
	if s.hopeless.Load() {
		r.Reason = whyHopeless
	}
	if r.Reason != "" {
		r.Status = skipped
		return r
	}

	began := time.Now()
	slowTries, err := s.repeat(ctx, c)
	r.Elapsed = time.Since(began)
	if len(slowTries) > 0 {
		r.Reason = "tried again: " + strings.Join(slowTries, "; ")
	}

	r.Status = passed
	cannot, declared := s.h.Cannot[c.name]
	var skip *skipError
	switch {
	case errors.As(err, &skip):
		r.Status = skipped
		r.Reason = skip.reason
	case declared && err != nil: // it failed, as declared
		r.Status = skipped
		r.Reason = cannot + " (" + err.Error() + ")"
	case declared: // it passed, so the declaration is wrong
		r.Status = failed
		r.Err = fmt.Errorf("the clause is met, although Harness.Cannot declares "+
			"that it cannot be (%s): remove the declaration", cannot)
	case err != nil && c.optional:
		r.Status = failed
		r.Err = fmt.Errorf(
			"%w (a store that cannot meet this clause may declare it in Harness.Cannot)", err)
	case err != nil:
		r.Status = failed
		r.Err = err
	}
	if r.Status == failed && c.name == firstClause {
		s.hopeless.Store(true)
	}
	return r
}

// repeat tries a clause until it passes, or fails for a reason other than a slow machine, but at
// most four times. It returns the error of the last try. The result slowTries describes each
// failure that a slow machine may have caused.
func (s *suite) repeat(ctx context.Context, c *clause) (slowTries []string, err error) {
	for n := range tries {
		p := s.paceOf(n)
		began := time.Now()
		stalls := stall.Watch(nil)
		err = s.once(ctx, c, p)
		took := time.Since(began)
		stalled := stalls() // how long this process did not run

		// If the try has passed, was skipped, was cancelled or hung, another try is of no use.
		var skip *skipError
		skips := errors.As(err, &skip)
		if err == nil || skips || ctx.Err() != nil || took > limit {
			return slowTries, err
		}

		// A failure does not count if the machine or the store was slow: this process did not run
		// for a while, long holds may have expired, a call had no answer for a whole timeout, or
		// the failed step says so. Some long holds last for only half of p.long.
		var slowErr *slowError
		timesOut := errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded)
		silent := timesOut && took >= p.timeout
		stopped := stalled > p.term/8
		expired := took > p.long/2
		if !silent && !stopped && !expired && !errors.As(err, &slowErr) {
			return slowTries, err
		}

		if n == tries-1 && stopped {
			return nil, &skipError{fmt.Sprintf("this machine is too slow: "+
				"this process did not run for %v of a term of %v (%v)", stalled, p.term, err)}
		}
		slowTries = append(slowTries, fmt.Sprintf(
			"with a term of %v, of which this process did not run for %v: %v", p.term, stalled, err))
	}
	return slowTries, err
}

// once tries a clause once. All goroutines of the try have the same profiler label, so that the
// error can show their stacks if the try hangs.
func (s *suite) once(ctx context.Context, c *clause, p allowance) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	e := &env{suite: s, allowance: p, ctx: ctx, held: map[string]func(context.Context){}}
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

	// The context has ended. Give the check time to notice that, because the error of the check may
	// say what the check waited for.
	select {
	case err := <-done:
		return err
	case <-time.After(p.patience):
		return fmt.Errorf("a call does not return: %w; goroutines:\n%s", ctx.Err(), stacks(label))
	}
}
