package cli

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/hasplock/hasp/internal/clock"
)

// duration is the value of a flag. Its text may also be a number of seconds, as for flock(1).
type duration time.Duration

// Set parses text.
func (d *duration) Set(text string) error {
	parsed, err := clock.ParseDuration(text)
	if err != nil {
		return errors.New("want a duration such as 90s or 1h30m, or a number of seconds")
	}
	*d = duration(parsed)
	return nil
}

// Type returns the name of the type in the help text.
func (d *duration) Type() string { return "duration" }

// String returns "", so that the help text shows no default.
func (d *duration) String() string { return "" }

// countArgs checks that a command has the arguments that cmd.Use names. A name in brackets is
// optional.
func countArgs(cmd *cobra.Command, args []string) error {
	use, _, _ := strings.Cut(cmd.Use, " --")
	names := strings.Fields(use)[1:]
	want := fmt.Sprintf("want %q", "hasp "+cmd.Use)
	switch {
	case len(args) > len(names):
		return errors.New("too many arguments (quote one that has blanks): " + want)
	case len(args) < len(names) && !strings.HasPrefix(names[0], "["):
		name, _, _ := strings.Cut(names[0], "|") // of HANDLE|-, say only HANDLE
		return fmt.Errorf("no %s given: %s", strings.ToLower(name), want)
	}

	return nil
}

// runArgs checks that the arguments are a key, two dashes, and a command.
func runArgs(cmd *cobra.Command, args []string) error {
	want := fmt.Sprintf(`want "%s KEY -- COMMAND [ARG]..."`, cmd.CommandPath())
	dash := cmd.ArgsLenAtDash() // how many arguments stand before the two dashes; -1 without dashes
	switch {
	case len(args) == 0 || dash == 0:
		return errors.New("no key given: " + want)
	case len(args) == 1:
		return errors.New("no command given: " + want)
	case dash < 0:
		return errors.New(`no "--" before the command: ` + want)
	case dash > 1:
		return fmt.Errorf("%d keys given: %s", dash, want)
	}

	return nil
}
