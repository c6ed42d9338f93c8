package conformance

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"runtime/debug"
	"runtime/pprof"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hasplock/hasp/backend"
)

// env has the steps and the state of one try of a clause.
type env struct {
	*suite
	allowance
	ctx context.Context

	mu sync.Mutex // guards the fields below
	// Maps the token of each hold to the function that releases it.
	held     map[string]func(ctx context.Context)
	preludes []func(ctx context.Context) // the end of the try calls them before the releases
	cleanups []func()                    // the end of the try calls them after the releases
}

// try runs f. If a step of f fails, try returns the error of that step. A panic of the driver or of
// the check is also an error.
func (e *env) try(f func()) (err error) {
	defer func() {
		switch p := recover().(type) {
		case nil: // f has returned
		case abort: // a step of f has failed: see verdict.go
			err = p.error
		default:
			err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
		}
	}()
	f()
	return nil
}

// onEnd registers f, so that the end of the try calls f after it has released the holds. The
// function that was registered last is called first.
func (e *env) onEnd(f func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.cleanups = append(e.cleanups, f)
}

// beforeReleases registers f, so that the end of the try calls f before it releases holds. The
// function that was registered first is called first.
func (e *env) beforeReleases(f func(ctx context.Context)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.preludes = append(e.preludes, f)
}

// close performs the end of the try. It ends Waits, releases holds and calls the registered
// functions, even if the context of the try has ended.
func (e *env) close() {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(e.ctx), e.timeout)
	defer cancel()

	// These functions repair the links that the try has cut, so that the releases below reach the
	// store. They also end Waits, which could otherwise get the keys that are released.
	e.mu.Lock()
	preludes := e.preludes
	e.mu.Unlock()
	for _, f := range preludes {
		f(ctx)
	}

	// Read e.held only after the Waits have ended, because each Wait may have registered a hold.
	e.mu.Lock()
	held := maps.Clone(e.held)
	cleanups := e.cleanups
	e.mu.Unlock()

	// After the timeout the other holds stay until their terms end, which harms no other clause.
	for _, release := range held {
		if ctx.Err() == nil {
			release(ctx)
		}
	}

	for _, f := range slices.Backward(cleanups) {
		f()
	}
}

// key returns a key that no other call returns.
func (e *env) key() string { return fmt.Sprintf("hasp-conformance-%s-%d", e.id, e.serial.Add(1)) }

// claim returns a claim for a new key.
func (e *env) claim(ttl time.Duration) backend.Claim { return e.claimOf(e.key(), ttl) }

// claimOf returns the claim of a new attempt at key.
func (e *env) claimOf(key string, ttl time.Duration) backend.Claim {
	// The token begins with a letter, so that a change of case yields another token.
	token := "A" + rand.Text()
	return backend.Claim{Key: key, Token: token,
		Owner: "owner-" + strings.ToLower(token[len(token)-6:]),
		TTL:   ttl, Timeout: e.timeout}
}

func fencedClaim(c backend.Claim) backend.Claim { c.Fenced = true; return c }

// fencedIfCan returns c. If the driver has fences, the result asks for a fence.
func (e *env) fencedIfCan(c backend.Claim) backend.Claim { c.Fenced = e.traits.Fenced; return c }

// endingAfter returns a context that ends after d, or when the try ends.
func (e *env) endingAfter(d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(e.ctx, d)
	e.onEnd(cancel)
	return ctx
}

// deadContext returns a context that was cancelled.
func (e *env) deadContext() context.Context {
	ctx, cancel := context.WithCancel(e.ctx)
	cancel()
	return ctx
}

// sleep sleeps for d. If the context of the try ends first, the try ends.
func (e *env) sleep(d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-e.ctx.Done():
		must(e.ctx.Err())
	}
}

// until calls f until f returns true. If that takes too long, the try ends with an error that
// begins with what.
func (e *env) until(what string, f func() bool) {
	e.retry(what, func() error {
		if !f() {
			return errors.New("it is not so")
		}
		return nil
	})
}

// retry calls f until f returns no error. If that takes longer than e.patience, the try ends with
// the last error of f.
func (e *env) retry(what string, f func() error) {
	began := time.Now()
	for pause := time.Millisecond; ; {
		err := f()
		if err == nil {
			return
		}
		waited := time.Since(began)
		require(waited <= e.patience, "%s: not within %v: %w", what, e.patience, err)
		e.sleep(pause)

		// Keep the pause near the drift of the time waited. A longer pause could hide that a key
		// was free too early.
		pause = min(2*pause, max(5*time.Millisecond, waited/100))
	}
}

// begin runs f in the background. The channel that it returns receives the error of f, or the error
// of a step of f that failed.
func (e *env) begin(f func() error) <-chan error {
	done := make(chan error, 1)
	go func() { done <- e.try(func() { must(f()) }) }()
	return done
}

// within calls f and returns its error. If f does not return within e.patience, the try ends.
func (e *env) within(what string, f func() error) error { return e.arrives(what, e.begin(f)) }

// arrives waits for the end of a call, and returns the error that done receives then. If nothing
// arrives within e.patience, the try ends.
func (e *env) arrives(what string, done <-chan error) error {
	t := time.NewTimer(e.patience)
	defer t.Stop()
	select {
	case err := <-done:
		return err
	case <-t.C:
		fail("%s does not return within %v", what, e.patience)
	case <-e.ctx.Done():
		fail("%s does not return: %w", what, e.ctx.Err())
	}
	panic("unreachable") // fail panics
}

// each calls f(0) to f(n-1) at the same time, and waits for all of them. It returns the errors of
// failed steps, but joins at most three of them, because the others mostly say the same.
func (e *env) each(n int, f func(i int)) error {
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { errs[i] = e.try(func() { f(i) }) })
	}
	wg.Wait()

	failures := slices.DeleteFunc(errs, func(err error) bool { return err == nil })
	return errors.Join(failures[:min(len(failures), 3)]...)
}

// labelName is the name of a profiler label on the goroutines of a clause. A goroutine inherits the
// labels of the goroutine that starts it. So the suite can tell the leaks of a clause from other
// goroutines of the program.
const labelName = "hasp-conformance"

// stacks returns the stacks of all goroutines with this label.
func stacks(label string) string {
	var profile bytes.Buffer
	pprof.Lookup("goroutine").WriteTo(&profile, 1) // 1: as text, with labels
	mark := fmt.Sprintf("%q:%q", labelName, label)
	var found []string
	for stack := range strings.SplitSeq(profile.String(), "\n\n") {
		if strings.Contains(stack, mark) {
			found = append(found, stack)
		}
	}
	return strings.Join(found, "\n\n")
}

// leaves runs f, and returns an error if goroutines that f started do not end. It gives these
// goroutines time, because a goroutine may report its end a moment before it ends.
func (e *env) leaves(f func()) error {
	label := fmt.Sprintf("%s leak %d", e.id, e.serial.Add(1))

	done := make(chan error, 1)
	go pprof.Do(e.ctx, pprof.Labels(labelName, label), func(context.Context) {
		done <- e.try(func() {
			// This goroutine has the label, so its stack must be found.
			if stacks(label) == "" {
				must(&skipError{"the profiles of this Go release do not contain labels"})
			}
			f()
		})
	})

	if err := <-done; err != nil {
		return err
	}
	return e.try(func() {
		e.retry("the end of all goroutines", func() error {
			if left := stacks(label); left != "" {
				return fmt.Errorf("left behind:\n%s", left)
			}
			return nil
		})
	})
}
