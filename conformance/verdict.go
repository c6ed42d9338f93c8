package conformance

import (
	"errors"
	"fmt"

	"github.com/hasplock/hasp/backend"
)

// A check is a list of steps. A step that fails ends the try of its clause, as t.Fatal ends a test.
// To do so, the step panics with an abort, and env.try returns the error. The functions of this
// file are such steps, or judge an error.

// abort is the value that a failed step panics with.
type abort struct{ error }

// must ends the try if err is not nil.
func must(err error) {
	if err != nil {
		panic(abort{err})
	}
}

// mustf is like the function must, but puts a message before the error. The message says which step
// has failed.
func mustf(err error, format string, args ...any) {
	if err != nil {
		fail("%s: %w", fmt.Sprintf(format, args...), err)
	}
}

// require ends the try unless ok is true.
func require(ok bool, format string, args ...any) {
	if !ok {
		fail(format, args...)
	}
}

// fail ends the try.
func fail(format string, args ...any) { panic(abort{fmt.Errorf(format, args...)}) }

// slowError is a failure that a slow machine may have caused. It fails the clause only if the last
// try, with the longest terms, also fails.
type slowError struct{ error }

func (e *slowError) Unwrap() error { return e.error }

// slow returns a slowError with this message.
func slow(format string, args ...any) error { return &slowError{fmt.Errorf(format, args...)} }

// mustInTime is like the function mustf, but for a step that may fail on a slow machine.
func mustInTime(err error, format string, args ...any) {
	if err != nil {
		must(slow("%s: %w", fmt.Sprintf(format, args...), err))
	}
}

// requireInTime is like the function require, but a slow machine may make the condition false.
func requireInTime(ok bool, format string, args ...any) {
	if !ok {
		must(slow(format, args...))
	}
}

// skipError ends a try when the clause turns out to be impossible to check.
type skipError struct{ reason string }

func (e *skipError) Error() string { return e.reason }

// hooked ends the try if err, the error of a hook of the Harness, is not nil. The clause fails. But
// if err matches errors.ErrUnsupported, the clause is skipped.
func hooked(err error) {
	if errors.Is(err, errors.ErrUnsupported) {
		err = &skipError{err.Error()}
	}
	must(err)
}

// is returns an error unless the error got matches the error want.
func is(what string, got, want error) error {
	if errors.Is(got, want) {
		return nil
	}
	if got == nil {
		return fmt.Errorf("%s: no error, want %q", what, want)
	}
	return fmt.Errorf("%s: %q, want %q", what, got, want)
}

// definite reports whether err says that the call has taken and changed nothing. After any other
// error the outcome of the call is unknown.
func definite(err error) bool {
	return errors.Is(err, backend.ErrHeld) || errors.Is(err, backend.ErrLost) ||
		errors.Is(err, backend.ErrInvalid) || errors.Is(err, errors.ErrUnsupported)
}

// unknown returns an error unless err says that the outcome of a call is unknown.
func unknown(what string, err error) error {
	if err == nil || definite(err) {
		return fmt.Errorf("%s: %v, want an error of unknown outcome", what, err)
	}
	return nil
}

// errOf returns the error of a call whose result does not matter.
func errOf[T any](_ T, err error) error { return err }
