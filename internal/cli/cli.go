// Package cli is the body of the command hasp. Programs that add strategies of other modules, such
// as cmd/hasp-all, also use it.
package cli

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/cli/job"
	"github.com/hasplock/hasp/internal/cli/text"
)

// Main runs the command hasp and returns the exit code. The command has the strategies of this
// module and the given ones. The program must import the packages of the given strategies. If hasp
// demo has started this process as a worker, Main does the worker's part instead.
func Main(more ...Strategy) int {
	strategyTable = append(strategyTable, more...)
	if os.Getenv(workerEnv) != "" {
		return workDemo(context.Background())
	}
	return execute(os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
}

// execute runs one command line and returns the exit code.
func execute(args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	ctx, release := interruptible(context.Background(), job.Ending...)
	printing, fail := context.WithCancelCause(ctx) // also ends when a write to stdout fails
	defer fail(nil)
	out := output{printing, fail, stdout}

	a := &app{in: stdin, stdout: stdout, out: out, err: stderr, release: release}
	root := a.root()
	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(out)
	root.SetErr(stderr)

	cmd, err := root.ExecuteContextC(ctx)
	writeErr := context.Cause(printing) // or the cause of ctx, if that has ended
	if writeErr != nil && ctx.Err() == nil {
		err = writeErr
		a.ran = true // the error is not about the command line, not even with hasp --help
	}

	signalErr := release()
	if signalErr != nil && err != nil {
		err = signalErr // drop err, which is only about the interrupted call
	}
	return a.exit(cmd, err)
}

// app has what all commands share.
type app struct {
	in       io.Reader
	stdout   io.Writer    // as hasp has inherited it
	out, err io.Writer    // out is an output to stdout
	release  func() error // the function release that interruptible has returned
	store    storeFlags
	strategy string // the store's strategy; the method open sets it
	ran      bool   // a command has begun; earlier errors are about the command line
	code     int    // the exit code of a command that returned no error
}

const rootHelp = `hasp runs programs under named locks. While one program holds a name, which hasp
calls a key, no other program gets it. If a holder dies, its lock ends by itself
when its term is over, by default after 30 seconds.

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

"hasp run --help" lists the exit codes.`

// root returns the command hasp with all its subcommands.
func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "hasp",
		Short: "Named locks that processes share",
		Long:  rootHelp,
		PersistentPreRun: func(cmd *cobra.Command, _ []string) {
			// cobra checks the groups of flags only after this function.
			a.ran = cmd.ValidateFlagGroups() == nil
		},
		SilenceErrors:              true,
		SilenceUsage:               true,
		SuggestionsMinimumDistance: 1, // with 2, every short name resembles ls
		Version:                    version(),
	}

	root.SetVersionTemplate("hasp {{.Version}}\n")

	a.store.register(root)
	_ = root.RegisterFlagCompletionFunc("url", completeURL)
	root.AddCommand(
		a.runCommand(), a.leadCommand(),
		a.lockCommand(), a.renewCommand(), a.unlockCommand(),
		a.inspectCommand(), a.lsCommand(), a.uiCommand(), a.breakCommand(),
		a.strategiesCommand(), a.doctorCommand(), a.conformCommand(), a.demoCommand(), a.manCommand(),
	)
	root.InitDefaultHelpCmd()
	for _, cmd := range root.Commands() {
		if cmd.Name() == "help" { // otherwise it prints its help for an unknown name, and succeeds
			cmd.Args = func(_ *cobra.Command, args []string) error {
				_, _, err := root.Find(args)
				return err
			}
		}
		if strings.Contains(cmd.Use, " KEY") {
			cmd.ValidArgsFunction = a.completeKey
		}
		if cmd.Args == nil {
			cmd.Args = countArgs
		}
	}

	return root
}

