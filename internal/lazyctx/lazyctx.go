// Package lazyctx has a context with a deadline that costs little where nobody
// waits for its end: it needs a timer only once it is asked for Done.
package lazyctx

import (
	"context"
	"sync"
	"time"
)

// Context ends with its parent, at its deadline, or by End, whichever is
// first. It is like one of context.WithDeadline.
type Context struct {
	parent   context.Context
	deadline time.Time
	parents  bool // the deadline, of which the parent tells

	mu     sync.Mutex // guards all below
	native context.Context
	cancel context.CancelFunc
	over   error // what was told before there was one
}

// WithTimeout returns a Context that ends d from now at the latest. Whoever has
// made it calls End.
func WithTimeout(parent context.Context, d time.Duration) *Context {
	c := &Context{parent: parent, deadline: time.Now().Add(d)}
	if of, ok := parent.Deadline(); ok && of.Before(c.deadline) {
		c.deadline, c.parents = of, true
	}
	return c
}

// Split returns what tells of the end of ctx but for its deadline, and that:
// who waits until the deadline by other means has no need of a timer. The time
// is zero if what is returned tells of all.
func Split(ctx context.Context) (context.Context, time.Time) {
	c, ok := ctx.(*Context)
	switch {
	case !ok:
		return ctx, time.Time{}
	case c.parents:
		return c.parent, time.Time{}
	}
	return c.parent, c.deadline
}

// End ends the context with context.Canceled, unless its end was seen before.
func (c *Context) End() {
	c.mu.Lock()
	cancel := c.cancel
	if cancel == nil && c.over == nil {
		c.over = context.Canceled
	}
	c.mu.Unlock()
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
	if c.over = c.parent.Err(); c.over == nil && !c.parents && !time.Now().Before(c.deadline) {
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
