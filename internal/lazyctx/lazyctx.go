// Package lazyctx has a context with a deadline that costs little where nobody
// waits for its end: it needs a timer only once it is asked for Done.
package lazyctx

import (
	"context"
	"sync"
	"time"
)

// Context ends with its parent, with quit, at its deadline, or by End,
// whichever is first. It is like one of context.WithDeadline.
type Context struct {
	parent   context.Context
	quit     context.Context // nil if there is none
	deadline time.Time
	parents  bool // the deadline, of which the parent tells

	mu     sync.Mutex // guards all below
	native context.Context
	cancel context.CancelFunc
	unquit func() bool // ends the wait for quit
	over   error       // what was told before there was one
}

// WithTimeout returns a Context that ends d from now at the latest, and with
// context.Canceled when quit ends, if quit is not nil. Its maker calls End.
func WithTimeout(parent, quit context.Context, d time.Duration) *Context {
	c := &Context{parent: parent, quit: quit, deadline: time.Now().Add(d)}
	if of, ok := parent.Deadline(); ok && of.Before(c.deadline) {
		c.deadline, c.parents = of, true
	}
	return c
}

// Split separates the cancellation of ctx from its deadline, for callers that
// enforce the deadline themselves and want no timer. One of the two channels is
// closed when ctx is cancelled; either may be nil. The time is zero if the
// channels also report the deadline.
func Split(ctx context.Context) (done, quit <-chan struct{}, deadline time.Time) {
	c, ok := ctx.(*Context)
	if !ok {
		return ctx.Done(), nil, time.Time{}
	}
	if c.quit != nil {
		quit = c.quit.Done()
	}
	if c.parents {
		return c.parent.Done(), quit, time.Time{}
	}
	return c.parent.Done(), quit, c.deadline
}

// End ends the context with context.Canceled, unless its end was seen before.
func (c *Context) End() {
	c.mu.Lock()
	cancel, unquit := c.cancel, c.unquit
	if cancel == nil && c.over == nil {
		c.over = context.Canceled
	}
	c.mu.Unlock()
	if unquit != nil {
		unquit()
	}
	if cancel != nil {
		cancel() // not under mu: it may call Value
	}
}

// made returns the native context that the end is told by.
func (c *Context) made() context.Context {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.native == nil {
		if c.parents {
			c.native, c.cancel = context.WithCancel(c.parent)
		} else {
			c.native, c.cancel = context.WithDeadline(c.parent, c.deadline)
		}
		if c.over != nil {
			c.cancel()
		} else if c.quit != nil {
			c.unquit = context.AfterFunc(c.quit, c.cancel)
		}
	}
	return c.native
}

// Done is closed when the context has ended.
func (c *Context) Done() <-chan struct{} { return c.made().Done() }

// Deadline is when the context ends at the latest.
func (c *Context) Deadline() (time.Time, bool) { return c.deadline, true }

// Err is nil until the context has ended.
func (c *Context) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.over != nil:
		return c.over
	case c.native != nil:
		return c.native.Err()
	}
	switch c.over = c.parent.Err(); {
	case c.over != nil:
	case c.quit != nil && c.quit.Err() != nil:
		c.over = context.Canceled
	case !c.parents && !time.Now().Before(c.deadline):
		c.over = context.DeadlineExceeded
	}
	return c.over
}

// Value is the parent's. Where there is a native context, contexts derived
// from c find it by this, as from any other.
func (c *Context) Value(key any) any {
	c.mu.Lock()
	from := c.native
	c.mu.Unlock()
	if from == nil {
		from = c.parent
	}
	return from.Value(key)
}
