package hasp

import (
	"errors"
	"strconv"

	"github.com/hasplock/hasp/backend"
)

// Contention, loss, the end of a Client, misuse and outage are five different
// things. The first four have a name here, to be asked for with errors.Is; an
// outage is every other error, and is the store's own.
var (
	// ErrHeld says that the key is held by another. errors.As with a
	// *backend.HeldError tells by whom and for how long, where it is known.
	// If the end of a context ended the wait, errors.Is matches the context's
	// error and cause as well.
	ErrHeld = backend.ErrHeld

	// ErrLost says that a lease ended before it was unlocked: others may have
	// held the key since.
	ErrLost = backend.ErrLost

	// ErrReleased says that a lease was unlocked already.
	ErrReleased = errors.New("lease released")

	// ErrClosed says that the Client was closed.
	ErrClosed = errors.New("client closed")

	// ErrInvalid says that an argument, an option or a parameter is wrong.
	ErrInvalid = backend.ErrInvalid
)

// Error is what every call of this package that concerns a key returns: what
// was tried, on which key, and why it failed.
type Error struct {
	Op  string // "lock", "trylock", "extend", "unlock", "inspect", "break"
	Key string // as the caller gave it, without Options.Prefix
	Err error
}

// Error quotes the key, which may be any bytes.
func (e *Error) Error() string {
	return "hasp: " + e.Op + " " + strconv.Quote(e.Key) + ": " + e.Err.Error()
}

// Unwrap returns e.Err.
func (e *Error) Unwrap() error { return e.Err }

// waitError is a wait that its caller's context ended: why the key was not
// had, and why the wait ended. Both match.
type waitError struct{ err, cause error }

func (e *waitError) Error() string   { return e.cause.Error() + " (" + e.err.Error() + ")" }
func (e *waitError) Unwrap() []error { return []error{e.err, e.cause} }
