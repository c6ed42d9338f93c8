// Command hasp takes named locks from a shell. It runs a program under a lock,
// shows who holds a key, and demonstrates that the locks work.
//
//	hasp demo                          several processes take turns at one lock
//	hasp run backup -- ./backup.sh     like flock(1), or on many hosts with --url
//	hasp inspect backup                who holds the key, since when, who waits
//
// A URL says where the locks are kept, as in package hasp. It comes from --url,
// from a file given by --config, or from the environment variable HASP_URL.
// Without them it is filelock://, which needs no server.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/hasplock/hasp/cmd/hasp/internal/job"
)

func main() {
	os.Exit(execute(os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

// execute runs one command line and returns the exit code.
func execute(args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	a := &app{in: stdin, out: stdout, err: stderr}
	root := a.root()
	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(stdout)
	root.SetErr(stderr)
	cmd, err := root.ExecuteC()
	return a.exit(cmd, err)
}

// app is what the commands share.
type app struct {
	in       io.Reader
	out, err io.Writer
	store    storeFlags
	code     int // the exit code of a command that returned no error
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "hasp",
		Short: "Named locks that processes share",
		Long: `hasp runs programs under named locks. While one program holds a name, which hasp
calls a key, no other program gets it. If a holder dies, its lock ends by itself
when its term is over.

Start with "hasp demo", which needs no server, or with

  hasp run backup -- ./backup.sh

This runs ./backup.sh under the key "backup". A second hasp run with the same
key waits until the first has ended.

A URL names the strategy and the store in which the locks are kept. hasp takes
the first of these that is given:

  --url URL or --config FILE    a URL, or a YAML file with the same content
  HASP_URL                      a URL in the environment
  filelock://                   files in this user's state directory: the locks
                                are shared by this user's programs on this host

Programs on several hosts share locks in a Redis, for example with --url
spinlock+redis://localhost:6379/0?ttl=10s. "hasp strategies" lists the choices.
Put a password into HASP_URL or the file: other users of this host can read the
arguments of a program.

"hasp run --help" lists the exit codes.`,
		Args:                       noArgs,
		RunE:                       func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
		SilenceErrors:              true,
		SilenceUsage:               true,
		SuggestionsMinimumDistance: 2,
		Version:                    version(),
	}
	root.SetVersionTemplate("hasp {{.Version}}\n")
	a.store.register(root)
	root.AddCommand(a.runCommand(), a.demoCommand(), a.workerCommand(), a.inspectCommand(), a.breakCommand(),
		a.strategiesCommand(), a.conformCommand(), a.versionCommand())
	for _, cmd := range root.Commands() {
		markRan(cmd)
	}

	// Without this, "hasp help" prints the help of hasp for an unknown command.
	root.InitDefaultHelpCmd()
	help, _, _ := root.Find([]string{"help"})
	help.Args = func(_ *cobra.Command, args []string) error {
		cmd, rest, err := root.Find(args)
		if err == nil && cmd == root {
			err = noArgs(root, rest)
		}
		return err
	}
	return root
}

// markRan wraps the errors of cmd itself in ranError. Unwrapped errors are
// cobra's, and concern the command line.
func markRan(cmd *cobra.Command) {
	run := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if err := run(cmd, args); err != nil {
			return ranError{err}
		}
		return nil
	}
}

// noArgs refuses arguments. An argument of the root is an unknown command.
func noArgs(cmd *cobra.Command, args []string) error {
	switch {
	case len(args) == 0:
		return nil
	case cmd.HasParent():
		return fmt.Errorf("%s takes no arguments", cmd.CommandPath())
	}
	if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
		return fmt.Errorf("unknown command %q, did you mean %q?", args[0], near[0])
	}
	return fmt.Errorf("unknown command %q", args[0])
}

// oneKey wants exactly one argument, the key.
func oneKey(_ *cobra.Command, args []string) error {
	if len(args) != 1 {
		return fmt.Errorf("want one argument, the key; got %d", len(args))
	}
	return nil
}

// interruptible returns a context that SIGINT and SIGTERM end, with a
// signalError as its cause.
func interruptible(ctx context.Context) (_ context.Context, stop func()) {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, job.NotIgnored([]os.Signal{os.Interrupt, syscall.SIGTERM})...)
	ctx, release := endedBy(ctx, signals)
	return ctx, func() {
		signal.Stop(signals)
		_ = release()
	}
}

// endedBy returns a context that ends with the first of signals, with a
// signalError as its cause. release stops that, leaves the context as it is, and
// returns the cause if the context has ended.
func endedBy(ctx context.Context, signals <-chan os.Signal) (_ context.Context, release func() error) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := make(chan struct{})
	var watch sync.WaitGroup
	watch.Go(func() {
		select {
		case sig := <-signals:
			cancel(signalError{sig})
		case <-stop:
		}
	})
	return ctx, func() error {
		close(stop)
		watch.Wait()
		return context.Cause(ctx)
	}
}

// causeOf returns the signal that ended ctx instead of err, if err is not nil
// and a signal did.
func causeOf(ctx context.Context, err error) error {
	var sig signalError
	if err != nil && errors.As(context.Cause(ctx), &sig) {
		return sig
	}
	return err
}
