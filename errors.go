package hasp

import (
	"errors"
	"strconv"

	"github.com/hasplock/hasp/backend"
)

// Contention, loss, the end of a Client, misuse and outage are five different kinds
// of errors. The first four match an error below by errors.Is. Besides these errors,
// errors.ErrUnsupported and the error of a context, every error is an outage. It wraps
// the store's error, if the store returned one.
var (
	// ErrHeld says that another caller holds the key. errors.As with a
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
