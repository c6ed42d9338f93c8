package hasp

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/hasplock/hasp/backend"
)

// These are the errors to test for with errors.Is. A call may also return
// errors.ErrUnsupported, or the error of its context. Any other error is an outage: the
// store did not answer, or answered with an error, which the outage wraps.
var (
	// ErrHeld says that another caller holds the key, or comes first. errors.As with a
	// *backend.HeldError returns the holder and the rest of its term, if they are
	// known. If the end of a context ended the wait, the error also matches the
	// context's error and cause.
	ErrHeld = backend.ErrHeld

	// ErrLost says that a lease ended before it was unlocked. Other callers may have
	// held the key since.
	ErrLost = backend.ErrLost

	// ErrReleased says that a lease was already unlocked.
	ErrReleased = errors.New("lease released")

	// ErrClosed says that the Client was closed.
	ErrClosed = errors.New("client closed")

	// ErrInvalid says that an argument, an option or a parameter is wrong.
	ErrInvalid = backend.ErrInvalid
)

// Error is the error of every call that concerns a key. It says what was tried, on
// which key, and why it failed.
type Error struct {
	Op  string // "lock", "trylock", "extend", "unlock", "inspect", "break"
	Key string // as the caller gave it, without Options.Prefix
	Err error
}

// Error returns the message. The key is quoted, because it may be any bytes.
func (e *Error) Error() string {
	return "hasp: " + e.Op + " " + strconv.Quote(e.Key) + ": " + e.Err.Error()
}

// Unwrap returns e.Err.
func (e *Error) Unwrap() error { return e.Err }

// waitError is the error of a wait that ended with its caller's context. errors.Is
// matches both parts.
type waitError struct {
	err   error // why the caller did not have the key
	cause error // why the wait ended
}

func (e *waitError) Error() string   { return e.cause.Error() + " (" + e.err.Error() + ")" }
func (e *waitError) Unwrap() []error { return []error{e.err, e.cause} }

// withContextEnd returns err joined with ctx's error and cause, if ctx has ended.
func withContextEnd(ctx context.Context, err error) error {
	end := ctx.Err() // before Cause: a lease's context reads the clock here
	cause := context.Cause(ctx)
	if end == nil {
		d, ok := ctx.Deadline()
		if !ok || time.Now().Before(d) {
			return err
		}
		end = context.DeadlineExceeded // the deadline has passed, and ctx's timer is late
		cause = end
	}

	if cause != end && !errors.Is(cause, end) {
		cause = &waitError{end, cause}
	}
	if err == nil {
		return cause
	}
	return &waitError{err, cause}
}

// noAnswer returns the error of an outage. It does not match
// context.DeadlineExceeded, which would say that the caller's own deadline has passed.
func noAnswer(d time.Duration) error {
	return fmt.Errorf("no answer from the store within %v: %w", d, os.ErrDeadlineExceeded)
}

// plain returns err, wrapped if need be so that it matches no context's error. Many
// timeouts of the network match context.DeadlineExceeded, although the caller's own
// context has not ended.
func plain(err error, d time.Duration) error {
	if isContextError(err) {
		return fmt.Errorf("%v: %w", err, noAnswer(d))
	}
	return err
}

// plainDated is plain for a Waiter's error. If err says when the outage began, so
// does the result.
func plainDated(err error, d time.Duration) error {
	flat := plain(err, d)
	var dated *backend.UnavailableError
	if errors.As(flat, &dated) || !errors.As(err, &dated) {
		return flat
	}
	return &backend.UnavailableError{Since: dated.Since, Err: flat}
}

// isContextError reports whether err is, or wraps, the error of a context that
// has ended.
func isContextError(err error) bool {
	return errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}

// definite reports whether the outcome of a call that returned err is known: the call
// has changed nothing.
func definite(err error) bool {
	return errors.Is(err, ErrHeld) || errors.Is(err, ErrLost) || errors.Is(err, ErrInvalid) || errors.Is(err, errUnsupported)
}
