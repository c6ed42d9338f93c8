package hasp

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"strings"

	"github.com/hasplock/hasp/backend"
)

// Entry is a key and its Status.
type Entry = backend.Entry

// List yields the keys that begin with prefix and are held or waited for, in no particular
// order. Each slot of WithSlots is a key of its own: KEY#0, KEY#1 and so on. While a caller
// waits for a slot, KEY#queue is held too. Options.Prefix is put before prefix and taken
// off the keys.
//
// The list is no snapshot: a key that is taken or freed meanwhile may be missing, and a key
// may come twice. List asks the store page by page as the loop goes on, and
// Options.Timeout bounds each call. An error is yielded once, last. It is of type [*Error].
// If the driver cannot list, the error is errors.ErrUnsupported.
func (c *Client) List(ctx context.Context, prefix string) iter.Seq2[Entry, error] {
	return func(yield func(Entry, error) bool) {
		fail := func(err error) { yield(Entry{}, newError("list", prefix, err)) }
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

		// The driver's loop goes on only when it is asked for the next entry, so it sends nothing
		// while the caller uses an entry. A call that outlasts its context is left behind. Then the
		// loop is stopped when the call has ended.
		next, stop := iter.Pull2(in.List(within, c.opts.Prefix+prefix, c.opts.Timeout))
		left := false
		defer func() {
			if !left {
				stop()
			}
		}()
		for c.enter() == nil {
			e, err := run(c, context.Background(), within.Done(), nil, func(context.Context) (listed, error) {
				e, err, more := next()
				return listed{e, err, more}, nil
			}, func(listed, error) { stop() }, func() {})
			c.leave()
			if left = err == errLeft; err != nil || within.Err() != nil {
				break
			}

			if e.err != nil {
				fail(plain(e.err, c.opts.Timeout))
				return
			}
			e.Key = strings.TrimPrefix(e.Key, c.opts.Prefix)
			if !e.more || !yield(e.Entry, nil) {
				return
			}
		}

		// The caller's context or Close has ended the list.
		fail(cmp.Or(withContextEnd(ctx, nil), ErrClosed))
	}
}

// listed is what a driver yields, or the end of its list if more is false.
type listed struct {
	Entry
	err  error
	more bool
}
