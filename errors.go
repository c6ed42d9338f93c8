package hasp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/calls"
)

// These are the errors to test for with errors.Is. A call may also return errors.ErrUnsupported, or
// the error of its context. Any other error of the store is ErrUnavailable.
var (
	// ErrHeld says that another caller holds the key, or is before this one in the queue. errors.As
	// with a [*HeldError] returns the holder and the rest of its term, if they are known. If the
	// caller's context ended the wait, the error also matches the context's error and cause.
	ErrHeld = backend.ErrHeld

	// ErrLost says that a lease ended before it was unlocked. Other callers may have held the key
	// since. errors.As with a *LostError returns the reason.
	ErrLost = backend.ErrLost

	// ErrReleased says that a lease was already unlocked or detached.
	ErrReleased = errors.New("lease released")

	// ErrClosed says that the Client was closed.
	ErrClosed = errors.New("client closed")

	// ErrInvalid says that an argument, an option or a parameter is wrong.
	ErrInvalid = backend.ErrInvalid

	// ErrUnavailable says that the store failed or did not answer. The call may or may not have
	// taken effect. If a failed Lock may have left a hold or a queue entry in the store, the Client
	// releases it in the background.
	//
	// Its reasons are refused and broken connections, timeouts, a lost quorum, and an unknown
	// outcome of an Unlock or an Extend. An error that the server reports is a reason too (no
	// memory, no permission, read only, loading). The error wraps the driver's error. It matches
	// none of the other errors here, except where LockAll or Do joins several errors.
	//
	// If the caller's context ends before any call has failed, the error matches only the context's
	// error: a short deadline is not an outage. If a call has failed before, the error also matches
	// ErrUnavailable. Therefore test for the context's error first.
	ErrUnavailable = backend.ErrUnavailable
)

// errNilLease is the error of a call on a nil Lease or Leases, as after a Lock that failed.
var errNilLease = fmt.Errorf("hasp: %w: the lease is nil: check the error of Lock", ErrInvalid)

var errNilContext = fmt.Errorf("%w: ctx is nil; "+
	"pass context.Background() if you have no other", ErrInvalid)

var errNilClient = fmt.Errorf("%w: the Client is nil: check the error of New or Open", ErrInvalid)

// errNoReturn is the outcome of a call that panicked or ended its goroutine. It is unknown whether
// the store has carried the call out.
var errNoReturn = errors.New("the call did not return, " +
	"because code that it ran panicked or ended the goroutine")

// HeldError is ErrHeld with the holder and the rest of its term, if they are known.
type HeldError = backend.HeldError

// LostError is ErrLost with the reason of the loss.
type LostError struct {
	Reason string // one of the constants below

	// Err is nil, or the details: why the last renewal failed, or why Resume may have found no
	// hold.
	Err error
}

// Reasons of a [LostError].
const (
	// LostRevoked says that the store no longer has the hold: it was broken, or the store lost its
	// data.
	LostRevoked = "revoked"

	// LostUnanswered says that the store answered no renewal before the term ended.
	LostUnanswered = "unanswered"

	// LostStopped says that the process or the machine was stopped for longer than the term.
	LostStopped = "stopped"

	// LostNotRenewed says that the term ended because of WithoutRenewal, or because Lock's context
	// had ended.
	LostNotRenewed = "not_renewed"

	// LostMaxHold says that the max hold has passed; see WithMaxHold.
	LostMaxHold = "max_hold"
)

var lossTexts = map[string]string{
	LostRevoked: "the store does not have it any more: " +
		"it was broken, or the store lost its data",
	LostUnanswered: "no renewal was answered before its term ended",
	LostStopped:    "the process was stopped for longer than its term",
	LostNotRenewed: "its term ended, and it was not renewed",
	LostMaxHold:    "its max hold is over",
}

// Error says why the lease was lost.
func (e *LostError) Error() string {
	why := cmp.Or(lossTexts[e.Reason], e.Reason)
	switch {
	case e.Err == errNoHold:
		// The error of a Resume, which has more possible reasons than the text of LostRevoked says.
		why = errNoHold.Error()
	case e.Err != nil:
		why += " (" + e.Err.Error() + ")"
	}
	return ErrLost.Error() + ": " + why
}

// Is reports whether target is [ErrLost], which every LostError matches.
func (e *LostError) Is(target error) bool { return target == ErrLost }

