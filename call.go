package hasp

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/lazyctx"
)

// grace is how long a call may take to return after its context has ended. It lets
// the driver return its own error, which says more than a general one.
const grace = 10 * time.Millisecond

// spawn runs f on a goroutine that Close waits for. It returns false if Close has
// ended.
func (c *Client) spawn(f func()) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.spawnLocked(f)
}

// spawnLocked is spawn under mu.
func (c *Client) spawnLocked(f func()) bool {
	if c.stopped {
		return false
	}
	c.calls++
	go func() {
		defer c.returned()
		f()
	}()
	return true
}

// returned records that a goroutine of spawn has ended.
func (c *Client) returned() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.calls--; c.calls == 0 {
		c.notifyLocked()
	}
}

// outcome is the answer of a call whose caller may leave before the call ends. The
// caller and the call each swap met once. The second of them handles the answer.
type outcome[T any] struct {
	met  atomic.Bool   // one of the two has finished
	done chan struct{} // closed when v and err are set
	v    T
	err  error
}

// errLate is an outage: the grant was too late to be used.
var errLate = fmt.Errorf("the grant came after its term had ended: %w", os.ErrDeadlineExceeded)

// errLeft is run's error if leave was closed before the call ended.
var errLeft = errors.New("left")

// call makes one call to the store, with the values of ctx. It returns when the store
// answers, when bound has passed, or when ctx ends, whichever is first.
//
// If the driver's calls end with ctx, call runs f on the caller's goroutine. Otherwise
// the end of ctx does not interrupt f. If f returns after call has returned, late gets
// the outcome. With late, call also returns when Close begins.
func call[T any](c *Client, ctx context.Context, bound time.Duration,
	f func(context.Context) (T, error), late func(T, error)) (T, error) {
	switch {
	case c.traits.Reach == backend.Process:
		return f(context.WithoutCancel(ctx))
	case c.endsWith(ctx):
		return direct(ctx, nil, bound, f)
	}

	// The call outlasts a caller that leaves: apart is cancelled when the call ends.
	apart, cancel := context.WithTimeout(context.WithoutCancel(ctx), bound)
	var quit <-chan struct{}
	if late != nil {
		quit = c.closing.Done()
	}

	v, err := run(c, apart, ctx.Done(), quit, func(apart context.Context) (T, error) {
		v, err := f(apart)
		return v, plain(err, bound)
	}, late, cancel)

	switch err {
	case errLeft:
		err = ctx.Err()
	case context.DeadlineExceeded:
		err = noAnswer(bound)
	}
	return v, err
}

// endsWith reports whether the driver's calls return when ctx ends. Then call runs
// them on the caller's goroutine.
func (c *Client) endsWith(ctx context.Context) bool {
	ends := c.traits.Ends
	return ends == backend.EndsPromptly || ends == backend.EndsByDeadline && ctx.Done() == nil
}

// direct makes a call on the caller's goroutine, for a driver whose calls end with
// their context. The call ends with ctx, after d, or with quit. Quit may be nil.
func direct[T any](ctx, quit context.Context, d time.Duration, f func(context.Context) (T, error)) (T, error) {
	within := lazyctx.WithTimeout(ctx, quit, d)
	defer within.End()
	v, err := f(within)

	// An error that the end of a context caused must say which context.
	switch {
	case err == nil || definite(err):
	case ctx.Err() != nil:
		err = ctx.Err() // the caller's
	case within.Err() != nil && !errors.Is(err, os.ErrDeadlineExceeded):
		err = fmt.Errorf("%v: %w", err, noAnswer(d))
	default:
		err = plain(err, d)
	}
	return v, err
}

// run calls f with apart. It returns when f has returned, when leave or quit is
// closed, or a moment after apart has ended. If f has not returned by then, late gets
// its outcome, unless late is nil. After f has returned, run calls after. If the
// driver's calls end promptly, run calls f on the caller's goroutine and waits for it.
func run[T any](c *Client, apart context.Context, leave, quit <-chan struct{},
	f func(context.Context) (T, error), late func(T, error), after func()) (T, error) {
	if c.traits.Reach == backend.Process || c.traits.Ends == backend.EndsPromptly {
		return f(apart)
	}

	o := &outcome[T]{done: make(chan struct{})}
	if !c.spawn(func() {
		o.v, o.err = f(apart)
		// If the caller has left, the outcome is handled here.
		if o.met.Swap(true) && late != nil {
			late(o.v, o.err)
		}
		close(o.done)
		after()
	}) {
		after()
		var none T
		return none, ErrClosed
	}

	var err error
	select {
	case <-o.done:
		return o.v, o.err
	case <-leave:
		err = errLeft
	case <-quit:
		err = ErrClosed
	case <-apart.Done():
		// f has the same context, and should return soon.
		err = apart.Err()
		timer := time.NewTimer(grace)
		defer timer.Stop()
		select {
		case <-o.done:
		case <-leave:
		case <-timer.C:
		}
	}

	// f may have returned at the same moment. If it swapped met first, its answer counts.
	if o.met.Swap(true) {
		<-o.done
		return o.v, o.err
	}
	var none T
	return none, err
}

// noAnswer returns the error of an outage. It does not match
// context.DeadlineExceeded, because the caller's own deadline has not passed.
func noAnswer(d time.Duration) error {
	return fmt.Errorf("no answer from the store within %v: %w", d, os.ErrDeadlineExceeded)
}

