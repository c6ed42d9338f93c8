package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/cli/job"
	"github.com/hasplock/hasp/internal/cli/text"
)

// run has the settings and the state of a call of hasp run.
type run struct {
	*app
	key  string
	goal string   // what hasp waits for, in messages
	argv []string // the command
	path string   // the path of its program

	signals chan os.Signal // the signals to pass on to the command

	// The fields below are flags.
	wait    time.Duration // 0 if noWait is set
	noWait  bool
	skip    bool // a key that is held is no failure
	ttl     time.Duration
	fence   bool
	slots   int // 0 without --slots
	shared  bool
	minHold time.Duration
	maxHold time.Duration
	grace   time.Duration // between SIGTERM and SIGKILL after a loss
}

const runHelp = `run waits until it holds KEY, runs COMMAND, and frees KEY when COMMAND has ended.
If it waits for more than a second, it says so on stderr, and says when it holds
KEY. It gives up when the store has not answered for 3 s, or for the time in the
URL's parameter timeout. hasp renews the lock while COMMAND runs. If the lock is
lost nevertheless, hasp ends COMMAND: it sends SIGTERM, and SIGKILL after --grace.

COMMAND finds the key in HASP_KEY and, with --fence, the fence in HASP_FENCE. A
fence is a number that grows with every holder. Pass it to the resource that the
lock protects, so that the resource can refuse a holder that is late.

With --min-hold D, KEY stays taken for D after hasp got it, also if COMMAND ends
sooner or fails. hasp itself ends with COMMAND. So a short job that several hosts
start at the same time runs once: hasp run job --skip --min-hold 30s. hasp
inspect shows the last holder meanwhile. If hasp or its host dies before COMMAND
has ended, D does not count, and KEY is free after its term. So a nightly job can
run on another host if the first one dies, and still run once if it does not:
hasp run report --wait 1h --min-hold 12h -- ./report.sh

With --max-hold D, the lock is lost D after hasp got KEY, and hasp ends COMMAND as
after any other loss. So a COMMAND that hangs does not keep KEY for ever.

With --skip, a key that is held is no failure: hasp exits with 0 and prints
nothing, so that cron sends no mail and a CronJob has not failed. It makes one
attempt, or waits for the time of --wait. Other failures are reported as usual.

With --slots N, up to N commands run at once under KEY. COMMAND finds its slot in
HASP_SLOT, from 0 to N-1. Slot I is the key KEY#I for hasp inspect and hasp break.
All runs of KEY must give the same N. A run without --slots does not count.

With --shared, any number of commands run at once under KEY, as long as all are
shared. A run without --shared waits for them to end, and then runs alone. While
it waits, new shared ones wait behind it. filelock:// cannot share a key.

If COMMAND calls hasp run with the same KEY and store, the two wait for each
other: the inner one says so, and names the outer one. With --slots, it takes
another slot, unless such calls hold them all. Give it --wait or --no-wait.

COMMAND inherits the rest of the environment, also HASP_URL and a password in
it. hasp does not pass --url and --config on: repeat them for a hasp inside
COMMAND, or use HASP_URL. To keep the password from COMMAND, use a --config file
that COMMAND may not read.

COMMAND runs in a process group of its own. hasp passes INT, TERM, HUP, QUIT,
USR1, USR2, WINCH, TSTP and CONT on to that group. On a terminal the group is in
the foreground: editors, ssh and shells work, and Ctrl-C reaches COMMAND
directly. Ctrl-Z stops COMMAND and hasp. A stopped hasp does not renew the lock.
If it continues after the term, the lock is lost, and hasp ends COMMAND.

Processes that COMMAND leaves in the background do not hold KEY. If hasp itself
is killed with SIGKILL, KEY is free when its term is over. On Linux the kernel
then kills COMMAND, but not a set-uid COMMAND, nor the processes that COMMAND has
started.

`

