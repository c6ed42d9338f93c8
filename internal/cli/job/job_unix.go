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

// Ending has the signals that end hasp while it waits for the lock.
var Ending = []os.Signal{unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT, unix.SIGUSR1, unix.SIGUSR2}

// PassedOn has the signals that Job.Attend passes on to the command. They are the signals in Ending
// and those of the terminal.
var PassedOn = append([]os.Signal{unix.SIGWINCH, unix.SIGCONT, unix.SIGTSTP}, Ending...)

// sweepEvery is how often the method sweep checks whether a process of the group still exists.
const sweepEvery = 20 * time.Millisecond

// Job is a command in a new process group. The id of the group is the command's process id.
type Job struct {
	pid     int
	tty     *terminal               // nil if hasp has no terminal
	changes chan syscall.WaitStatus // receives each stop of the command, and at last its end

	// Attend sets these.
	w        Watch
	lost     bool             // the lease is lost, and SIGTERM was sent to the group
	deadline <-chan time.Time // receives when SIGKILL is due; nil before the loss
	killed   bool             // SIGKILL was sent to the group
	reported sync.WaitGroup   // the running call of OnLoss
}

// Start starts a command with hasp's own standard streams.
func Start(path string, argv, env []string) (*Job, error) {
	j := &Job{tty: openTerminal(), changes: make(chan syscall.WaitStatus)}
	started := make(chan error, 1)
	go func() {
		// The kernel sends Pdeathsig when the thread that forked ends. So keep this thread until
		// the command has ended.
		runtime.LockOSThread()
		err := j.fork(path, argv, env)
		started <- err
		if err == nil {
			j.wait()
		}
	}()

	if err := <-started; err != nil {
		j.tty.takeBack() // fork may have given the terminal away before it failed
		return nil, err
	}
	return j, nil
}

// fork starts the command, in the foreground if hasp itself is interactive and in the foreground.
func (j *Job) fork(path string, argv, env []string) error {
	sys := &syscall.SysProcAttr{Setpgid: true}
	crew.DieWithParent(sys)
	if j.tty.ours() && interactive() {
		sys.Foreground = true
		sys.Ctty = j.tty.fd
		j.tty.lent = true
	}

	attr := &syscall.ProcAttr{Env: env, Files: []uintptr{0, 1, 2}, Sys: sys}
	pid, err := syscall.ForkExec(path, argv, attr)
	if errors.Is(err, syscall.ENOEXEC) { // a script without #!, which execvp(3) also gives to sh
		pid, err = syscall.ForkExec("/bin/sh", append([]string{"sh", path}, argv[1:]...), attr)
	}

	if j.tty != nil {
		// Ignore SIGTTOU, which would stop hasp when it takes the terminal back or prints from the
		// background. Do so only after the fork, because the command would inherit ignored signals.
		signal.Ignore(unix.SIGTTOU)
	}
	j.pid = pid
	return err
}

// wait sends a message to j.changes when the command stops, and when it ends.
func (j *Job) wait() {
	for {
		var ws syscall.WaitStatus
		_, err := syscall.Wait4(j.pid, &ws, syscall.WUNTRACED, nil)
		if err == syscall.EINTR {
			continue
		}
		if err != nil {
			ws = exitFailed << 8 // the command has ended with exitFailed, as the kernel does not say how
		}

		j.changes <- ws
		if !ws.Stopped() {
			return
		}
	}
}

// Attend passes signals on until the command has ended. If the lease is lost, Attend ends the whole
// group and calls OnLoss.
func (j *Job) Attend(w Watch) Result {
	j.w = w
	gone := w.Lease.Context().Done()
	for {
		var ws syscall.WaitStatus // of the command, if changed is true
		var sig os.Signal         // nil unless a signal came
		changed := false
		select {
		case ws = <-j.changes:
			changed = true
		case sig = <-j.w.Signals:
		case <-gone: // the method checkLost, below, ends the group
			gone = nil // do not receive from it again
		case <-j.deadline:
			j.kill()
		}

		// hasp itself may have been stopped until after the term. So check the lease before the
		// command may continue.
		j.checkLost()
		switch {
		case changed && ws.Stopped():
			j.stopped(ws.StopSignal())
		case changed:
			return j.ended(ws)
		case sig != nil:
			if sig == unix.SIGCONT { // perhaps a shell has stopped and continued hasp
				j.tty.recheck(j.pid)
			}
			j.signal(sig.(syscall.Signal))
		}
	}
}

// checkLost begins to end the group if the lease is lost. It sends SIGCONT after SIGTERM, because a
// stopped process acts on SIGTERM only when it is continued.
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

// signal sends sig to the whole group. If the group's last process has just ended, the signal
// reaches no other group, because the kernel reuses the id only when the process ids have wrapped
// around.
func (j *Job) signal(sig syscall.Signal) { _ = syscall.Kill(-j.pid, sig) }

// ended takes the terminal back and returns the result of the command, whose status is ws. If the
// lease was lost, it first waits until the group is empty or the grace time has passed, and until
// OnLoss has returned.
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

	// First handle a SIGCONT that came while the command ended. It may mean that the shell has
	// taken the terminal, and then hasp must not take it back.
	for len(j.w.Signals) > 0 {
		if sig := <-j.w.Signals; sig == unix.SIGCONT {
			j.tty.recheck(j.pid)
		}
	}
	if j.tty.takeBack() {
		// Continue other processes of hasp's own group, such as a pager. They may have been stopped
		// because they did not have the terminal.
		_ = syscall.Kill(0, unix.SIGCONT)
	}
	return r
}

// kill sends SIGKILL to the group.
func (j *Job) kill() {
	j.killed = true
	j.signal(unix.SIGKILL)
}

// sweep blocks until the group is empty. At the deadline it kills the group and returns. It does
// not wait for the killed processes, because a killed process stays in the group for ever if its
// parent never waits for it.
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

// left reports whether any process of the group still exists. It first collects the processes that
// have ended, which would otherwise still exist. Such processes are hasp's children if hasp has
// adopted them, as the first process of a container does.
func (j *Job) left() bool {
	for {
		pid, err := syscall.Wait4(-j.pid, nil, syscall.WNOHANG, nil)
		mayHaveMore := pid > 0 || err == syscall.EINTR
		if !mayHaveMore {
			return syscall.Kill(-j.pid, 0) == nil // the signal 0 only checks
		}
	}
}
