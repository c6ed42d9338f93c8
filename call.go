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

// grace is how long a call may take to return after its context has ended. It lets
// the driver return its own error, which says more than a general one.
const grace = 10 * time.Millisecond

// errLate is an outage: the grant was too late to be used.
var errLate = fmt.Errorf("the grant came after its term had ended: %w", os.ErrDeadlineExceeded)

// errLeft is run's error if leave was closed before the call ended.
var errLeft = errors.New("left")

// call makes one call to the store, with the values of ctx. It returns when the store
// answers, when bound has passed, or when ctx ends, whichever is first.
//
// If the Reach is Process, call only runs f, and the end of ctx does not interrupt it. If
// direct can make the call, f runs on the caller's goroutine, and ends with ctx, and with
// Close if late is not nil. Otherwise f has a goroutine of its own, and the end of ctx does
// not interrupt it. If late is not nil, call then also returns when Close begins. Late gets
// the outcome if f returns after call has returned.
func call[T any](c *Client, ctx context.Context, bound time.Duration,
	f func(context.Context) (T, error), late func(T, error)) (T, error) {
	if c.traits.Reach == backend.Process {
		return f(context.WithoutCancel(ctx))
	}
	var closing context.Context
	var quit <-chan struct{}
	if late != nil {
		closing, quit = c.closing, c.closing.Done()
	}
	if v, ok, err := direct(c, ctx, closing, bound, f); ok {
		return v, err
	}

	// The call outlasts a caller that leaves: apart is cancelled when the call ends.
	apart, cancel := context.WithTimeout(context.WithoutCancel(ctx), bound)
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

// direct makes a call on the caller's goroutine, if the driver's calls end promptly, or if
// they end by deadline and ctx cannot be cancelled. Otherwise it makes none, and ok is
// false. The call ends with ctx, after d, or with quit. Only a call that ends promptly
// ends with quit, which may be nil.
func direct[T any](c *Client, ctx, quit context.Context, d time.Duration, f func(context.Context) (T, error)) (v T, ok bool, err error) {
	ends := c.traits.Cancellation
	if ends != backend.CancelPrompt && (ends != backend.CancelByDeadline || ctx.Done() != nil) {
		return v, false, nil
	}
	within := lazyctx.WithTimeout(ctx, quit, d)
	defer within.End()
	v, err = f(within)

	// An error that the end of a context caused must say which context.
	switch {
	case err == nil || backend.Definite(err):
	case ctx.Err() != nil:
		err = ctx.Err() // the caller's
	case within.Err() != nil && !errors.Is(err, os.ErrDeadlineExceeded):
		err = fmt.Errorf("%v: %w", err, noAnswer(d))
	default:
		err = plain(err, d)
	}
	return v, true, err
}

// run calls f with apart, on a goroutine of its own. It returns when f has returned,
// when leave or quit is closed, or a moment after apart has ended. If f returns later
// than that, late gets its outcome, unless late is nil. After f has returned, the
// goroutine calls after. If Close waits no longer, run does not call f. It calls after,
// and returns ErrClosed.
//
// If the driver's calls end promptly, or stay within the process, run only calls f, on the
// caller's goroutine. Then it calls neither late nor after.
func run[T any](c *Client, apart context.Context, leave, quit <-chan struct{},
	f func(context.Context) (T, error), late func(T, error), after func()) (v T, err error) {
	if c.traits.Reach == backend.Process || c.traits.Cancellation == backend.CancelPrompt {
		return f(apart)
	}

	// The caller swaps met when it leaves. The call swaps met when it ends. Whichever is
	// second handles the answer.
	var met atomic.Bool
	var answer T
	var failure error
	done := make(chan struct{}) // closed when answer and failure are set
	if !c.spawn(func() {
		answer, failure = f(apart)
		// If the caller has left, the outcome is handled here.
		if met.Swap(true) && late != nil {
			late(answer, failure)
		}
		close(done)
		after()
	}) {
		after()
		return v, ErrClosed
	}

	select {
	case <-done:
		return answer, failure
	case <-leave:
		err = errLeft
	case <-quit:
		err = ErrClosed
	case <-apart.Done():
		// The call has the same context, and should return soon.
		err = apart.Err()
		timer := time.NewTimer(grace)
		defer timer.Stop()
		select {
		case <-done:
		case <-leave:
		case <-timer.C:
		}
	}

	// The call may have returned at the same moment. If it swapped met first, its answer
	// counts.
	if met.Swap(true) {
		<-done
		return answer, failure
	}
	return v, err
}
