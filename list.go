package hasp

import (
	"context"
	"fmt"
	"iter"
	"strings"

	"github.com/hasplock/hasp/backend"
)

// List yields the keys that begin with prefix and are held or waited for, in no particular
// order. Each slot of WithSlots is a key of its own: KEY#0, KEY#1 and so on. While a caller
// waits for a slot, KEY#queue is held too. Options.Prefix is put before prefix and taken
// off the keys.
//
// The list is no snapshot: a key that is taken or freed meanwhile may be missing, and a key
// may come twice. List asks the store page by page as the loop goes on, and
// Options.Timeout bounds each call. An error is yielded once, last. It is of type [*Error].
// If the driver cannot list, the error is errors.ErrUnsupported.
func (c *Client) List(ctx context.Context, prefix string) iter.Seq2[backend.Entry, error] {
	return func(yield func(backend.Entry, error) bool) {
		for e, err := range c.list(ctx, prefix) {
			if err != nil {
				yield(backend.Entry{}, newError("list", prefix, err))
				return
			}
			e.Key = strings.TrimPrefix(e.Key, c.opts.Prefix)
			if !yield(e, nil) {
				return
			}
		}
	}
}

// listed is what a driver yields.
type listed struct {
	backend.Entry
	err error
}

// list yields the entries of the driver. The driver's loop has a goroutine of its own, so
// that a call that outlasts its context can be left behind.
func (c *Client) list(ctx context.Context, prefix string) iter.Seq2[backend.Entry, error] {
	return func(yield func(backend.Entry, error) bool) {
		in, ok := c.driver.(backend.Lister)
		if !ok {
			yield(backend.Entry{}, fmt.Errorf("%T cannot list: %w", c.driver, errUnsupported))
			return
		}
		if c.closing.Err() != nil {
			yield(backend.Entry{}, ErrClosed)
			return
		}

		within, cancel := context.WithCancel(ctx)
		defer cancel()
		defer context.AfterFunc(c.closing, cancel)()

		// The driver goes on only when it is asked to, so that it sends nothing while the
		// caller uses an entry.
		entries, more := make(chan listed), make(chan struct{})
		if !c.spawn(func() {
			defer close(entries)
			for e, err := range in.List(within, c.opts.Prefix+prefix, c.opts.Timeout) {
				select {
				case entries <- listed{e, err}:
				case <-within.Done():
					return
				}
				select {
				case <-more:
				case <-within.Done():
					return
				}
			}
		}) {
			yield(backend.Entry{}, ErrClosed)
			return
		}

		for {
			select {
			case e, ok := <-entries:
				switch {
				case within.Err() != nil:
					yield(backend.Entry{}, c.whyListEnded(ctx))
					return
				case !ok:
					return
				case e.err != nil:
					yield(backend.Entry{}, plain(e.err, c.opts.Timeout))
					return
				case !yield(e.Entry, nil):
					return
				}
			case <-within.Done():
				yield(backend.Entry{}, c.whyListEnded(ctx))
				return
			}

			select {
			case more <- struct{}{}:
			case <-within.Done():
			}
		}
	}
}

// whyListEnded returns the error of a list that ctx or Close has ended.
func (c *Client) whyListEnded(ctx context.Context) error {
	if ctx.Err() != nil {
		return withContextEnd(ctx, nil)
	}
	return ErrClosed
}
