//go:build unix

package job

import (
	"errors"
	"os"
	"os/signal"
	"runtime"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hasplock/hasp/internal/crew"
)

// Ending are the signals that end hasp while it waits for the lock.
var Ending = []os.Signal{unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT, unix.SIGUSR1, unix.SIGUSR2}

// PassedOn are the signals that Job.Attend passes on to the command: the signals in
// Ending, and the signals of the terminal.
var PassedOn = append([]os.Signal{unix.SIGWINCH, unix.SIGCONT, unix.SIGTSTP}, Ending...)

// After the command has ended, Attend checks once in sweepEvery whether a process of its group is
// left.
const sweepEvery = 20 * time.Millisecond

// Job is a command in a process group of its own, whose id is the command's
// process id.
type Job struct {
	pid     int
	tty     *terminal               // nil if hasp has no terminal
	changes chan syscall.WaitStatus // stops, and the end as the last

	// Attend sets these.
	w        Watch
	lost     bool             // the lease is lost, and the group has got SIGTERM
	deadline <-chan time.Time // when the group gets SIGKILL; nil before the loss
	killed   bool             // the group has got SIGKILL
	reported sync.WaitGroup   // OnLoss
}

// Start starts a command with hasp's own standard streams.
func Start(path string, argv, env []string) (*Job, error) {
	j := &Job{tty: openTerminal(), changes: make(chan syscall.WaitStatus)}
	started := make(chan error, 1)
	go func() {
		// Keep this thread until the command has ended, because the kernel sends Pdeathsig when the
		// thread that forked ends.
		runtime.LockOSThread()
		err := j.fork(path, argv, env)
		started <- err
		if err == nil {
			j.wait()
		}
	}()

	if err := <-started; err != nil {
		j.tty.takeBack() // fork may have given it away before it failed
		return nil, err
	}
	return j, nil
}

// fork starts the command, in the foreground if hasp's group is there.
func (j *Job) fork(path string, argv, env []string) error {
	sys := &syscall.SysProcAttr{Setpgid: true}
	crew.DieWithParent(sys)
	if j.tty.ours() && interactive() {
		sys.Foreground, sys.Ctty = true, j.tty.fd
		j.tty.lent = true
	}

	attr := &syscall.ProcAttr{Env: env, Files: []uintptr{0, 1, 2}, Sys: sys}
	pid, err := syscall.ForkExec(path, argv, attr)
	if errors.Is(err, syscall.ENOEXEC) { // a script without #!, which execvp(3) gives to the shell
		pid, err = syscall.ForkExec("/bin/sh", append([]string{"sh", path}, argv[1:]...), attr)
	}

	if j.tty != nil {
		// Ignore SIGTTOU, which would stop hasp when it takes the terminal back or prints from the
		// background. Ignore it only after the fork, because the command would inherit that.
		signal.Ignore(unix.SIGTTOU)
	}
	j.pid = pid
	return err
}

// wait reports stops and the end.
func (j *Job) wait() {
	for {
		var ws syscall.WaitStatus
		switch _, err := syscall.Wait4(j.pid, &ws, syscall.WUNTRACED, nil); err {
		case nil:
		case syscall.EINTR:
			continue
		default:
			ws = exitFailed << 8 // it has ended; the kernel does not say how
		}

		j.changes <- ws
		if !ws.Stopped() {
			return
		}
	}
}

// Attend returns when the command has ended. If the lease is lost, it ends the whole
// group and calls OnLoss.
func (j *Job) Attend(w Watch) Result {
	j.w = w
	gone := w.Lease.Context().Done()
	for {
		var ws syscall.WaitStatus
		var sig os.Signal
		changed := false
		select {
		case ws = <-j.changes:
			changed = true
		case sig = <-j.w.Signals:
		case <-gone:
			gone = nil
		case <-j.deadline:
			j.kill()
		}

		// Check before the command may continue: hasp itself may have been stopped until after the
		// term.
		j.checkLost()
		switch {
		case changed && ws.Stopped():
			j.stopped(ws.StopSignal())
		case changed:
			return j.ended(ws)
		case sig != nil:
			if sig == unix.SIGCONT {
				j.tty.recheck(j.pid)
			}
			j.signal(sig.(syscall.Signal))
		}
	}
}

// checkLost begins to end the group if the lease is lost. A stopped process acts on SIGTERM only
// when it is continued, so SIGCONT follows.
func (j *Job) checkLost() {
	if j.lost || j.w.Lease.Err() == nil {
		return
	}

	j.lost = true
	j.deadline = time.After(j.w.Grace)
	j.signal(unix.SIGTERM)
	j.signal(unix.SIGCONT)
	j.reported.Go(j.w.OnLoss)
}

// signal sends sig to the whole group. After its last process has ended, and before hasp knows, the
// kernel could give the group's id to another group only if all process ids had wrapped around.
func (j *Job) signal(sig syscall.Signal) {
	_ = syscall.Kill(-j.pid, sig)
}

// ended takes the terminal back. If the lease was lost, it first waits until the
// group is empty: its processes got SIGTERM, and have the rest of the grace time.
func (j *Job) ended(ws syscall.WaitStatus) Result {
	if j.lost {
		j.sweep()
		j.reported.Wait()
	}

	r := Result{Code: ws.ExitStatus(), Lost: j.lost}
	if ws.Signaled() {
		r.Code = exitSignal + int(ws.Signal())
		r.typed = j.tty.lentTo(j.pid) && ws.Signal() == unix.SIGINT
	}

	// First handle a SIGCONT that came while the command ended: if the shell has taken the terminal
	// meanwhile, hasp must not take it back.
	for len(j.w.Signals) > 0 {
		if sig := <-j.w.Signals; sig == unix.SIGCONT {
			j.tty.recheck(j.pid)
		}
	}
	if j.tty.takeBack() {
		// Continue other processes of hasp's own group, such as a pager, which may have been
		// stopped because they did not have the terminal.
		_ = syscall.Kill(0, unix.SIGCONT)
	}
	return r
}

// kill kills the group.
func (j *Job) kill() {
	j.killed = true
	j.signal(unix.SIGKILL)
}

// sweep blocks until the group is empty. At the deadline it kills the group and returns, because a
// killed process may stay in the group for ever if the process that adopted it does not wait for
// it.
func (j *Job) sweep() {
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	for !j.killed && j.left() {
		select {
		case <-tick.C:
		case <-j.deadline:
			j.kill()
		}
	}
}

// left reports whether any process of the group is left. It waits for those that have ended: if
// hasp is the first process of a container, it has adopted them.
func (j *Job) left() bool {
	for {
		pid, err := syscall.Wait4(-j.pid, nil, syscall.WNOHANG, nil)
		if pid <= 0 && err != syscall.EINTR {
			return syscall.Kill(-j.pid, 0) == nil
		}
	}
}
