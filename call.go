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

// grace is how long a driver whose context has ended is waited for, so that
// its own account of what happened is heard rather than a general one.
const grace = 10 * time.Millisecond

// spawn runs f on a goroutine that Close waits for, or says that Close has
// ended.
func (c *Client) spawn(f func()) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.spawnLocked(f)
}

func (c *Client) spawnLocked(f func()) bool {
	if c.gone {
		return false
	}
	c.calls++
	go func() {
		defer c.returned()
		f()
	}()
	return true
}

// returned is the end of what c.calls counts.
func (c *Client) returned() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.calls--; c.calls == 0 {
		c.notify()
	}
}

// outcome is where a call and its caller meet: one of them comes second, and
// that one knows what to do with the answer.
type outcome[T any] struct {
	met  atomic.Bool
	done chan struct{}
	v    T
	err  error
}

// errLate is an outage: what the store granted is of no use.
var errLate = fmt.Errorf("the grant came after its term had ended: %w", os.ErrDeadlineExceeded)

// errLeft is run's answer to a caller that left before the call ended.
var errLeft = errors.New("left")

// call makes one call to the store, with the values of ctx but not its end,
// and returns when it is answered, when bound has passed, or when ctx ends,
// whichever is first. If the caller has left by the time the call ends, late
// is told its outcome; a call with late is also left when Close begins.
func call[T any](c *Client, ctx context.Context, bound time.Duration,
	f func(context.Context) (T, error), late func(T, error)) (T, error) {
	switch {
	case c.traits.Reach == backend.Process:
		return f(context.WithoutCancel(ctx))
	case c.endsWith(ctx):
		return direct(ctx, bound, f)
	}
	apart, cancel := context.WithTimeout(context.WithoutCancel(ctx), bound) // cancelled when the call ends, not when its caller leaves
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

// endsWith reports whether the driver ends a call with ctx, so that nobody
// needs to leave it behind.
func (c *Client) endsWith(ctx context.Context) bool {
	ends := c.traits.Ends
	return ends == backend.EndsPromptly || ends == backend.EndsByDeadline && ctx.Done() == nil
}

// direct makes a call on the caller's goroutine, for a driver that ends it
// when it is told to.
func direct[T any](ctx context.Context, d time.Duration, f func(context.Context) (T, error)) (T, error) {
	within := lazyctx.WithTimeout(ctx, d)
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

// run has f called with apart, and returns when f has, when leave or quit is
// closed, or a moment after apart has ended. When f has returned and its answer
// can be seen, after is called. A driver that needs no leaving behind is called
// directly.
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
	if o.met.Swap(true) {
		<-o.done
		return o.v, o.err
	}
	var none T
	return none, err
}

// noAnswer is an outage. It does not match context.DeadlineExceeded, which
// would read as if the caller's time were up.
func noAnswer(d time.Duration) error {
	return fmt.Errorf("no answer from the store within %v: %w", d, os.ErrDeadlineExceeded)
}

// plain is err if it does not match a context's error. Many timeouts of the
// network do, and would read as if the caller's time were up.
func plain(err error, d time.Duration) error {
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
		return fmt.Errorf("%v: %w", err, noAnswer(d))
	}
	return err
}

// plainDated is plain of a Waiter's error, which may say since when the
// outage has lasted.
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

func (e datedError) Unwrap() error    { return e.error }
func (e datedError) Since() time.Time { return e.since }

// definite reports whether err says what the store did, which is nothing.
func definite(err error) bool {
	return errors.Is(err, ErrHeld) || errors.Is(err, ErrLost) || errors.Is(err, ErrInvalid) || errors.Is(err, errUnsupported)
}

// acquire makes one attempt, which began at start or later. What it may leave
// behind is released in the background.
func (c *Client) acquire(ctx context.Context, cl backend.Claim, bound time.Duration, start instant) (*hold, error) {
	slept := c.clock.slept.Load()
	if c.traits.Reach != backend.Process {
		start, slept = c.look()
	}
	var g backend.Grant
	var err error
	switch {
	case c.traits.Reach == backend.Process:
		g, err = c.driver.Acquire(context.WithoutCancel(ctx), cl)
	case c.endsWith(ctx):
		g, err = direct(ctx, bound, func(within context.Context) (backend.Grant, error) {
			g, err := c.driver.Acquire(within, cl)
			c.tidied(cl, err)
			return g, err
		})
	default:
		g, err = call(c, ctx, bound, c.tidy(cl, c.driver.Acquire), c.late(cl))
	}
	now, _ := c.look()
	if err == nil || definite(err) {
		c.measured(now.sub(start))
	}
	if err != nil {
		return nil, err
	}
	return c.newHold(cl, g, start, now, slept)
}

// await has the driver wait until it holds the key for cl or ctx ends.
func (c *Client) await(ctx context.Context, cl backend.Claim) (*hold, error) {
	start, slept := c.look()
	g, err := run(c, ctx, nil, nil, c.tidy(cl, c.waiter.Wait), c.late(cl), func() {})
	if err != nil {
		if ctx.Err() == nil {
			err = plainDated(err, cl.Timeout)
		}
		return nil, err
	}
	now, _ := c.look()
	return c.newHold(cl, g, start, now, slept)
}

// tidy is f with what an unknown outcome may have left released.
func (c *Client) tidy(cl backend.Claim, f func(context.Context, backend.Claim) (backend.Grant, error)) func(context.Context) (backend.Grant, error) {
	return func(ctx context.Context) (backend.Grant, error) {
		g, err := f(ctx, cl)
		c.tidied(cl, err)
		return g, err
	}
}

func (c *Client) tidied(cl backend.Claim, err error) {
	if err != nil && !definite(err) {
		c.reap(cl, reapTwice)
	}
}

// late releases a grant that came after its caller had left, or a place.
func (c *Client) late(cl backend.Claim) func(backend.Grant, error) {
	return func(_ backend.Grant, err error) {
		if err == nil || cl.Stays && errors.Is(err, ErrHeld) {
			c.reap(cl, reapOnce)
		}
	}
}

// newHold makes a hold of a grant, unless its term has ended on the way.
func (c *Client) newHold(cl backend.Claim, g backend.Grant, start, now instant, slept int64) (*hold, error) {
	term := cl.TTL - backend.Drift(cl.TTL)
	until := start.add(term)
	if !g.Until.IsZero() {
		until = c.clock.at(g.Until, slept)
	}
	if now >= until {
		c.reap(cl, reapOnce)
		return nil, errLate
	}
	h := &hold{c: c, claim: cl, fence: g.Fence, granted: now, doubted: -1, limit: never, index: -1}
	h.confirmed = min(max(start, until.add(-term)), now)
	since := h.confirmed
	if until.add(-term) < start {
		since = now // a Waiter's grant of less than the whole term, which began nobody knows when
		if c.traits.Ordered {
			h.confirmed = now // its coming is the store's word, whenever the wait began
		}
	}
	h.due = since.add(spread(until.sub(since) / renewalsPerT))
	h.deadline.Store(int64(until))
	return h, nil
}

// look reads the clock, and notices a suspend if the store's time went on
// during it. It also returns what the clock has slept.
func (c *Client) look() (instant, int64) {
	now := c.clock.now()
	if c.traits.Reach != backend.Process {
		now = c.clock.look()
	}
	return now, c.clock.slept.Load()
}