func (a *app) runCommand() *cobra.Command {
	r := run{app: a}
	cmd := &cobra.Command{
		Use:   "run KEY [flags] -- COMMAND [ARG]...",
		Short: "Run a command while holding a key",
		Long: runHelp + exitCodes(
			`the store could not be reached or did not answer`,
			`not acquired: another program holds the key`,
			`lost: the lock was lost while COMMAND ran, so another program may
         have run at the same time; COMMAND's own code is not used`),
		Example: `  hasp run backup -- ./backup.sh
  hasp run backup --no-wait -- ./backup.sh || echo "exit code $?"
  hasp run deploy --wait 5m --fence --url spinlock+redis://redis:6379 -- sh -c 'deploy --fence $HASP_FENCE'`,
		Args: runArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			r.key = args[0]
			r.goal = text.Quote(r.key)
			r.argv = args[1:]
			return r.run(cmd)
		},
	}

	r.waitFlags(cmd)
	r.graceFlag(cmd)
	cmd.Flags().BoolVar(&r.skip, "skip", false,
		"if the key is held, exit with 0 and print nothing; make one attempt, unless --wait is given")
	return cmd
}

// waitFlags adds the flags that hasp run and hasp lock have.
func (r *run) waitFlags(cmd *cobra.Command) {
	r.commonFlags(cmd)
	f := cmd.Flags()
	f.VarP((*duration)(&r.wait), "wait", "w",
		"wait this long at most, such as 5m, or 10 for seconds; 0 is one attempt (default: no limit)")
	f.BoolVarP(&r.noWait, "no-wait", "n", false,
		"make one attempt, and exit with 75 if the key is held")
	f.BoolVar(&r.shared, "shared", false, "hold KEY together with others that are shared")
	f.IntVar(&r.slots, "slots", 0,
		"let this many commands run at once under KEY, and set HASP_SLOT")
	cmd.MarkFlagsMutuallyExclusive("wait", "no-wait")
	cmd.MarkFlagsMutuallyExclusive("shared", "slots")
	cmd.MarkFlagsMutuallyExclusive("shared", "min-hold")
}

// graceFlag adds the flag that hasp run and hasp lead have.
func (r *run) graceFlag(cmd *cobra.Command) {
	r.grace = 5 * time.Second
	cmd.Flags().Var((*duration)(&r.grace), "grace",
		"time between SIGTERM and SIGKILL if the lock is lost (default: 5s)")
}

// commonFlags adds the flags that hasp run, hasp lead and hasp lock have.
func (r *run) commonFlags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.Var((*duration)(&r.ttl), "ttl",
		"term of the lock: how long KEY stays locked if hasp dies (default: ttl in the URL, or 30s)")
	f.BoolVar(&r.fence, "fence", false, "set HASP_FENCE, and fail if the strategy has no fences")
	f.Var((*duration)(&r.minHold), "min-hold", "keep KEY taken for this long after it was acquired, "+
		"even if COMMAND ends sooner; if hasp dies, KEY is free after its term")
	f.Var((*duration)(&r.maxHold), "max-hold",
		"hold KEY for this long at most; the lock is lost then, and COMMAND is ended")
}

// options returns the options of Lock for the flags that are given.
func (r *run) options(cmd *cobra.Command) []hasp.Option {
	var opts []hasp.Option
	given := func(name string) bool {
		f := cmd.Flag(name) // nil if the command does not have the flag
		return f != nil && f.Changed
	}
	isBounded := r.noWait || r.skip || given("wait") // without --wait, r.wait is 0: one attempt

	for _, o := range []struct {
		applies bool
		option  hasp.Option
	}{
		{isBounded, hasp.WithMaxWait(r.wait)},
		{given("ttl"), hasp.WithTTL(r.ttl)},
		{r.fence, hasp.WithFence()},
		{given("min-hold"), hasp.WithMinHold(r.minHold)},
		{given("max-hold"), hasp.WithMaxHold(r.maxHold)},
		{r.shared, hasp.WithShared()},
		{given("slots"), hasp.WithSlots(r.slots)},
	} {
		if o.applies {
			opts = append(opts, o.option)
		}
	}
	return opts
}

// run runs the command while it holds the key, and sets the exit code. An error means that the
// command was not started.
func (r *run) run(cmd *cobra.Command) error {
	client, err := r.begin(cmd, r.observe)
	if err != nil {
		return err
	}
	defer r.close(client)

	ctx := cmd.Context()
	lease, err := r.acquire(ctx, client, r.options(cmd))
	if r.skip && exitCode(err) == exitNotAcquired {
		return nil // with --skip, a key that is held is no failure
	}
	if err != nil {
		return err
	}

	// From here on, signals are for the command. They must not end ctx, because the lease ends with
	// ctx. Call Notify before r.release, so that no signal is missed between the two calls.
	r.signals = make(chan os.Signal, 32)
	signal.Notify(r.signals, job.NotIgnored(job.PassedOn)...)
	defer signal.Stop(r.signals)
	if cause := r.release(); cause != nil { // a signal came together with the lock
		return errors.Join(cause, lease.Unlock(ctx))
	}

	// If hasp was stopped until after the term, do not start the command.
	if err := lease.Err(); err != nil {
		return fmt.Errorf("%s, before the command was run: %w", text.Quote(r.key), err)
	}

	result, err := r.attend(lease)
	unlockErr := lease.Unlock(ctx)
	if err != nil {
		return errors.Join(err, unlockErr)
	}
	r.finish(client, result, unlockErr)
	return nil
}

