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

// env is what one try of a clause works with.
type env struct {
	*suite
	allowance
	ctx context.Context

	mu      sync.Mutex                           // guards all below
	held    map[string]func(ctx context.Context) // the release of each hold, by its token
	first   []func(ctx context.Context)          // before the releases
	cleanup []func()
}

func newEnv(ctx context.Context, s *suite, p allowance) *env {
	return &env{suite: s, allowance: p, ctx: ctx, held: map[string]func(ctx context.Context){}}
}

// try runs f and returns the error of the step that failed in it.
func (e *env) try(f func()) (err error) {
	defer func() {
		switch p := recover().(type) {
		case nil:
		case abort:
			err = p.error
		default:
			err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
		}
	}()
	f()
	return nil
}

// onEnd registers f for the end of the try. The last registered function runs
// first.
func (e *env) onEnd(f func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.cleanup = append(e.cleanup, f)
}

// beforeReleases registers f for the end of the try, before its holds are released. The
// first registered function runs first.
func (e *env) beforeReleases(f func(ctx context.Context)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.first = append(e.first, f)
}

// close ends the waits of the try, releases its holds and runs its clean-up, even
// if its context has ended.
func (e *env) close() {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(e.ctx), e.timeout)
	defer cancel()

	// First make links work again, so that releases arrive. Then end Waits, so that they do not get
	// the keys that are released below.
	e.mu.Lock()
	first := e.first
	e.mu.Unlock()
	for _, f := range first {
		f(ctx)
	}

	// Only now read e.held, because a Wait that ended just now may have registered a hold.
	e.mu.Lock()
	held, cleanup := maps.Clone(e.held), e.cleanup
	e.mu.Unlock()

	for _, release := range held {
		if ctx.Err() == nil {
			release(ctx)
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
		TTL: ttl, Timeout: e.timeout}
}

// fencedClaim returns c with a request for a fence.
func fencedClaim(c backend.Claim) backend.Claim {
	c.Fenced = true
	return c
}

// fencedIfCan returns c with a request for a fence if the driver has fences.
func (e *env) fencedIfCan(c backend.Claim) backend.Claim {
	c.Fenced = e.traits.Fenced
	return c
}

// endingAfter returns a context that ends after d, or with the try.
func (e *env) endingAfter(d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(e.ctx, d)
	e.onEnd(cancel)
	return ctx
}

// deadContext returns a context that has ended.
func (e *env) deadContext() context.Context {
	ctx, cancel := context.WithCancel(e.ctx)
	cancel()
	return ctx
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

// until waits until f returns true.
func (e *env) until(what string, f func() bool) {
	e.retry(what, func() error {
		if !f() {
			return errors.New("it is not so")
		}
		return nil
	})
}

// retry calls f until it returns no error.
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
		pause = min(2*pause, max(5*time.Millisecond, waited/100)) // exact to less than the drift
	}
}

// begin runs f in the background and returns the channel of its error.
func (e *env) begin(f func() error) <-chan error {
	done := make(chan error, 1)
	go func() { done <- e.try(func() { must(f()) }) }()
	return done
}

// within returns what f returns. It ends the try if f does not return.
func (e *env) within(what string, f func() error) error { return e.arrives(what, e.begin(f)) }

// arrives returns the error that a goroutine sends. It ends the try if none comes in time.
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
	panic("unreachable")
}

// untilDone waits for the end of ctx.
func (e *env) untilDone(ctx context.Context, what string) {
	must(e.within(what, func() error { <-ctx.Done(); return nil }))
}

// each runs f for 0 to n-1 at once and joins the errors of the steps that failed.
func (e *env) each(n int, f func(i int)) error {
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { errs[i] = e.try(func() { f(i) }) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// labelName is the profiler label of the goroutines of a clause. A goroutine inherits the labels of
// the goroutine that starts it, so the leaks of a clause can be told from other goroutines of the
// program.
const labelName = "hasp-conformance"

// stacks returns the stacks of all goroutines with a label.
func stacks(label string) string {
	var all bytes.Buffer
	pprof.Lookup("goroutine").WriteTo(&all, 1)
	mark := fmt.Sprintf("%q:%q", labelName, label)
	var found []string
	for g := range strings.SplitSeq(all.String(), "\n\n") {
		if strings.Contains(g, mark) {
			found = append(found, g)
		}
	}
	return strings.Join(found, "\n\n")
}

// leaves runs f and returns an error if goroutines that f started do not end. It
// gives them time, because a goroutine may signal its end shortly before it ends.
func (e *env) leaves(f func()) error {
	label := fmt.Sprintf("%s leak %d", e.id, e.serial.Add(1))

	done := make(chan error, 1)
	go pprof.Do(e.ctx, pprof.Labels(labelName, label), func(context.Context) {
		done <- e.try(func() {
			if stacks(label) == "" { // this goroutine's own
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
