package cli

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/cli/job"
	"github.com/hasplock/hasp/internal/cli/text"
)

// lead is hasp run that competes for the key again when it has lost it.
type lead struct {
	run
	down   atomic.Bool // the last attempt found the store down
	quiet  func()      // ends the notice that hasp waits
	ended  bool        // a command has ended
	result job.Result  // of that command

	// A signal ends the wait for the key. While the command runs, the signal is passed on to the
	// command, and hasp ends after the command.
	mu       sync.Mutex
	commands bool // a command runs
	signaled bool // a signal has arrived that ends hasp
	cancel   context.CancelFunc
}

const leadHelp = `lead waits until it holds KEY, and runs COMMAND while it holds KEY. Of all
programs that run hasp lead with the same KEY, one runs its COMMAND at a time. It
is the leader. If hasp loses KEY, it ends COMMAND: it sends SIGTERM, and SIGKILL
after --grace. Then it waits for KEY again, and starts COMMAND again.

When COMMAND ends while hasp holds KEY, hasp frees KEY and exits with COMMAND's
code. The next program leads at once, or with --min-hold when that is over. If the
store cannot be reached at the start, hasp exits with 69. Later outages do not end
hasp lead: it goes on asking. With --slots N, up to N programs lead at once.

A signal that ends hasp while it waits is passed on to COMMAND while that runs.
hasp keeps KEY until COMMAND has ended, so that no other COMMAND starts before.

COMMAND finds the key in HASP_KEY and, with --fence, the fence in HASP_FENCE. All
else is as with hasp run: "hasp run --help" describes the environment, signals and
terminals.

`

func (a *app) leadCommand() *cobra.Command {
	l := &lead{run: run{app: a}}
	cmd := &cobra.Command{
		Use:   "lead KEY [flags] -- COMMAND [ARG]...",
		Short: "Run a command while leading, and compete again after a loss",
		Long: leadHelp + exitCodes(
			`the store could not be reached at the start`,
			`hasp lead runs inside a hasp that holds the key`,
			`lost: a signal arrived while COMMAND ran, and the lock was lost before
         COMMAND ended; without a signal, hasp waits for KEY again`),
		Example: `  hasp lead scheduler -- ./scheduler
  hasp lead mailer --ttl 10s --url spinlock+redis://redis:6379 -- ./mailer`,
		Args: runArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			l.key, l.argv = args[0], args[1:]
			return l.lead(cmd)
		},
	}
	l.commonFlags(cmd)
	return cmd
}

// lead runs the command whenever it holds the key.
func (l *lead) lead(cmd *cobra.Command) error {
	l.signals = make(chan os.Signal, 32)
	signal.Notify(l.signals, job.NotIgnored(job.Ending)...)
	defer signal.Stop(l.signals)

	client, err := l.begin(cmd, l.observe)
	if err != nil {
		return err
	}
	defer l.close(client)
	if err := l.refuseNested(cmd.Context(), client); err != nil {
		return err
	}

	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	l.cancel = cancel
	defer context.AfterFunc(cmd.Context(), l.interrupted)()
	waiting, quiet := context.WithCancel(ctx)
	defer quiet()
	l.quiet = quiet
	defer time.AfterFunc(noticeAfter, func() { l.sayWaiting(waiting, client) }).Stop()

	err = hasp.Lead(ctx, client, l.key, l.term, l.options(cmd)...)
	var failed *hasp.Error
	if err != nil && !(l.ended && errors.As(err, &failed) && failed.Op == "unlock") {
		return err // of the wait, or of the start of the command
	}

	// If a signal has ended hasp, an error returned from here would count as that signal.
	l.finish(client, l.result, err)
	return nil
}

// interrupted handles a signal that ends hasp.
func (l *lead) interrupted() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.signaled = true
	if !l.commands {
		l.cancel()
	}
}

// commanding records that a command begins or has ended. If a signal has come before, no command
// may begin, and commanding returns false.
func (l *lead) commanding(begins bool) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.signaled {
		l.cancel()
		if begins {
			return false
		}
	}
	l.commands = begins
	return true
}

// term is one time of leading.
func (l *lead) term(ctx context.Context, lease *hasp.Lease) (err error) {
	signal.Notify(l.signals, job.NotIgnored(job.PassedOn)...)
	if !l.commanding(true) {
		return context.Cause(ctx)
	}
	defer l.commanding(false)
	l.quiet()
	l.ended = false

	// Do not begin the command if a signal is here already: it ends hasp, and the command would not
	// get it.
	for len(l.signals) > 0 {
		if slices.Contains(job.Ending, <-l.signals) {
			l.interrupted()
			return context.Canceled
		}
	}

	l.result, err = l.attend(lease)
	l.ended = err == nil
	return err
}

// observe prints that hasp leads, and once in an outage that the store is down.
func (l *lead) observe(_ context.Context, e hasp.Event) {
	switch e.Kind {
	case hasp.EventAcquired:
		l.complain("leads %s", text.Quote(l.key))
		l.down.Store(false)
	case hasp.EventRefused:
		if errors.Is(e.Err, hasp.ErrUnavailable) && !l.down.Swap(true) {
			l.complain("%v; hasp goes on asking", e.Err)
		}
	}
}
