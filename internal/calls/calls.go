// Package calls bounds the calls to a driver, so that each call ends even if no answer comes. It
// imports only package backend.
package calls

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
)

// Grace is how long a call may take to return after its context has ended, so that the driver can
// return its own error.
const Grace = 10 * time.Millisecond

// ErrLeft is what Run returns if the channel leave is closed before the call ends.
var ErrLeft = errors.New("left")

// Caller makes calls to one driver.
type Caller struct {
	// Traits are the driver's.
	Traits backend.Traits

	// Closing ends when the Client begins to close. Its cause is the error of the calls that end
	// because of that.
	Closing context.Context

	// Go runs f on a goroutine of its own, which the Client's Close waits for. If Close has stopped
	// waiting, Go returns false, and does not run f.
	Go func(f func()) bool
}

// Call runs f, which makes one call to the store and receives the values of ctx. It returns when f
// returns, when the duration bound has passed, or when ctx ends. If Call returns before f, the
// function late receives the outcome of f, unless late is nil. If late is not nil, Call also
// returns when Closing ends.
//
// The Traits decide how f runs. If Reach is Process, the function Direct runs f to its end. If the
// driver's calls end with their context (see Cancellation), Direct runs f with a context that ends
// when Call must return. Otherwise the function Run starts f on a goroutine of its own, and leaves
// that goroutine behind if Call must return before f.
func Call[T any](c *Caller, ctx context.Context, bound time.Duration,
	f func(context.Context) (T, error), late func(T, error)) (T, error) {
	var closing context.Context
	var quit <-chan struct{}
	if late != nil {
		closing = c.Closing
		quit = closing.Done()
	}
	if c.Prompt(ctx) {
		return Direct(c, ctx, closing, bound, f)
	}

	// Let only bound end the context of f, and let the end of ctx be Run's signal to leave. So the
	// error of a context tells which of the two ended the call.
	plain := func(ctx context.Context) (T, error) {
		v, err := f(ctx)
		return v, Plain(err, bound)
	}
	v, err := Run(c, context.WithoutCancel(ctx), bound, ctx.Done(), quit, plain, late)
	switch err {
	case ErrLeft:
		err = ctx.Err()
	case context.DeadlineExceeded: // of Run itself, because plain never returns it
		err = NoAnswer(bound)
	}
	return v, err
}

// Prompt reports whether the function Direct can call the driver. It can if the store is in this
// process, if a call ends with its context, or if a call ends at its deadline and ctx cannot end.
func (c *Caller) Prompt(ctx context.Context) bool {
	switch c.Traits.Cancellation {
	case backend.CancelPrompt:
		return true
	case backend.CancelByDeadline:
		if ctx.Done() == nil {
			return true
		}
	}

	return c.Traits.Reach == backend.Process
}

// Direct runs f on the caller's goroutine, and returns when f returns. The context of f ends when
// the context ctx or quit ends, or when the duration bound has passed. The argument quit may be
// nil. With CancelByDeadline, a driver's call ends only at its deadline, so it may go on after the
// end of quit. If Reach is Process, the context of f never ends, because a call within the process
// is short and its outcome is then always known.
func Direct[T any](c *Caller, ctx, quit context.Context, bound time.Duration,
	f func(context.Context) (T, error)) (T, error) {
	if c.Traits.Reach == backend.Process {
		if ctx.Done() != nil { // otherwise ctx never ends, and WithoutCancel would only cost memory
			ctx = context.WithoutCancel(ctx)
		}
		return f(ctx)
	}

	within := WithTimeout(ctx, quit, bound)
	defer within.End()
	v, err := f(within)

	switch {
	case err == nil, backend.Definite(err):
		// The store has answered.
	case ctx.Err() != nil:
		err = ctx.Err() // the caller's context has ended the call
	case err == context.DeadlineExceeded:
		err = NoAnswer(bound) // the driver's error says no more than that
	default:
		err = Plain(err, bound) // the driver's own error
	}
	return v, err
}

// Run calls f with a new context that ends with ctx. If bound is above 0, the new context ends
// after that time at the latest. If Cancellation is CancelPrompt, or Reach is Process, f runs on
// the caller's goroutine, and Run returns when f returns.
//
// Otherwise f runs on a goroutine of its own. Then Run returns when f has returned, when the
// channel leave or quit is closed, or a moment after the new context has ended. If f returns after
// Run, the function late receives the outcome, unless late is nil. If Close has stopped waiting,
// Run returns the cause of Closing without calling f.
func Run[T any](c *Caller, ctx context.Context, bound time.Duration, leave, quit <-chan struct{},
	f func(context.Context) (T, error), late func(T, error)) (v T, err error) {
	end := func() {} // frees the timer of bound
	if bound > 0 {
		ctx, end = context.WithTimeout(ctx, bound)
	}
	if c.Traits.Reach == backend.Process || c.Traits.Cancellation == backend.CancelPrompt {
		defer end()
		return f(ctx)
	}

	// The caller sets decided when it stops waiting, and the goroutine sets decided when f has
	// returned. Whichever comes second handles the outcome.
	var decided atomic.Bool
	var answer T
	var failure error
	done := make(chan struct{}) // closed when answer and failure are set
	runs := c.Go(func() {
		answer, failure = f(ctx)

		// If the caller has left, the outcome is handled here.
		if decided.Swap(true) && late != nil {
			late(answer, failure)
		}
		close(done)
		end() // not earlier, because the caller would take this end of ctx for a timeout
	})
	if !runs {
		end()
		return v, context.Cause(c.Closing)
	}

	select {
	case <-done:
	case <-leave:
		err = ErrLeft
	case <-quit:
		err = context.Cause(c.Closing)
	case <-ctx.Done():
		// Give f, which has the same context, a moment to return an error of its own.
		err = ctx.Err()
		timer := time.NewTimer(Grace)
		defer timer.Stop()
		select {
		case <-done:
		case <-leave:
		case <-timer.C:
		}
	}

	// f may have returned at the same moment. If its goroutine set decided first, use its answer.
	if decided.Swap(true) {
		<-done
		return answer, failure
	}
	return v, err
}

// NoAnswer returns the error of an outage. The error does not match context.DeadlineExceeded, which
// is for the caller's own deadline.
func NoAnswer(d time.Duration) error {
	return fmt.Errorf("no answer from the store within %v: %w",
		cmp.Or(d.Round(time.Millisecond), d), os.ErrDeadlineExceeded)
}

// Plain returns err, wrapped if need be so that it does not match the error of any context. Many
// network timeouts match context.DeadlineExceeded, although the caller's own context has not ended.
// If the text of err does not end with that error, as with a hint, the text stays as it is.
func Plain(err error, d time.Duration) error {
	if !IsContextError(err) {
		return err
	}
	for _, end := range []error{context.Canceled, context.DeadlineExceeded} {
		if strings.HasSuffix(err.Error(), end.Error()) {
			return fmt.Errorf("%v: %w", err, NoAnswer(d))
		}
	}
	return fmt.Errorf("%v%.0w", err, os.ErrDeadlineExceeded) // wraps it without its text
}

// PlainDated does what Plain does for a Waiter's error. It keeps the start of the outage, if known.
func PlainDated(err error, d time.Duration) error {
	flat := Plain(err, d)
	var dated *backend.UnavailableError
	if errors.As(flat, &dated) || !errors.As(err, &dated) {
		return flat // it has the start already, or err has none
	}
	return &backend.UnavailableError{Since: dated.Since, Err: flat}
}

// IsContextError reports whether err is, or wraps, the error of a context that has ended.
func IsContextError(err error) bool {
	return errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}
