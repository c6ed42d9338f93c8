package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/cli/text"
)

// These are the exit codes of hasp itself. 64, 69 and 75 are as in sysexits.h, 126 and 127 as in
// every shell.
const (
	exitFailed      = 1   // a check failed, such as a clause of the suite; or a write failed
	exitUsage       = 64  // EX_USAGE: the command line, the key, the URL or the file is wrong
	exitStore       = 69  // EX_UNAVAILABLE: the store cannot be reached or did not answer
	exitNotAcquired = 75  // EX_TEMPFAIL: another program holds the key; try again later
	exitLost        = 79  // the lock was lost while the command ran
	exitCannotRun   = 126 // the command exists and cannot be executed
	exitNotFound    = 127 // the command does not exist
	exitSignal      = 128 // plus the number of the signal
)

// exitCodes returns the part of a help text about exit codes. The arguments say what 69, 75 and 79
// mean for the command. If the command never exits with 75, held is empty.
func exitCodes(store, held, lost string) string {
	if held != "" {
		held = "\n  75     " + held
	}
	return `Exit codes:

  the code of COMMAND, if it ran to its end under the lock
  128+n  signal n ended COMMAND, or hasp while it waited
  64     wrong usage: a flag, the key, the URL or the configuration
  69     ` + store + held + `
  79     ` + lost + `
  126    COMMAND cannot be executed
  127    COMMAND was not found

If the code is one of hasp's own, a line on stderr that begins with "hasp:" says
why.`
}

// codeError is an error with an exit code of its own.
type codeError struct {
	code int
	error
}

func (e codeError) Unwrap() error { return e.error }

// usagef returns an error about how hasp was called.
func usagef(format string, args ...any) error {
	return codeError{exitUsage, fmt.Errorf(format, args...)}
}

// signalError returns the error that says that a signal has ended hasp or a process that it has
// started. As in shells, the exit code is 128 + the signal's number.
func signalError(sig os.Signal) error {
	return codeError{exitSignal + int(sig.(syscall.Signal)),
		errors.New("ended by signal: " + sig.String())}
}

// inOurWords translates errors of cobra about the command line, by regular expressions. Of each
// pair, the first one is searched for, and replaced by the second one.
var inOurWords = []struct{ theirs, ours string }{
	{`^unknown command (".*?") for .* Did you mean this\? (\w+).*`,
		`there is no command $1; did you mean $2`},
	{`^unknown command (".*?") for .*`, `there is no command $1`},
	{`^(?:unknown flag|bad flag syntax): (\S+)`, `there is no flag $1`},
	{`^unknown shorthand flag: '(.)' in \S+`, `there is no flag -$1`},
	{`^flag needs an argument: (?:'.' in )?(\S+)`, `$1 needs a value`},
	{`^invalid argument (".*") for "(?:-., )?(--\S+)" flag: `, `$2 $1: `},
	{`: strconv.ParseInt: .*`, `: want a number`},
	{`: strconv.ParseBool: .*`, `: want true or false`},
	{`^if any flags in the group .* \[(\S+) (\S+)\] were all set`,
		`--$1 and --$2 exclude each other: give one of them`},
}

// exit prints err in one line and returns the exit code. An error that came before the command has
// begun is about the command line. exit translates such an error, and refers to the help of cmd.
func (a *app) exit(cmd *cobra.Command, err error) int {
	if err == nil {
		return a.code
	}
	if !a.ran {
		words := strings.Join(strings.Fields(err.Error()), " ")
		for _, w := range inOurWords {
			words = regexp.MustCompile(w.theirs).ReplaceAllString(words, w.ours)
		}
		a.complain("%s (see %q)", words, cmd.CommandPath()+" --help")
		return exitUsage
	}

	code := exitCode(err)
	if code != exitSignal+int(syscall.SIGPIPE) { // no process reads stdout: see output.Write
		a.complain("%v", err)
	}
	return code
}

// complain prints one line to stderr. It removes passwords from args. It does not remove them from
// format, which contains none, but may contain a word that is the same as a password.
func (a *app) complain(format string, args ...any) {
	for i, arg := range args {
		args[i] = a.store.redact(fmt.Sprint(arg))
	}

	message := strings.TrimPrefix(fmt.Sprintf(format, args...), "hasp: ") // errors of hasp have it
	line := "hasp: " + text.Plain(message) + "\n"

	// The write may block, for example if a pager does not read on, or after Ctrl-S in a terminal.
	// Do not wait long for it, so that hasp neither keeps a key nor ignores a signal meanwhile. The
	// line still appears if stderr is read before hasp ends.
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_, _ = unlessEnded(ctx, func() error {
		_, err := io.WriteString(a.err, line)
		return err
	})
}

// exitCode returns the exit code for err: the code of a codeError, or else that of the kind of err.
func exitCode(err error) int {
	var own codeError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &own):
		return own.code
	case errors.Is(err, hasp.ErrInvalid), errors.Is(err, errors.ErrUnsupported):
		return exitUsage
	case errors.Is(err, hasp.ErrHeld):
		return exitNotAcquired
	case errors.Is(err, hasp.ErrLost):
		return exitLost
	case errors.Is(err, hasp.ErrUnavailable):
		return exitStore
	}

	return exitFailed
}
