package conformance

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hasplock/hasp/backend"
)

// env is what one try of a clause works with. A step that fails ends the try by
// a panic of must, which the method try turns into the clause's error. So a check
// reads as a list of steps, and returns an error of its own only at its end or
// where it compares values.
type env struct {
	*suite
	ctx  context.Context
	term time.Duration // a short term; longer if the clause is repeated

	mu      sync.Mutex // guards all below
	held    map[string]holding
	wants   []*wanted
	mends   []func() // each makes a link work again
	cleanup []func()
}

// holding is a claim that the end of a try releases.
type holding struct {
	d *driver
	c backend.Claim
}

// abort is the value that must panics with.
type abort struct{ error }

// must ends the try if err is not nil.
func must(err error) {
	if err != nil {
		panic(abort{err})
	}
}

// mustf is must, with the step that failed in front of the error.
func mustf(err error, format string, args ...any) {
	if err != nil {
		panic(abort{fmt.Errorf("%s: %w", fmt.Sprintf(format, args...), err)})
	}
}

// try returns the error that f returns, or that a panic of must carries.
func (e *env) try(f func() error) (err error) {
	defer func() {
		switch p := recover().(type) {
		case nil:
		case abort:
			err = p.error
		default:
			err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
		}
	}()
	return f()
}

// hooked ends the try if a hook of the Harness failed. If the hook does not support
// the call, the clause is skipped.
func hooked(err error) {
	if errors.Is(err, errors.ErrUnsupported) {
		err = &skipError{err.Error()}
	}
	must(err)
}

// onEnd registers f for the end of the try. The last registered function runs
// first.
func (e *env) onEnd(f func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.cleanup = append(e.cleanup, f)
}

// close ends the waits of the try, releases its holds and runs its clean-up, even
// if its context has ended.
func (e *env) close() {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(e.ctx), e.h.Timeout)
	defer cancel()
	e.mu.Lock()
	wants, mends := e.wants, e.mends
	e.mu.Unlock()
	for _, mend := range mends {
		mend()
	}
	// Waits end first. They would get the keys that are released below.
	for _, w := range wants {
		w.stop()
	}
	for _, w := range wants {
		select {
		case <-w.ended:
		case <-ctx.Done():
		}
	}
	e.mu.Lock()
	held, cleanup := maps.Clone(e.held), e.cleanup
	e.mu.Unlock()
	for _, h := range held {
		if ctx.Err() == nil {
			h.d.Driver.Release(ctx, h.c)
		}
	}
	for _, f := range slices.Backward(cleanup) {
		f()
	}
}

// key returns a new key.
func (e *env) key() string {
	return fmt.Sprintf("hasp-conformance-%s-%d", e.id, e.serial.Add(1))
}

// claim returns a claim for a new key.
func (e *env) claim(ttl time.Duration) backend.Claim { return e.claimOf(e.key(), ttl) }

// claimOf returns the claim of a new attempt at key.
func (e *env) claimOf(key string, ttl time.Duration) backend.Claim {
	token := "A" + rand.Text() // begins and ends with letters, so that its case can be changed
	return backend.Claim{Key: key, Token: token, Owner: "owner-" + strings.ToLower(token[len(token)-6:]),
		TTL: ttl, Timeout: e.h.Timeout}
}

func fencedClaim(c backend.Claim) backend.Claim {
	c.Fenced = true
	return c
}

// sleep waits for d. It ends the try if the try has no time left.
func (e *env) sleep(d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-e.ctx.Done():
		must(e.ctx.Err())
	}
}

// poll calls f until it returns true or an error. It fails after patience.
func (e *env) poll(what string, f func() (bool, error)) error {
	began := time.Now()
	for pause := time.Millisecond; ; pause = min(2*pause, 5*time.Millisecond) {
		ok, err := f()
		if ok || err != nil {
			return err
		}
		if time.Since(began) > patience {
			return fmt.Errorf("%s: still not so after %v", what, patience)
		}
		e.sleep(pause)
	}
}

// within returns what f returns. It ends the try if f does not return.
func (e *env) within(what string, f func() error) error {
	done := make(chan error, 1)
	go func() { done <- e.try(f) }()
	return e.arrives(what, done)
}

// arrives returns what a goroutine sends. It ends the try if none comes.
func (e *env) arrives(what string, done <-chan error) error {
	t := time.NewTimer(patience)
	defer t.Stop()
	select {
	case err := <-done:
		return err
	case <-t.C:
		must(fmt.Errorf("%s does not return: %v have passed", what, patience))
	case <-e.ctx.Done():
		must(fmt.Errorf("%s does not return: %w", what, e.ctx.Err()))
	}
	panic("unreachable")
}

// each runs f for 0 to n-1 at once and joins what they return.
func (e *env) each(n int, f func(i int) error) error {
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { errs[i] = e.try(func() error { return f(i) }) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// is returns an error if got is not want.
func is(what string, got, want error) error {
	if errors.Is(got, want) {
		return nil
	}
	if got == nil {
		return fmt.Errorf("%s: no error, want %q", what, want)
	}
	return fmt.Errorf("%s: %q, want %q", what, got, want)
}
