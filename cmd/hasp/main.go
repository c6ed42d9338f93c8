// Command hasp takes named locks from a shell: it runs a program under one,
// shows who holds one, and proves on this machine that they work.
//
//	hasp demo                          several processes take turns at one lock
//	hasp run backup -- ./backup.sh     like flock(1), or cluster-wide with --url
//	hasp inspect backup                who holds it, since when, who waits
//
// Where the locks are kept is one string, as in package hasp: --url, the
// environment variable HASP_URL, or a file given by --config. Without any of
// them it is filelock://, which needs no server.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
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
	code     int // exit code of a command that ran to its end, 0 unless it says otherwise
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "hasp",
		Short: "Named locks that processes share",
		Long: `hasp runs programs under named locks that processes share: of one host by
default, of many hosts when --url names a Redis.

Where the locks are kept is said by one of these:

  --url URL        such as spinlock+redis://localhost:6379/0?ttl=10s
  --config FILE    YAML with the fields strategy, nodes and params; not with --url

Without either of them:

  HASP_URL         in the environment: the right place for a password, and so is a file
  filelock://      if that is not set: files in this user's state directory, no server needed`,
		Args:                       noArgs,
		RunE:                       func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
		SilenceErrors:              true,
		SilenceUsage:               true,
		SuggestionsMinimumDistance: 2,
	}
	a.store.register(root)
	root.AddCommand(a.runCommand(), a.demoCommand(), a.workerCommand(), a.inspectCommand(), a.breakCommand(),
		a.strategiesCommand(), a.conformCommand(), a.versionCommand())
	for _, cmd := range root.Commands() {
		markRan(cmd)
	}
	return root
}

// markRan has the errors of cmd itself told apart from cobra's own, all of
// which are about the command line.
func markRan(cmd *cobra.Command) {
	run := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if err := run(cmd, args); err != nil {
			return ranError{err}
		}
		return nil
	}
}

// noArgs refuses arguments. On the root they are a command that does not
// exist.
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
func oneKey(cmd *cobra.Command, args []string) error {
	if len(args) != 1 {
		return fmt.Errorf("want one argument, the key; got %d", len(args))
	}
	return nil
}

// interruptible returns a context that SIGINT and SIGTERM end, with a
// signalError as its cause.
func interruptible(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	ch := make(chan os.Signal, 1)
	signal.Notify(ch, job.NotIgnored([]os.Signal{os.Interrupt, syscall.SIGTERM})...)
	go func() {
		select {
		case sig := <-ch:
			cancel(signalError{sig})
		case <-ctx.Done():
		}
	}()
	return ctx, func() {
		signal.Stop(ch)
		cancel(nil)
	}
}

// causeOf is err, or if a signal ended ctx, that.
func causeOf(ctx context.Context, err error) error {
	var sig signalError
	if err != nil && errors.As(context.Cause(ctx), &sig) {
		return sig
	}
	return err
}
