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

	// A signal ends the wait for the key. If the command runs, hasp passes the signal on to the
	// command, and ends after the command. So mu is held while the command runs.
	mu     sync.Mutex
	cancel context.CancelFunc // ends the wait
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

	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	l.cancel = cancel
	defer context.AfterFunc(cmd.Context(), func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		cancel()
	})()

	l.startWait = func() { l.endWait = l.beginWait(ctx, client) }

	err = hasp.Lead(ctx, client, l.key, func(_ context.Context, lease *hasp.Lease) error {
		return l.leading(cmd.Context(), lease)
	}, l.options(cmd)...)
	var failed *hasp.Error
	if err != nil && !(l.ended && errors.As(err, &failed) && failed.Op == "unlock") {
		return err // the wait or the start of the command has failed
	}

	// Do not return err: if a signal has ended hasp, the function execute replaces each returned
	// error by the signal's error.
	l.finish(client, l.result, err)
	return nil
}

// leading runs the command once, for as long as this process leads. The context ctx ends with the
// signal that ends hasp.
func (l *lead) leading(ctx context.Context, lease *hasp.Lease) (err error) {
	signal.Notify(l.signals, job.NotIgnored(job.PassedOn)...)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ended = false

	// A signal that has already arrived ends hasp, and the command would not receive it. So do not
	// begin the command.
	came := ctx.Err() != nil
	for len(l.signals) > 0 {
		came = slices.Contains(job.Ending, <-l.signals) || came
	}
	if came {
		l.cancel()
		return context.Canceled
	}

	l.result, err = l.attend(lease)
	l.ended = err == nil
	if ctx.Err() != nil {
		l.cancel() // so that hasp does not compete for the key again
	}
	return err
}

// observe prints that hasp leads. In an outage it prints once that the store cannot be reached. Of
// a wait, it prints one notice, although each attempt in an outage is another call of Lock.
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
