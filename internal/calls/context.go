package calls

import (
	"context"
	"sync"
	"time"
)

// Context ends when one of its two parents ends, at its deadline, or when End is called, whichever
// is first. Otherwise it behaves like a context of context.WithDeadline. Its deadline needs no
// timer until a goroutine asks for its Done channel. Most calls to a store never ask.
type Context struct {
	parent   context.Context
	quit     context.Context
	deadline time.Time
	inherits bool // the deadline is the parent's, so the parent reports when it passes

	mu     sync.Mutex // guards the fields below
	native *native    // created when a caller first asks for Done; nil until then
	err    error      // why the context ended, if Err or End recorded that while native was nil
}

// native is a context of package context.
type native struct {
	context.Context
	end func()
}

// WithTimeout returns a Context that ends d from now at the latest. If quit is not nil, the Context
// also ends with context.Canceled when quit ends. The caller must call End.
func WithTimeout(parent, quit context.Context, d time.Duration) *Context {
	c := &Context{parent: parent, quit: quit, deadline: time.Now().Add(d)}
	if quit == nil {
		c.quit = context.Background()
	}
	if earlier, ok := parent.Deadline(); ok && earlier.Before(c.deadline) {
		c.deadline = earlier
		c.inherits = true
	}
	return c
}

// Split separates the cancellation of ctx from its deadline, for callers that enforce the deadline
// themselves and want no timer. ctx ends when one of the results parent and quit ends, or at the
// deadline. If ctx has no deadline, the result deadline is zero.
func Split(ctx context.Context) (parent, quit context.Context, deadline time.Time) {
	if c, ok := ctx.(*Context); ok {
		return c.parent, c.quit, c.deadline
	}
	deadline, _ = ctx.Deadline()
	return ctx, context.Background(), deadline
}

// End ends the context with context.Canceled, unless a caller has already seen another end.
func (c *Context) End() {
	c.mu.Lock()
	n := c.native
	if n == nil && c.err == nil {
		c.err = context.Canceled
	}
	c.mu.Unlock()

	// Do not hold mu here, because n.end may run code that calls Value.
	if n != nil {
		n.end()
	}
}

// Done returns a channel that is closed when the context ends. The first call creates the native
// context, which reports the end from then on.
func (c *Context) Done() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.native == nil {
		var ctx context.Context
		var cancel context.CancelFunc
		if c.inherits {
			ctx, cancel = context.WithCancel(c.parent) // needs no timer of its own
		} else {
			ctx, cancel = context.WithDeadline(c.parent, c.deadline)
		}

		stopQuit := context.AfterFunc(c.quit, cancel)
		end := func() {
			stopQuit()
			cancel()
		}
		c.native = &native{ctx, end}
		if c.err != nil { // Err or End has recorded an end before
			c.native.end()
		}
	}

	return c.native.Done()
}

// Deadline returns the time at which the context ends at the latest.
func (c *Context) Deadline() (time.Time, bool) { return c.deadline, true }

// Err returns nil until the context has ended.
func (c *Context) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.err != nil:
		return c.err
	case c.native != nil:
		return c.native.Err()
	}

	// If native is nil, there is no timer, so look at the clock. Keep the answer, because an error
	// must not change once a caller has seen it.
	c.err = c.parent.Err()
	switch {
	case c.err != nil:
	case c.quit.Err() != nil:
		c.err = context.Canceled
	case !c.inherits && !time.Now().Before(c.deadline):
		c.err = context.DeadlineExceeded
	}

	return c.err
}

// Value asks the native context if there is one, and otherwise the parent. In this way package
// context finds that context, and attaches contexts derived from c to it without a goroutine.
func (c *Context) Value(key any) any {
	c.mu.Lock()
	n := c.native
	c.mu.Unlock()

	// Do not hold mu here, because the parent's Value may run any code.
	if n == nil {
		return c.parent.Value(key)
	}
	return n.Value(key)
}