// Error is the error of every call about a key: what was tried, on which key, and why it failed.
type Error struct {
	// Op is what was tried: "lock", "trylock", "resume", "extend", "detach", "unlock", "inspect",
	// "break", "list", "do" or "lead".
	Op string

	// Key is the key as the caller gave it, without Options.Prefix. For List it is the prefix.
	Key string

	// Err is why the call failed.
	Err error
}

// Error returns the message. The key is quoted, because it may be any bytes, and is cut after
// 200 characters.
func (e *Error) Error() string {
	return fmt.Sprintf("hasp: %s %.200q: %v", e.Op, e.Key, e.Err)
}

// Unwrap returns e.Err.
func (e *Error) Unwrap() error { return e.Err }

// newError returns the error of a call about a key, or nil if err is nil.
func newError(op, key string, err error) error {
	if err == nil {
		return nil
	}
	return &Error{op, key, marked(err)}
}

// marked returns err, wrapped if need be, so that it matches ErrUnavailable if and only if err is
// an outage. All errors of calls pass through marked, so drivers need not mark outages.
func marked(err error) error {
	outage := isOutage(err)
	switch {
	case outage == errors.Is(err, ErrUnavailable):
		return err // needs no wrapper
	case outage:
		return &backend.UnavailableError{Err: err}
	}
	return available{err}
}

// available wraps an error that must not match ErrUnavailable although a part of it does. That part
// is the cause that the caller gave its context, or an outage that is joined with the loss of an
// outer lease. available has no Unwrap, so errors.Is does not find that part.
type available struct{ err error }

func (e available) Error() string { return e.err.Error() }

func (e available) Is(target error) bool {
	return target != ErrUnavailable && errors.Is(e.err, target)
}

func (e available) As(target any) bool { return errors.As(e.err, target) }

// waitError is the error of a wait that ended with its caller's context. errors.Is finds the errors
// in both fields.
type waitError struct {
	err   error // why the caller did not have the key
	cause error // why the wait ended
}

func (e *waitError) Error() string { return e.cause.Error() + " (" + e.err.Error() + ")" }

func (e *waitError) Unwrap() []error { return []error{e.err, e.cause} }

// withContextEnd returns err. If ctx has ended, it joins err with the error and the cause of ctx.
func withContextEnd(ctx context.Context, err error) error {
	// Read Err before Cause, because Err of a lease's context reads the clock, and may end the
	// context.
	end := ctx.Err()
	cause := context.Cause(ctx)
	if end == nil {
		d, ok := ctx.Deadline()
		if !ok || time.Now().Before(d) {
			return err // ctx has not ended
		}
		end = context.DeadlineExceeded // the deadline has passed, and ctx's timer is late
		cause = end
	}

	// Let cause match both the error and the cause of ctx. They differ if the caller gave ctx a
	// cause of its own. Use errors.Is, because the error of a context may be of any type.
	if !errors.Is(cause, end) {
		cause = &waitError{end, cause}
	}
	switch {
	case err == nil:
		return cause
	case errors.Is(err, end):
		return err // err already matches the error of ctx
	}
	return &waitError{err, cause}
}

// isOutage reports whether err, which a call is about to return, says that the store failed or did
// not answer.
func isOutage(err error) bool {
	switch {
	case err == nil, backend.Definite(err):
		return false
	case errors.Is(err, ErrReleased), errors.Is(err, ErrClosed):
		return false
	}

	// If a context ended the wait, the error from before the end of the context decides.
	if w, ok := err.(*waitError); ok {
		err = w.err
	}

	// Any other error is an outage, unless a context of the caller has ended the call. An outage
	// never matches the error of a context, because calls.Plain has wrapped it.
	return !calls.IsContextError(err)
}

// joined joins two errors, or returns the only one that is not nil. The argument unlock is an error
// of Unlock. A loss comes first, because the other error is often only a consequence of the loss. The text has one
// line, unlike that of errors.Join.
func joined(err, unlock error) error {
	switch {
	case err == nil || unlock == nil:
		return cmp.Or(err, unlock) // the one that is not nil, if any
	case errors.Is(unlock, ErrLost):
		return fmt.Errorf("%w; %w", unlock, err)
	}
	return fmt.Errorf("%w; %w", err, unlock)
}
