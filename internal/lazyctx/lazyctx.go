// Package lazyctx provides a context whose deadline needs no timer until a goroutine asks for its
// Done channel. Most calls to a store never ask.
package lazyctx

import (
	"context"
	"sync"
	"time"
)

// Context ends with its parent, with its second parent quit, at its deadline, or when End is
// called, whichever is first. Otherwise it behaves like a context of context.WithDeadline.
type Context struct {
	parent   context.Context
	quit     context.Context // may be nil
	deadline time.Time

	// parentsDeadline says that deadline is the parent's, so the context needs no timer: it ends
	// when the parent ends.
	parentsDeadline bool

	mu     sync.Mutex // guards all below
	native *native    // made when a caller first asks for Done; nil until then
	err    error      // why the context ended, if Err or End recorded that while native was nil
}

// native is a context of package context.
type native struct {
	context.Context
	cancel   context.CancelFunc
	stopQuit func() bool // ends the watch of quit; nil if quit is nil
}

// WithTimeout returns a Context that ends d from now at the latest. If quit is not nil, the Context
// also ends with context.Canceled when quit ends. The caller must call End.
func WithTimeout(parent, quit context.Context, d time.Duration) *Context {
	c := &Context{parent: parent, quit: quit, deadline: time.Now().Add(d)}
	if earlier, ok := parent.Deadline(); ok && earlier.Before(c.deadline) {
		c.deadline, c.parentsDeadline = earlier, true
	}
	return c
}

// Split separates the cancellation of ctx from its deadline, for callers that enforce the deadline
// themselves and want no timer. If ctx is a Context, it ends with parent, with quit, or at the
// deadline; the deadline is zero if it is the parent's. Otherwise lazy is false, and parent is ctx
// itself. quit is never nil.
func Split(ctx context.Context) (parent, quit context.Context, deadline time.Time, lazy bool) {
	c, lazy := ctx.(*Context)
	if !lazy {
		return ctx, context.Background(), deadline, false
	}

	quit = c.quit
	if quit == nil {
		quit = context.Background()
	}
	if !c.parentsDeadline {
		deadline = c.deadline
	}
	return c.parent, quit, deadline, true
}

// End ends the context with context.Canceled, unless a caller has already seen another end.
func (c *Context) End() {
	c.mu.Lock()
	n := c.native
	if n == nil && c.err == nil {
		c.err = context.Canceled
	}
	c.mu.Unlock()

	// Not under mu: the end of native may run code that calls Value.
	if n != nil && n.stopQuit != nil {
		n.stopQuit()
	}
	if n != nil {
		n.cancel()
	}
}

// makeNative returns the native context, which it makes at its first call.
func (c *Context) makeNative() context.Context {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.native != nil {
		return c.native
	}

	n := new(native)
	if c.parentsDeadline {
		n.Context, n.cancel = context.WithCancel(c.parent) // needs no timer of its own
	} else {
		n.Context, n.cancel = context.WithDeadline(c.parent, c.deadline)
	}

	// End native if Err or End has recorded an end before.
	if c.err != nil {
		n.cancel()
	} else if c.quit != nil {
		n.stopQuit = context.AfterFunc(c.quit, n.cancel)
	}
	c.native = n
	return n
}

// Done returns a channel that is closed when the context ends.
func (c *Context) Done() <-chan struct{} { return c.makeNative().Done() }

// Deadline returns when the context ends at the latest.
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

	// Without native there is no timer, so the clock decides. The answer is kept: an error must not
	// change once a caller has seen it.
	switch c.err = c.parent.Err(); {
	case c.err != nil:
	case c.quit != nil && c.quit.Err() != nil:
		c.err = context.Canceled
	case !c.parentsDeadline && !time.Now().Before(c.deadline):
		c.err = context.DeadlineExceeded
	}
	return c.err
}

// Value returns the parent's value, through the native context if there is one. In this way package
// context finds native, and attaches a context derived from c to native without a goroutine.
func (c *Context) Value(key any) any {
	c.mu.Lock()
	n := c.native
	c.mu.Unlock()

	// Not under mu: the parent's Value may be any code.
	if n == nil {
		return c.parent.Value(key)
	}
	return n.Value(key)
}