// completeURL returns the examples of all strategies' URLs, for the completion of --url in a shell.
func completeURL(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	var urls []string
	for _, s := range strategyTable {
		urls = append(urls, s.URL+"\t"+s.About)
	}
	return urls, cobra.ShellCompDirectiveNoSpace | cobra.ShellCompDirectiveNoFileComp
}

// completeKey returns keys that begin with prefix and are held or waited for, for the completion in
// a shell. It must print no warning, which would appear in the middle of the line that the user
// types.
func (a *app) completeKey(
	cmd *cobra.Command, args []string, prefix string,
) (keys []string, _ cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveDefault // complete a command, not a key
	}

	const maxKeys = 100
	ctx, cancel := context.WithTimeout(cmd.Context(), 2*time.Second) // the user waits
	defer cancel()
	cmd.SetContext(ctx)
	a.err = io.Discard

	// After an error, offer the keys that were listed before it.
	_ = a.withClient(cmd, func(ctx context.Context, client *hasp.Client) error {
		for e, err := range client.List(ctx, prefix) {
			if err != nil || len(keys) == maxKeys {
				return err
			}
			if text.Label(e.Key, '~') == e.Key { // a shell cannot show other keys
				keys = append(keys, e.Key)
			}
		}

		return nil
	})

	return keys, cobra.ShellCompDirectiveNoFileComp
}

// interruptible returns a context that ends when one of sigs arrives. The context's cause names the
// signal. After the first call of the function release, signals no longer end the context. Each
// call of release returns the cause if a signal has ended the context before, and nil otherwise.
func interruptible(
	ctx context.Context, sigs ...os.Signal,
) (_ context.Context, release func() error) {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, job.NotIgnored(sigs)...)

	ctx, cancel := context.WithCancelCause(ctx)
	var watcher sync.WaitGroup
	watcher.Go(func() {
		for sig := range signals {
			cancel(signalError(sig)) // only the first call sets the cause
		}
	})

	return ctx, sync.OnceValue(func() error {
		signal.Stop(signals) // from now on, nothing is sent to signals
		close(signals)
		watcher.Wait() // a signal that has arrived still counts
		return context.Cause(ctx)
	})
}

func (a *app) manCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "man",
		Short:   "Print a man page of all commands",
		Example: `  hasp man >/usr/local/share/man/man1/hasp.1`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			root := cmd.Root()
			page := ".TH HASP 1\n"
			page += ".SH NAME\nhasp \\- " + root.Short + "\n"
			page += ".SH DESCRIPTION\n" + roff(root.Long)
			for _, c := range root.Commands() {
				if !c.Hidden && c.Name() != "help" {
					about := cmp.Or(c.Long, c.Short) + "\n\n" + c.LocalFlags().FlagUsages()
					page += ".SH \"" + strings.ToUpper(c.CommandPath()) + "\"\n"
					page += roff(c.UseLine() + "\n\n" + about + "\n" + c.Example)
				}
			}

			page += ".SH \"FLAGS OF ALL COMMANDS\"\n" + roff(root.PersistentFlags().FlagUsages())
			_, err := io.WriteString(a.out, page)
			return err
		},
	}
}

// roff formats text for a man page, and keeps its lines as they are. To roff, a backslash begins an
// escape, a "-" is a hyphen, and a line that begins with "." or "'" is a request.
func roff(text string) string {
	escapes := strings.NewReplacer(`\`, `\e`, "-", `\-`, "\n.", "\n\\&.", "\n'", "\n\\&'")
	text = escapes.Replace("\n" + strings.TrimSpace(text))
	return ".nf" + text + "\n.fi\n"
}

// version returns the versions of the module and of Go, and the platform.
func version() string {
	module := ""
	if info, ok := debug.ReadBuildInfo(); ok {
		module = info.Main.Version
	}
	return fmt.Sprintf("%s %s %s/%s", cmp.Or(module, "(devel)"), runtime.Version(), runtime.GOOS,
		runtime.GOARCH)
}
