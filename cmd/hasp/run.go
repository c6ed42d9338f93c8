package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/cmd/hasp/internal/job"
	"github.com/hasplock/hasp/cmd/hasp/internal/text"
)

// noticeAfter is how long run waits before it says on a terminal that it waits.
const noticeAfter = time.Second

type runFlags struct {
	wait   time.Duration // 0 with noWait
	noWait bool
	ttl    time.Duration
	fence  bool
	grace  time.Duration
}

func (a *app) runCommand() *cobra.Command {
	var f runFlags
	cmd := &cobra.Command{
		Use:   "run KEY [flags] -- COMMAND [ARG]...",
		Short: "Run a command while holding a key",
		Long: `run waits until it holds KEY, runs COMMAND, and frees KEY when COMMAND has ended.
hasp renews the lock while COMMAND runs. If the lock is lost nevertheless, hasp
ends COMMAND: it sends SIGTERM, and SIGKILL after --grace.

COMMAND finds the key in HASP_KEY and, with --fence, the fence in HASP_FENCE. A
fence is a number that grows with every holder. Pass it to the resource that the
lock protects, so that the resource can refuse a holder that is late.

COMMAND inherits the rest of the environment, so it can use hasp as well. It
also gets HASP_URL with a password in it. To keep the password from COMMAND, use
a --config file that COMMAND may not read.

COMMAND runs in a process group of its own. hasp passes INT, TERM, HUP, QUIT,
USR1, USR2, WINCH, TSTP and CONT on to that group. On a terminal the group is in
the foreground: editors, ssh and shells work, and Ctrl-C reaches COMMAND
directly. Ctrl-Z stops COMMAND and hasp. A stopped hasp does not renew the lock.
If it continues after the term, the lock is lost, and hasp ends COMMAND.

Processes that COMMAND leaves in the background do not hold KEY. If hasp itself
is killed with SIGKILL, KEY is free when its term is over. On Linux the kernel
then kills COMMAND, but not a set-uid COMMAND, nor the processes that COMMAND has
started.

` + exitCodes,
		Example: `  hasp run backup -- ./backup.sh
  hasp run backup --no-wait -- ./backup.sh || echo "exit code $?"
  hasp run deploy --wait 5m --fence --url spinlock+redis://redis:6379 -- sh -c 'deploy --fence $HASP_FENCE'`,
		Args: func(cmd *cobra.Command, args []string) error {
			const want = `want "hasp run KEY -- COMMAND [ARG]..."`
			switch dash := cmd.ArgsLenAtDash(); {
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
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := exclusive(cmd, "wait", "no-wait"); err != nil {
				return err
			}
			if f.wait < 0 || f.grace < 0 {
				return usagef("--wait and --grace cannot be negative")
			}
			return a.run(cmd, args[0], args[1:], &f)
		},
	}
	fl := cmd.Flags()
	fl.DurationVar(&f.wait, "wait", 0, "wait this long at most, such as 10s or 5m; 0 is one attempt (default: no limit)")
	fl.BoolVar(&f.noWait, "no-wait", false, "make one attempt, and exit with 75 if the key is held")
	fl.DurationVar(&f.ttl, "ttl", 0, "term of the lock: how long KEY stays locked if hasp dies (default: ttl in the URL, or 30s)")
	fl.BoolVar(&f.fence, "fence", false, "set HASP_FENCE, and fail if the strategy has no fences")
	fl.DurationVar(&f.grace, "grace", 5*time.Second, "time between SIGTERM and SIGKILL if the lock is lost")
	return cmd
}

// options returns f as options of Lock.
func (f *runFlags) options(cmd *cobra.Command) []hasp.Option {
	var opts []hasp.Option
	if f.noWait || cmd.Flag("wait").Changed {
		opts = append(opts, hasp.WithMaxWait(f.wait))
	}
	if cmd.Flag("ttl").Changed {
		opts = append(opts, hasp.WithTTL(f.ttl))
	}
	if f.fence {
		opts = append(opts, hasp.WithFence())
	}
	return opts
}

// run is hasp run: it locks, runs the command, and unlocks.
func (a *app) run(cmd *cobra.Command, key string, argv []string, f *runFlags) error {
	path, err := exec.LookPath(argv[0])
	if err != nil { // before hasp waits for the key
		return cannotRun(argv[0], err)
	}

	signals := make(chan os.Signal, 32)
	signal.Notify(signals, job.NotIgnored(job.Ending)...)
	defer signal.Stop(signals)
	// The lease ends with ctx, so ctx must outlive release: from then on a signal is
	// the command's.
	ctx, release := endedBy(cmd.Context(), signals)
	var renewed renewals
	client, err := a.open(ctx, cmd, "hasp run "+filepath.Base(argv[0]), renewed.observe)
	if err != nil {
		return cmp.Or(release(), err)
	}
	defer client.Close()
	lease, err := a.acquire(ctx, client, key, f.wait, f.options(cmd))
	switch cause := release(); {
	case err != nil:
		return cmp.Or(cause, err)
	case cause != nil: // the signal and the lock came at the same time
		return errors.Join(cause, lease.Unlock(ctx))
	}

	// hasp may have been stopped until after the term.
	if err := lease.Err(); err != nil {
		return fmt.Errorf("%s: %w before the command was run", text.Quote(key), err)
	}

	// From here on, signals are passed on to the command.
	signal.Notify(signals, job.NotIgnored(job.PassedOn)...)
	j, err := job.Start(path, argv, environment(os.Environ(), lease))
	if err != nil {
		return errors.Join(cannotRun(argv[0], err), lease.Unlock(ctx))
	}
	result := j.Attend(job.Watch{Lease: lease, Signals: signals, Grace: f.grace, OnLoss: func() {
		a.complain(fmt.Sprintf("lost %s: %s; the command gets SIGTERM now, and SIGKILL in %s",
			text.Quote(key), renewed.why(lease), text.Duration(f.grace)))
	}})

	err = lease.Unlock(ctx)
	client.Close() // DieAlike may end the process
	a.finish(key, result, err)
	if a.code != exitLost {
		j.DieAlike(result)
	}
	return nil
}

// finish sets the exit code according to the ends of the command and of the
// lease.
func (a *app) finish(key string, result job.Result, unlock error) {
	a.code = result.Code
	switch {
	case result.Lost:
		a.code = exitLost
	case errors.Is(unlock, hasp.ErrLost):
		a.complain(fmt.Sprintf("lost %s before the command ended: another program may have held it meanwhile", text.Quote(key)))
		a.code = exitLost
	case unlock != nil:
		a.complain(fmt.Sprintf("warning: %s; the key is free when its term is over", strings.TrimPrefix(unlock.Error(), "hasp: ")))
	}
}

// acquire waits for the key.
func (a *app) acquire(ctx context.Context, client *hasp.Client, key string, wait time.Duration, opts []hasp.Option) (*hasp.Lease, error) {
	waiting, done := context.WithCancel(ctx)
	defer done()
	notice := time.AfterFunc(noticeAfter, func() { a.sayWaiting(waiting, client, key) })
	defer notice.Stop()

	lease, err := client.Lock(ctx, key, opts...)
	if errors.Is(err, hasp.ErrHeld) {
		within := ""
		if wait > 0 {
			within = " and was not free within " + text.Duration(wait)
		}
		return nil, codeError{exitNotAcquired, fmt.Errorf("%s is held by %s%s; the command was not run",
			text.Quote(key), holder(err), within)}
	}
	return lease, err
}

// sayWaiting says on a terminal that hasp waits, and for which holder.
func (a *app) sayWaiting(ctx context.Context, client *hasp.Client, key string) {
	if !isTerminal(a.err) {
		return
	}
	by := ""
	if s, err := client.Inspect(ctx, key); err == nil && s.Owner != "" {
		by = ", held by " + text.Quote(s.Owner)
	}
	if ctx.Err() == nil {
		a.complain("waiting for " + text.Quote(key) + by)
	}
}

// environment returns env with the key and the fence of lease. It removes those
// of another lock, which a hasp around this one may have set.
func environment(env []string, lease *hasp.Lease) []string {
	env = slices.DeleteFunc(env, func(v string) bool {
		return strings.HasPrefix(v, "HASP_KEY=") || strings.HasPrefix(v, "HASP_FENCE=")
	})
	env = append(env, "HASP_KEY="+lease.Key())
	if fence := lease.Fence(); fence != 0 {
		env = append(env, "HASP_FENCE="+strconv.FormatUint(fence, 10))
	}
	return env
}

// cannotRun returns err with the exit code that a shell would use.
func cannotRun(name string, err error) error {
	var inner *exec.Error
	if errors.As(err, &inner) {
		err = inner.Err
	}
	var path *fs.PathError
	if errors.As(err, &path) {
		err = path.Err
	}
	code := exitCannotRun
	if errors.Is(err, exec.ErrNotFound) || errors.Is(err, fs.ErrNotExist) {
		code = exitNotFound
	}
	return codeError{code, fmt.Errorf("cannot run %s: %w", text.Quote(name), err)}
}

// renewals remembers why the last renewal failed.
type renewals struct {
	mu     sync.Mutex // guards failed
	failed error
}

func (r *renewals) observe(e hasp.Event) {
	if e.Kind == hasp.EventRenewFailed {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.failed = e.Err
	}
}

// why returns the reason of a loss. If the lease has ended before its term, the
// store refused a renewal. Otherwise the term ended without a renewal.
func (r *renewals) why(lease *hasp.Lease) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case time.Now().Before(lease.Expires()):
		return "the store does not have it any more: it was broken, or the store lost its data"
	case r.failed != nil:
		return fmt.Sprintf("no renewal was answered before its term ended (%v)", r.failed)
	}
	return "hasp was stopped for longer than its term"
}