// begin finds the program of the command and opens the store. It finds the program first, so that
// hasp does not wait for the key if the program is missing.
func (r *run) begin(
	cmd *cobra.Command, observe func(context.Context, hasp.Event),
) (_ *hasp.Client, err error) {
	if r.wait < 0 || r.grace < 0 {
		return nil, usagef("--wait and --grace cannot be negative")
	}
	r.path, err = exec.LookPath(r.argv[0])
	if err != nil {
		return nil, cannotRun(r.argv[0], err)
	}

	// If no process reads stderr, a write raises SIGPIPE. Catch it, because otherwise hasp would
	// end and leave the command and the lock behind. The command itself has the default action.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	return r.open(cmd, cmd.CommandPath()+" "+filepath.Base(r.argv[0]), observe)
}

// attend starts the command, and returns its result when it has ended. The error says why the
// command could not be started.
func (r *run) attend(lease *hasp.Lease) (job.Result, error) {
	j, err := job.Start(r.path, r.argv, r.environment(os.Environ(), lease))
	if err != nil {
		return job.Result{}, cannotRun(r.argv[0], err)
	}
	return j.Attend(job.Watch{
		Lease:   lease,
		Signals: r.signals,
		Grace:   r.grace,
		OnLoss:  func() { r.sayLost(lease) },
	}), nil
}

// sayLost prints why the lease was lost, and what hasp does now.
func (r *run) sayLost(lease *hasp.Lease) {
	why := strings.TrimPrefix(fmt.Sprint(lease.Err()), hasp.ErrLost.Error()+": ") // "lost" stands below
	r.complain("lost %s: %s; the command gets SIGTERM now, and SIGKILL in %s",
		r.goal, why, text.Duration(r.grace))
}

// finish sets the exit code for the result of the command and the error of the lease's Unlock, and
// closes the Client. If Ctrl-C has ended the command, and the lock was not lost, finish ends the
// process.
func (r *run) finish(client *hasp.Client, result job.Result, unlockErr error) {
	r.code = result.Code
	switch {
	case result.Lost: // sayLost has already printed that
		r.code = exitLost
	case errors.Is(unlockErr, hasp.ErrLost):
		r.complain("lost %s before the command ended: "+
			"another program may have held it at the same time", r.goal)
		r.code = exitLost
	case unlockErr != nil:
		r.complain("warning: %s; the key is free when its term is over",
			strings.TrimPrefix(unlockErr.Error(), "hasp: "))
	}

	r.close(client) // DieAlike may end the process, so close the Client first
	if r.code != exitLost {
		result.DieAlike()
	}
}

// close calls Client.Close, which blocks until calls to the store have ended. It may be called
// twice. After a loss close does nothing, because no call matters any more, and the store may hang.
func (r *run) close(client *hasp.Client) {
	if r.code != exitLost {
		client.Close()
	}
}

// cannotRun returns the error of a program that err has prevented from starting. It has the exit
// code that a shell would use.
func cannotRun(name string, err error) error {
	for inner := err; inner != nil; inner = errors.Unwrap(inner) {
		err = inner // end with the innermost error, because the outer ones repeat the name
	}
	code := exitCannotRun
	hint := ""
	isAbsent := errors.Is(err, fs.ErrNotExist)
	if isAbsent || errors.Is(err, exec.ErrNotFound) {
		code = exitNotFound
		if strings.Contains(name, " ") {
			hint = " (no quotes around the whole command, or: sh -c '...')"
		} else if isAbsent {
			hint = " (or the interpreter in its first line was not found)"
		}
	}
	return codeError{code, fmt.Errorf("cannot run %s: %w%s", text.Quote(name), err, hint)}
}
