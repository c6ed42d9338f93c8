package hasp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"strings"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/calls"
)

// The methods Inspect, Break and List of Client, in locker.go, call these functions.

// inspect calls f with the driver and with the key Options.Prefix+key, and returns the outcome of
// f. If the driver is no Inspector, the error is errors.ErrUnsupported.
func inspect[T any](s *store, ctx context.Context, key string,
	f func(backend.Inspector, context.Context, string) (T, error)) (v T, err error) {
	in, ok := s.driver.Driver.(backend.Inspector)
	switch {
	case ctx == nil:
		return v, errNilContext
	case key == "":
		return v, fmt.Errorf("%w: empty key", ErrInvalid)
	case s.closing.Err() != nil:
		return v, ErrClosed
	case !ok:
		return v, fmt.Errorf("%T cannot inspect: %w", s.driver.Driver, errors.ErrUnsupported)
	}

	if err := s.enter(); err != nil {
		return v, err
	}
	defer s.leave()
	return calls.Call(&s.caller, ctx, s.opts.Timeout, func(ctx context.Context) (T, error) {
		v, err := f(in, ctx, s.opts.Prefix+key)
		return v, calls.OwnEnd(ctx, err) // f calls the driver without calls.Driver, which does this
	}, nil)
}

// list does what Client.List does.
func list(s *store, ctx context.Context, prefix string) iter.Seq2[backend.Entry, error] {
	return func(yield func(backend.Entry, error) bool) {
		if err := listTo(s, ctx, prefix, yield); err != nil {
			yield(backend.Entry{}, newError("list", prefix, err))
		}
	}
}

// listTo calls yield with each entry, until yield returns false. It returns the error that ends the
// list, or nil.
func listTo(s *store, ctx context.Context, prefix string,
	yield func(backend.Entry, error) bool) error {
	in, ok := s.driver.Driver.(backend.Lister)
	switch {
	case ctx == nil:
		return errNilContext
	case !ok:
		return fmt.Errorf("%T cannot list: %w", s.driver.Driver, errors.ErrUnsupported)
	case s.closing.Err() != nil:
		return ErrClosed
	}

	within, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(s.closing, cancel)()

	// Pull the entries, so that the driver's loop sends nothing while the caller uses an entry. If
	// a call of next outlasts within, listTo leaves it behind. When that call has ended, pull stops
	// the driver's loop.
	next, stop := iter.Pull2(in.List(within, s.opts.Prefix+prefix, s.opts.Timeout))
	leftBehind := false // a call of next was left behind
	defer func() {
		if !leftBehind {
			stop()
		}
	}()
	for {
		e, err := pull(s, within, next, stop)
		leftBehind = err == calls.ErrLeft
		switch {
		case err != nil, within.Err() != nil:
			// The caller's context or Close has ended the list, and pull has no error of another
			// kind. Ignore an error of the driver, which the end of within has probably caused.
			return cmp.Or(withContextEnd(ctx, nil), ErrClosed)
		case e.err != nil:
			return calls.Plain(e.err, s.opts.Timeout)
		}

		e.Key = strings.TrimPrefix(e.Key, s.opts.Prefix)
		if !e.more || !yield(e.Entry, nil) {
			return nil
		}
	}
}

// pull calls next, and returns what next returned. If ctx ends before next returns, pull returns
// calls.ErrLeft, and calls stop when next has returned. If Close has stopped waiting, it returns
// ErrClosed. It returns no other error.
func pull(s *store, ctx context.Context, next func() (backend.Entry, error, bool), stop func()) (
	listed, error) {
	if err := s.enter(); err != nil {
		return listed{}, err
	}
	defer s.leave() // also if the driver panics

	// The driver's loop has ctx already. Here ctx only says when to leave.
	return calls.Run(&s.caller, context.Background(), 0, ctx.Done(), nil,
		func(context.Context) (listed, error) {
			e, err, more := next()
			return listed{e, err, more}, nil
		},
		func(listed, error) { stop() })
}

// listed is what a driver's list yields. If the field more is false, the list has ended.
type listed struct {
	backend.Entry
	err  error
	more bool
}
