package hasp

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/lazyctx"
)

// grace is how long a call may take to return after its context has ended. The
// driver's own error says more than a general one.
const grace = 10 * time.Millisecond

// spawn runs f on a goroutine that Close waits for. It returns false if Close has
// ended.
func (c *Client) spawn(f func()) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.spawnLocked(f)
}

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

// returned notes that a goroutine of spawn has ended.
func (c *Client) returned() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.calls--; c.calls == 0 {
		c.notifyLocked()
	}
}

// outcome is the answer of a call whose caller may leave before the call ends. Both
// swap met: the second of them handles the answer.
type outcome[T any] struct {
	met  atomic.Bool
	done chan struct{} // closed when v and err are set
	v    T
	err  error
}

// errLate is an outage: the grant came too late to be of use.
var errLate = fmt.Errorf("the grant came after its term had ended: %w", os.ErrDeadlineExceeded)

// errLeft is run's error if leave was closed before the call ended.
var errLeft = errors.New("left")

// call makes one call to the store, with the values of ctx but without its
// cancellation. It returns when the call is answered, when bound has passed, or
// when ctx ends, whichever is first. If the call ends after that, late receives its
// outcome. With late, call also returns when Close begins.
func call[T any](c *Client, ctx context.Context, bound time.Duration,
	f func(context.Context) (T, error), late func(T, error)) (T, error) {
	switch {
	case c.traits.Reach == backend.Process:
		return f(context.WithoutCancel(ctx))
	case c.endsWith(ctx):
		return direct(ctx, nil, bound, f)
	}

	// apart is cancelled when the call ends, not when its caller leaves.
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
// their context. The call ends with ctx, after d, or with quit if quit is not nil.
func direct[T any](ctx, quit context.Context, d time.Duration, f func(context.Context) (T, error)) (T, error) {
	within := lazyctx.WithTimeout(ctx, quit, d)
	defer within.End()
	v, err := f(within)
	switch {
	case err == nil || definite(err):
	case ctx.Err() != nil:
		err = ctx.Err()
	case within.Err() != nil && !errors.Is(err, os.ErrDeadlineExceeded):
		err = fmt.Errorf("%v: %w", err, noAnswer(d))
	default:
		err = plain(err, d)
	}
	return v, err
}

// run calls f with apart. It returns when f has returned, when leave or quit is
// closed, or a moment after apart has ended. In the last two cases it leaves f
// behind, and late receives f's outcome. After f has returned, run calls after. If
// the driver's calls end promptly, run calls f on the caller's goroutine, and never
// leaves it behind.
func run[T any](c *Client, apart context.Context, leave, quit <-chan struct{},
	f func(context.Context) (T, error), late func(T, error), after func()) (T, error) {
	if c.traits.Reach == backend.Process || c.traits.Ends == backend.EndsPromptly {
		return f(apart)
	}
	o := &outcome[T]{done: make(chan struct{})}
	if !c.spawn(func() {
		o.v, o.err = f(apart)
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
		err = apart.Err()
		timer := time.NewTimer(grace)
		defer timer.Stop()
		select {
		case <-o.done:
		case <-leave:
		case <-timer.C:
		}
	}
	// f may have returned at the same moment. If it came first, take its answer.
	if o.met.Swap(true) {
		<-o.done
		return o.v, o.err
	}
	var none T
	return none, err
}

// noAnswer returns an outage. It does not match context.DeadlineExceeded, because
// the caller's own deadline has not passed.
func noAnswer(d time.Duration) error {
	return fmt.Errorf("no answer from the store within %v: %w", d, os.ErrDeadlineExceeded)
}

// plain returns err so that it does not match a context's error. Many timeouts of
// the network match one, although the caller's own context has not ended.
func plain(err error, d time.Duration) error {
	if isContextError(err) {
		return fmt.Errorf("%v: %w", err, noAnswer(d))
	}
	return err
}

// plainDated is plain for a Waiter's error. It keeps the time at which the outage
// began, if err has one.
func plainDated(err error, d time.Duration) error {
	flat := plain(err, d)
	var dated interface{ Since() time.Time }
	if errors.As(flat, &dated) || !errors.As(err, &dated) {
		return flat
	}
	return datedError{flat, dated.Since()}
}

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

// acquire makes one attempt, which begins at start or later. If its outcome is
// unknown, the token is released in the background.
func (c *Client) acquire(ctx context.Context, cl backend.Claim, bound time.Duration, start instant) (*hold, error) {
	slept := c.clock.slept.Load()
	if c.traits.Reach != backend.Process {
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
		g, err = call(c, ctx, bound, c.tidy(cl, c.driver.Acquire), c.late(cl))
	}

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
	g, err := run(c, ctx, nil, nil, c.tidy(cl, c.waiter.Wait), c.late(cl), func() {})
	if err != nil {
		if ctx.Err() == nil {
			err = plainDated(err, cl.Timeout)
		}
		return nil, err
	}
	now, _ := c.readClock()
	return c.newHold(cl, g, start, now, slept)
}

// tidy returns f, followed by cleanUpUnknown.
func (c *Client) tidy(cl backend.Claim, f func(context.Context, backend.Claim) (backend.Grant, error)) func(context.Context) (backend.Grant, error) {
	return func(ctx context.Context) (backend.Grant, error) {
		g, err := f(ctx, cl)
		c.cleanUpUnknown(cl, err)
		return g, err
	}
}

// cleanUpUnknown has the token of cl released if err leaves the outcome unknown.
func (c *Client) cleanUpUnknown(cl backend.Claim, err error) {
	if err != nil && (!definite(err) || isContextError(err)) {
		c.reap(cl, reapTwice)
	}
}

// late returns a function that releases the token of cl if a grant, or a place in
// the driver's queue, came after its caller had left.
func (c *Client) late(cl backend.Claim) func(backend.Grant, error) {
	return func(_ backend.Grant, err error) {
		if err == nil || cl.Stays && errors.Is(err, ErrHeld) {
			c.reap(cl, reapOnce)
		}
	}
}

// readClock reads the clock, and how long the machine has slept. It notices a suspend
// since the last look, unless the store is in this process and was suspended, too.
func (c *Client) readClock() (instant, int64) {
	now := c.clock.now()
	if c.traits.Reach != backend.Process {
		now = c.clock.check()
	}
	return now, c.clock.slept.Load()
}
