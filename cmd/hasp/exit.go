package main

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

// Exit codes of hasp itself. They keep clear of what commands use: 64, 69 and
// 75 mean in sysexits.h what they mean here, 126 and 127 are every shell's.
const (
	exitFailed      = 1   // a check failed: the demo's count, a clause of the suite
	exitUsage       = 64  // EX_USAGE: the command line, the key, the URL or the file is wrong
	exitStore       = 69  // EX_UNAVAILABLE: the store cannot be reached or did not answer
	exitNotAcquired = 75  // EX_TEMPFAIL: held by another; try again later
	exitLost        = 79  // the lock was lost while the command ran
	exitCannotRun   = 126 // the command exists and cannot be executed
	exitNotFound    = 127 // the command does not exist
	exitSignal      = 128 // + the number of the signal
)

const exitCodes = `Exit codes:

  the command's own, if it ran to its end under the lock
  128+n  the command, or hasp while it waited, was ended by signal n
  64     wrong usage: flags, key, URL, configuration
  69     the store could not be reached or did not answer
  75     not acquired: the key is held by another
  79     lost: the lock was lost while the command ran, so others may have
         run meanwhile; whatever code the command gave
  126    the command cannot be executed
  127    the command was not found

Each of hasp's own comes with one line on stderr that begins with "hasp:".`

// ranError is an error of a command that began to run, unlike cobra's own
// errors, which are about the command line.
type ranError struct{ error }

func (e ranError) Unwrap() error { return e.error }

// codeError is an error that has an exit code of its own.
type codeError struct {
	code int
	err  error
}

func (e codeError) Error() string { return e.err.Error() }
func (e codeError) Unwrap() error { return e.err }

// usagef is an error about how hasp was called.
func usagef(format string, args ...any) error {
	return codeError{exitUsage, fmt.Errorf(format, args...)}
}

// signalError is the cause of a context that a signal ended.
type signalError struct{ sig os.Signal }

func (e signalError) Error() string { return "ended by signal: " + e.sig.String() }

// code is 128 and the signal's number, as shells have it.
func (e signalError) code() int {
	n, ok := e.sig.(syscall.Signal)
	if !ok {
		return exitFailed
	}
	return exitSignal + int(n)
}

// exit prints err, in one line, and returns the exit code.
func (a *app) exit(cmd *cobra.Command, err error) int {
	if err == nil {
		return a.code
	}
	var ran ranError
	if !errors.As(err, &ran) {
		a.complain(fmt.Sprintf("%v (see %q)", err, cmd.CommandPath()+" --help"))
		return exitUsage
	}
	if code := exitCode(ran.error); code != exitSignal+int(syscall.SIGPIPE) {
		a.complain(message(ran.error))
	}
	return exitCode(ran.error)
}

// complain prints one line to stderr, without what must not be shown.
func (a *app) complain(text string) {
	text = strings.TrimPrefix(a.store.redact(text), "hasp: ")
	fmt.Fprintf(a.err, "hasp: %s\n", plain(text))
}

func exitCode(err error) int {
	var own codeError
	var sig signalError
	switch {
	case errors.As(err, &own):
		return own.code
	case errors.As(err, &sig):
		return sig.code()
	case errors.Is(err, hasp.ErrInvalid), errors.Is(err, errors.ErrUnsupported):
		return exitUsage
	case errors.Is(err, hasp.ErrHeld):
		return exitNotAcquired
	case errors.Is(err, hasp.ErrLost):
		return exitLost
	}
	return exitStore
}

// message is err with what to do about it, where the library cannot know.
func message(err error) string {
	var sig signalError
	switch {
	case errors.As(err, &sig):
		return sig.Error()
	case errors.As(err, new(codeError)):
		return err.Error()
	case errors.Is(err, errors.ErrUnsupported):
		return err.Error() + `; "hasp strategies" tells what each can do`
	}
	return err.Error()
}

// holder names who holds the key an error is about, or says "another".
func holder(err error) string {
	var held *backend.HeldError
	if errors.As(err, &held) && held.Owner != "" {
		return quote(held.Owner)
	}
	return "another"
}
