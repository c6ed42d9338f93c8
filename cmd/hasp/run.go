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
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/cmd/hasp/internal/job"
)

// noticeAfter is how long run waits before it tells a person what for.
const noticeAfter = time.Second

type runFlags struct {
	wait   time.Duration
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
		Long: `run waits until it holds KEY, runs COMMAND, and gives the key back when the
command has ended. While it runs, the lock is renewed; if it is lost all the
same, the command is told to end by SIGTERM, and by SIGKILL after --grace.

The command finds the key in HASP_KEY and, with --fence, a number in HASP_FENCE
that is larger with every holder: hand it to what the lock protects, so that it
can refuse a holder that is late. The rest of the environment is passed on as it
is, HASP_URL and a password in it included, so that COMMAND can use hasp, too;
a --config that COMMAND may not read keeps them from it.

The command runs in a process group of its own. INT, TERM, HUP, QUIT, USR1,
USR2, WINCH, TSTP and CONT are passed on to that group. On a terminal it is the
foreground group, so that editors, ssh and shells work, and Ctrl-C goes to it
directly; Ctrl-Z stops the command and hasp. A stopped hasp does not renew: if
it is continued after its term, the lock is lost and the command is ended.

What the command leaves running in the background does not hold the key. If
hasp itself is killed with SIGKILL, the command dies too (Linux only, and not if
the command is set-uid; not the processes that the command has started), and the
key is free when its term has run out.

` + exitCodes,
		Example: `  hasp run backup -- ./backup.sh
  hasp run backup --no-wait -- ./backup.sh || echo "exit code $?"
  hasp run deploy --wait 5m --fence --url spinlock+redis://redis:6379 -- sh -c 'deploy --fence $HASP_FENCE'`,
		Args: func(cmd *cobra.Command, args []string) error {
			switch dash := cmd.ArgsLenAtDash(); {
			case dash != 1 && !(dash < 0 && len(args) == 0):
				return errors.New("want KEY -- COMMAND and its arguments")
			case len(args) < 2:
				return errors.New("no command given: want KEY -- COMMAND and its arguments")
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
	fl.DurationVar(&f.wait, "wait", 0, "wait this long at most, such as 10s or 5m; 0 is one attempt (default: for ever)")
	fl.BoolVar(&f.noWait, "no-wait", false, "make one attempt")
	fl.DurationVar(&f.ttl, "ttl", 0, "term of the lock: how long it outlives hasp if hasp dies (default: the URL's, or 30s)")
	fl.BoolVar(&f.fence, "fence", false, "ask for a fence, and fail if the strategy has none")
	fl.DurationVar(&f.grace, "grace", 5*time.Second, "time between SIGTERM and SIGKILL when the lock is lost")
	return cmd
}

// options are f as options of Lock.
func (f *runFlags) options(cmd *cobra.Command) []hasp.Option {
	var opts []hasp.Option
	if cmd.Flag("wait").Changed {
		opts = append(opts, hasp.WithMaxWait(f.wait))
	}
	if f.noWait {
		opts = append(opts, hasp.WithMaxWait(0))
	}
	if cmd.Flag("ttl").Changed {
		opts = append(opts, hasp.WithTTL(f.ttl))
	}
	if f.fence {
		opts = append(opts, hasp.WithFence())
	}
	return opts
}

// run is hasp run: lock, run, unlock.
func (a *app) run(cmd *cobra.Command, key string, argv []string, f *runFlags) error {
	path, err := findProgram(argv[0])
	if err != nil {
		return err
	}
	signals := make(chan os.Signal, 32)
	signal.Notify(signals, job.NotIgnored(job.Ending)...)
	defer signal.Stop(signals)

	var trouble renewals
	ctx, watched := endedBy(signals)
	o := &hasp.Options{Owner: owner("hasp run " + program(argv[0])), Observe: trouble.observe}
	client, err := a.open(ctx, cmd, o)
	if err != nil {
		return cmp.Or(watched(), err)
	}
	defer client.Close()
	lease, err := a.acquire(ctx, client, key, f.options(cmd))
	if cause := watched(); cause != nil && err == nil {
		return errors.Join(cause, lease.Unlock(ctx))
	} else if cause != nil || err != nil {
		return cmp.Or(cause, err)
	}
	if err := lease.Err(); err != nil { // hasp was stopped just now
		return fmt.Errorf("%s: %w before the command was run", quote(key), err)
	}
	signal.Notify(signals, job.NotIgnored(job.PassedOn)...) // from now on they are meant for the command
	j, err := job.Start(path, argv, environment(os.Environ(), lease))
	if err != nil {
		return errors.Join(cannotRun(argv[0], err), lease.Unlock(ctx))
	}
	result := j.Attend(job.Watch{Lease: lease, Signals: signals, Grace: f.grace, OnLoss: func() {
		a.complain(fmt.Sprintf("lost %s: %s; the command gets SIGTERM now, and SIGKILL in %s", quote(key), trouble.why(lease), short(f.grace)))
	}})
	err = lease.Unlock(ctx)
	client.Close()
	a.finish(key, result, err)
	if a.code != exitLost {
		j.DieAlike(result)
	}
	return nil
}

// finish sets the exit code by how the command and the unlock went.
func (a *app) finish(key string, result job.Result, unlock error) {
	a.code = result.Code
	switch {
	case result.Lost:
		a.code = exitLost
	case errors.Is(unlock, hasp.ErrLost):
		a.complain(fmt.Sprintf("lost %s before the command ended: others may have held it meanwhile", quote(key)))
		a.code = exitLost
	case unlock != nil:
		a.complain(fmt.Sprintf("warning: %v; the key is free when its term has run out", unlock))
	}
}

// endedBy returns a context that one of signals ends, until watched is called.
// After that it does not end, since the command's lease lives by it; watched
// returns the signal that ended it, if one did.
func endedBy(signals <-chan os.Signal) (ctx context.Context, watched func() error) {
	ctx, cancel := context.WithCancelCause(context.Background())
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

// acquire waits for the key.
func (a *app) acquire(ctx context.Context, client *hasp.Client, key string, opts []hasp.Option) (*hasp.Lease, error) {
	waiting, done := context.WithCancel(ctx)
	defer done()
	notice := time.AfterFunc(noticeAfter, func() { a.tellWaiting(waiting, client, key) })
	defer notice.Stop()
	began := time.Now()
	lease, err := client.Lock(ctx, key, opts...)
	if errors.Is(err, hasp.ErrHeld) {
		return nil, codeError{exitNotAcquired, fmt.Errorf("%s is held by %s; not acquired within %s, and the command was not run",
			quote(key), holder(err), short(time.Since(began)))}
	}
	return lease, err
}

// tellWaiting tells a person at a terminal why nothing happens.
func (a *app) tellWaiting(ctx context.Context, client *hasp.Client, key string) {
	if !isTerminal(a.err) {
		return
	}
	by := ""
	if s, err := client.Inspect(ctx, key); err == nil && s.Owner != "" {
		by = ", held by " + quote(s.Owner)
	}
	if ctx.Err() == nil {
		a.complain("waiting for " + quote(key) + by)
	}
}

// environment is env with what the command may know of its lock, and without
// what a hasp around this one said of another.
func environment(env []string, lease *hasp.Lease) []string {
	var out []string
	for _, v := range env {
		if name, _, _ := strings.Cut(v, "="); name != "HASP_KEY" && name != "HASP_FENCE" {
			out = append(out, v)
		}
	}
	out = append(out, "HASP_KEY="+lease.Key())
	if fence := lease.Fence(); fence != 0 {
		out = append(out, "HASP_FENCE="+strconv.FormatUint(fence, 10))
	}
	return out
}

// findProgram looks for a command before the lock is taken.
func findProgram(name string) (string, error) {
	path, err := exec.LookPath(name)
	if err != nil {
		return "", cannotRun(name, err)
	}
	return path, nil
}

// cannotRun gives err the exit code that a shell gives it.
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
	return codeError{code, fmt.Errorf("cannot run %s: %w", quote(name), err)}
}

// renewals remembers why the last renewals failed, to tell why a lock was
// lost.
type renewals struct {
	mu     sync.Mutex // guards failed
	failed error
}

func (r *renewals) observe(e hasp.Event) {
	if e.Kind == hasp.EventRenewFailed {
		r.mu.Lock()
		r.failed = e.Err
		r.mu.Unlock()
	}
}

// why is the reason of a loss. A lease that ends before its term was refused
// by the store; every other loss is the clock's.
func (r *renewals) why(lease *hasp.Lease) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case time.Now().Before(lease.Expires()):
		return "the store has it no more: somebody broke it, or the store lost its data"
	case r.failed != nil:
		return fmt.Sprintf("no renewal was answered before its term ended (%v)", r.failed)
	}
	return "hasp was stopped for longer than its term"
}