// plain returns err, wrapped if need be so that it matches no context's error. Many
// timeouts of the network match context.DeadlineExceeded, although the caller's own
// context has not ended.
func plain(err error, d time.Duration) error {
	if isContextError(err) {
		return fmt.Errorf("%v: %w", err, noAnswer(d))
	}
	return err
}

// plainDated is plain for a Waiter's error. If err says when the outage began, so
// does the result.
func plainDated(err error, d time.Duration) error {
	flat := plain(err, d)
	var dated interface{ Since() time.Time }
	if errors.As(flat, &dated) || !errors.As(err, &dated) {
		return flat
	}
	return datedError{flat, dated.Since()}
}

// datedError is an error that says when its outage began.
type datedError struct {
	error
	since time.Time
}

func (e datedError) Unwrap() error { return e.error }

func (e datedError) Since() time.Time { return e.since }

// isContextError reports whether err is, or wraps, the error of a context that
// has ended.
func isContextError(err error) bool {
	return errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}

// definite reports whether err proves that the store changed nothing.
func definite(err error) bool {
	return errors.Is(err, ErrHeld) || errors.Is(err, ErrLost) || errors.Is(err, ErrInvalid) || errors.Is(err, errUnsupported)
}

// claim returns the claim of a new attempt.
func (c *Client) claim(r *request, token string) backend.Claim {
	ttl := r.ttl
	if 0 < r.maxHold && r.maxHold < ttl {
		// If the holder dies, the next caller gets the key soon after the max hold.
		ttl = min(ttl, termFor(r.maxHold))
	}
	return backend.Claim{Key: c.opts.Prefix + r.key, Token: token, Owner: c.opts.Owner,
		TTL: ttl, Timeout: c.opts.Timeout, Fenced: r.fenced, Renewed: !r.noRenew}
}

// termFor returns a term of which at least d is left after the drift is subtracted.
func termFor(d time.Duration) time.Duration {
	return max(d+d/99+3*time.Millisecond, MinTTL)
}

// newToken returns a token of 128 random bits.
func newToken() string {
	var b [16]byte
	var text [22]byte
	rand.Read(b[:])
	base64.RawURLEncoding.Encode(text[:], b[:])
	return string(text[:])
}

// acquire makes one attempt. If its outcome is unknown, the token is released in the
// background. Start is the present time, as far as the caller has read the clock.
func (c *Client) acquire(ctx context.Context, cl backend.Claim, bound time.Duration, start instant) (*hold, error) {
	slept := c.clock.slept.Load()
	if c.traits.Reach != backend.Process {
		// A suspend before the call must not count as a part of the term.
		start, slept = c.readClock()
	}

	var g backend.Grant
	var err error
	switch {
	case c.traits.Reach == backend.Process:
		g, err = c.driver.Acquire(context.WithoutCancel(ctx), cl)
	case c.endsWith(ctx):
		g, err = direct(ctx, c.closing, bound, func(within context.Context) (backend.Grant, error) {
			g, err := c.driver.Acquire(within, cl)
			c.cleanUpUnknown(cl, err)
			return g, err
		})
	default:
		g, err = call(c, ctx, bound, c.withCleanUp(cl, c.driver.Acquire), c.releaseLate(cl))
	}

	// Read after the call, which may have lasted through a suspend.
	now, _ := c.readClock()
	if err == nil || definite(err) {
		c.measured(now.sub(start))
	}
	if err != nil {
		return nil, err
	}
	return c.newHold(cl, g, start, now, slept)
}

// await calls the driver's Wait for cl. If its outcome is unknown, the token is
// released in the background.
func (c *Client) await(ctx context.Context, cl backend.Claim) (*hold, error) {
	start, slept := c.readClock()
	g, err := run(c, ctx, nil, nil, c.withCleanUp(cl, c.waiter.Wait), c.releaseLate(cl), func() {})
	if err != nil {
		if ctx.Err() == nil {
			err = plainDated(err, cl.Timeout)
		}
		return nil, err
	}
	now, _ := c.readClock()
	return c.newHold(cl, g, start, now, slept)
}

// withCleanUp returns f, followed by cleanUpUnknown.
func (c *Client) withCleanUp(cl backend.Claim, f func(context.Context, backend.Claim) (backend.Grant, error)) func(context.Context) (backend.Grant, error) {
	return func(ctx context.Context) (backend.Grant, error) {
		g, err := f(ctx, cl)
		c.cleanUpUnknown(cl, err)
		return g, err
	}
}

// cleanUpUnknown releases the token of cl in the background if err leaves the outcome
// unknown. That includes an error of a context joined with a definite error.
func (c *Client) cleanUpUnknown(cl backend.Claim, err error) {
	if err != nil && (!definite(err) || isContextError(err)) {
		c.reap(cl, reapTwice)
	}
}

// releaseLate returns a function for an outcome that came after its caller had left.
// It releases the token of cl if that has the key, or a place in the driver's queue.
func (c *Client) releaseLate(cl backend.Claim) func(backend.Grant, error) {
	return func(_ backend.Grant, err error) {
		if err == nil || cl.Stays && errors.Is(err, ErrHeld) {
			c.reap(cl, reapOnce)
		}
	}
}

// readClock returns the present time, and how long the machine has slept. It notices
// a suspend, unless the store is in this process: then the store slept as well.
func (c *Client) readClock() (instant, int64) {
	now := c.clock.now()
	if c.traits.Reach != backend.Process {
		now = c.clock.check()
	}
	return now, c.clock.slept.Load()
}
