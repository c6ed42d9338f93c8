package hasp

import (
	"cmp"
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
		fail := func(err error) { yield(backend.Entry{}, newError("list", prefix, err)) }
		in, ok := c.driver.(backend.Lister)
		if !ok {
			fail(fmt.Errorf("%T cannot list: %w", c.driver, errUnsupported))
			return
		}
		if c.closing.Err() != nil {
			fail(ErrClosed)
			return
		}

		within, cancel := context.WithCancel(ctx)
		defer cancel()
		defer context.AfterFunc(c.closing, cancel)()

		// The driver's loop has a goroutine of its own, so that a call that outlasts its
		// context can be left behind. It goes on only when it is asked to, so that it sends
		// nothing while the caller uses an entry.
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
			fail(ErrClosed)
			return
		}

		for within.Err() == nil {
			select {
			case e, ok := <-entries:
				switch {
				case within.Err() != nil:
				case !ok:
					return
				case e.err != nil:
					fail(plain(e.err, c.opts.Timeout))
					return
				default:
					e.Key = strings.TrimPrefix(e.Key, c.opts.Prefix)
					if !yield(e.Entry, nil) {
						return
					}
				}
			case <-within.Done():
			}

			select {
			case more <- struct{}{}:
			case <-within.Done():
			}
		}

		// The caller's context or Close has ended the list.
		fail(cmp.Or(withContextEnd(ctx, nil), ErrClosed))
	}
}

// listed is what a driver yields.
type listed struct {
	backend.Entry
	err error
}
