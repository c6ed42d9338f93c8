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
	"github.com/hasplock/hasp/cmd/hasp/internal/demo"
	"github.com/hasplock/hasp/cmd/hasp/internal/text"
)

// Exit codes of hasp itself. Few commands use these: 64, 69 and 75 have the
// meaning of sysexits.h, and 126 and 127 the meaning of every shell.
const (
	exitFailed      = 1   // a check failed: the demo's number, a clause of the suite
	exitUsage       = 64  // EX_USAGE: the command line, the key, the URL or the file is wrong
	exitStore       = 69  // EX_UNAVAILABLE: the store cannot be reached or did not answer
	exitNotAcquired = 75  // EX_TEMPFAIL: another program holds the key; try again later
	exitLost        = 79  // the lock was lost while the command ran
	exitCannotRun   = 126 // the command exists and cannot be executed
	exitNotFound    = 127 // the command does not exist
	exitSignal      = 128 // + the number of the signal
)

const exitCodes = `Exit codes:

  the code of COMMAND, if it ran to its end under the lock
  128+n  signal n ended COMMAND, or hasp while it waited
  64     wrong usage: a flag, the key, the URL or the configuration
  69     the store could not be reached or did not answer
  75     not acquired: another program holds the key
  79     lost: the lock was lost while COMMAND ran, so another program may
         have run at the same time; COMMAND's own code is not used
  126    COMMAND cannot be executed
  127    COMMAND was not found

If the code is one of hasp's own, one line on stderr that begins with "hasp:"
says why.`

// ranError is an error of a command that began to run. The errors of cobra are
// not wrapped in it; they concern the command line.
type ranError struct{ error }

func (e ranError) Unwrap() error { return e.error }

// codeError is an error with an exit code of its own.
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

// failedf is the error of a check that failed.
func failedf(format string, args ...any) error {
	return codeError{exitFailed, fmt.Errorf(format, args...)}
}

// signalError is the cause of a context that a signal ended.
type signalError struct{ sig os.Signal }

func (e signalError) Error() string { return "ended by signal: " + e.sig.String() }

// code is 128 and the number of the signal, as in shells.
func (e signalError) code() int {
	n, ok := e.sig.(syscall.Signal)
	if !ok {
		return exitFailed
	}
	return exitSignal + int(n)
}

// exit prints err in one line and returns the exit code.
func (a *app) exit(cmd *cobra.Command, err error) int {
	if err == nil {
		return a.code
	}
	var ran ranError
	if !errors.As(err, &ran) {
		a.complain(fmt.Sprintf("%v (see %q)", err, cmd.CommandPath()+" --help"))
		return exitUsage
	}
	code := exitCode(ran.error)
	if code != exitSignal+int(syscall.SIGPIPE) { // the reader is gone on purpose, as in "hasp demo | head"
		a.complain(message(ran.error))
	}
	return code
}

// complain prints one line to stderr, without passwords.
func (a *app) complain(line string) {
	line = strings.TrimPrefix(a.store.redact(line), "hasp: ")
	fmt.Fprintf(a.err, "hasp: %s\n", text.Plain(line))
}

func exitCode(err error) int {
	var own codeError
	var sig signalError
	var failed *demo.Error
	switch {
	case errors.As(err, &own):
		return own.code
	case errors.As(err, &failed):
		return failed.Code
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

// message returns the text of err. It adds what to do where only the command
// line program knows it.
func message(err error) string {
	var sig signalError
	switch {
	case errors.As(err, &sig): // the rest is about the call that the signal interrupted
		return sig.Error()
	case errors.Is(err, errors.ErrUnsupported) && !errors.As(err, new(codeError)):
		return err.Error() + `; "hasp strategies" shows what each strategy can do`
	}
	return err.Error()
}

// holder returns the owner of the key that err is about, or "another program".
func holder(err error) string {
	var held *backend.HeldError
	if errors.As(err, &held) && held.Owner != "" {
		return text.Quote(held.Owner)
	}
	return "another program"
}
