package cli

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"slices"
	"sync"

	"github.com/spf13/cobra"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/cli/job"
	"github.com/hasplock/hasp/internal/cli/text"
)

// lead has the state of a call of hasp lead. This is like hasp run, but when it has lost the key,
// it competes for the key again.
type lead struct {
	run
	down   bool       // the last attempt could not reach the store
	ended  bool       // a command has ended
	result job.Result // the result of the last command

	startWait func()      // sets endWait
	endWait   func() bool // from run.beginWait; nil if hasp does not wait

	// A signal ends the wait for the key by a call of cancel. While the command runs, hasp passes
	// the signal on to the command, and ends after the command. So each call of cancel holds mu,
	// and mu is held while the command runs.
	mu     sync.Mutex
	cancel context.CancelFunc
}

const leadHelp = `lead waits until it holds KEY, and runs COMMAND while it holds KEY. Of all
programs that run hasp lead with the same KEY, one runs its COMMAND at a time. It
is the leader. If hasp loses KEY, it ends COMMAND: it sends SIGTERM, and SIGKILL
after --grace. Then it waits for KEY again, and starts COMMAND again.

When COMMAND ends while hasp holds KEY, hasp frees KEY and exits with COMMAND's
code. The next program leads at once, or with --min-hold when that is over. With
--max-hold, hasp leads for that long at most, and then waits for KEY again. If the
store cannot be reached at the start, hasp exits with 69. Later outages do not end
hasp lead: it goes on asking.

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
			``,
			`lost: a signal arrived while COMMAND ran, and the lock was lost before
         COMMAND ended; without a signal, hasp waits for KEY again`),
		Example: `  hasp lead scheduler -- ./scheduler
  hasp lead mailer --ttl 10s --url spinlock+redis://redis:6379 -- ./mailer`,
		Args: runArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			l.key = args[0]
			l.goal = "the lead of " + text.Quote(l.key)
			l.argv = args[1:]
			return l.lead(cmd)
		},
	}

	l.commonFlags(cmd)
	l.graceFlag(cmd)
	return cmd
}

// lead competes for the key, and runs the command whenever it holds the key.
func (l *lead) lead(cmd *cobra.Command) error {
	l.signals = make(chan os.Signal, 32)
	signal.Notify(l.signals, job.NotIgnored(job.Ending)...)
	defer signal.Stop(l.signals)

	client, err := l.begin(cmd, l.observe)
	if err != nil {
		return err
	}
	defer l.close(client)

	// The end of ctx ends the wait or, while the command runs, the lease. So a signal must not end
	// it while the command runs.
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	l.cancel = cancel
	stop := context.AfterFunc(cmd.Context(), func() { // a signal ends cmd.Context()
		l.mu.Lock()
		defer l.mu.Unlock()
		cancel()
	})
	defer stop()

	l.startWait = func() { l.endWait = l.beginWait(ctx, client) }

	err = hasp.Lead(ctx, client, l.key, func(_ context.Context, lease *hasp.Lease) error {
		return l.leadOnce(cmd.Context(), lease)
	}, l.options(cmd)...)

	var opErr *hasp.Error
	onlyUnlockFailed := l.ended && errors.As(err, &opErr) && opErr.Op == "unlock"
	if err != nil && !onlyUnlockFailed {
		return err // the wait or the start of the command has failed
	}

	// The command has ended, and err may be the error of the unlock after it. Do not return err: if
	// a signal has ended hasp, the function execute replaces each returned error by the signal's
	// error.
	l.finish(client, l.result, err)
	return nil
}

// leadOnce runs the command once, for as long as this process leads. A signal that ends hasp ends
// ctx. If that has happened before the command begins, leadOnce does not begin it. Then it returns
// an error, as it does if the command cannot be started.
func (l *lead) leadOnce(ctx context.Context, lease *hasp.Lease) (err error) {
	signal.Notify(l.signals, job.NotIgnored(job.PassedOn)...)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ended = false

	// A signal that has already arrived ends hasp, and the command would not receive it. It is in
	// l.signals, in ctx, or in both.
	mustEnd := ctx.Err() != nil
	for len(l.signals) > 0 {
		sig := <-l.signals
		mustEnd = mustEnd || slices.Contains(job.Ending, sig)
	}
	if mustEnd {
		l.cancel() // so that Lead ends
		return context.Canceled
	}

	l.result, err = l.attend(lease)
	l.ended = err == nil // an error says that the command was not started
	if ctx.Err() != nil {
		l.cancel() // so that hasp does not compete for the key again
	}
	return err
}

// observe prints that hasp leads. In an outage it prints once that the store cannot be reached. It
// also begins and ends the wait, which prints a notice (see beginWait). In an outage each attempt
// is another call of Lock and has an EventRequested, but it is still the same wait.
func (l *lead) observe(ctx context.Context, e hasp.Event) {
	switch e.Kind {
	case hasp.EventRequested:
		if l.endWait == nil {
			l.startWait()
		}
	case hasp.EventAcquired:
		l.endWait()
		l.endWait = nil
		l.complain("leads %s", text.Quote(l.key))
		l.down = false
	case hasp.EventRefused:
		if errors.Is(e.Err, hasp.ErrUnavailable) && !l.down {
			l.down = true
			l.complain("%v; hasp goes on asking", e.Err)
		}
	default:
		l.run.observe(ctx, e)
	}
}
