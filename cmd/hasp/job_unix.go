//go:build unix

package main

import (
	"errors"
	"os"
	"os/signal"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hasplock/hasp"
)

// endingSignals end hasp while it waits, and passedOn go to the command while
// it runs. The ending ones are among the latter.
var (
	endingSignals = []os.Signal{unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT, unix.SIGUSR1, unix.SIGUSR2}
	passedOn      = append([]os.Signal{unix.SIGWINCH, unix.SIGCONT, unix.SIGTSTP}, endingSignals...)
)

// sweepEvery is how often a group that has lost its leader is looked at.
const sweepEvery = 20 * time.Millisecond

// job is a command in a process group of its own, whose id is the command's
// process id.
type job struct {
	pid     int
	tty     *terminal
	changes chan syscall.WaitStatus // stops, and the end as the last

	watch
	lost     bool
	deadline <-chan time.Time // when the group is killed; set when lost
}

// watch is what a job is attended by.
type watch struct {
	lease   *hasp.Lease
	signals chan os.Signal
	grace   time.Duration
	onLoss  func()
}

// ending is how a job came to its end.
type ending struct {
	code int
	lost bool

	// typed says that it died of SIGINT as the foreground group: of a Ctrl-C
	// that went past hasp and the scripts around it.
	typed bool
}

// startJob starts a command with hasp's own standard streams.
func startJob(path string, argv, env []string) (*job, error) {
	j := &job{tty: openTerminal(), changes: make(chan syscall.WaitStatus)}
	started := make(chan error, 1)
	go func() {
		// The kernel sends Pdeathsig when the thread that forked ends. This
		// goroutine keeps that thread to itself until the command has ended.
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

func (j *job) fork(path string, argv, env []string) error {
	sys := &syscall.SysProcAttr{Setpgid: true}
	dieWithParent(sys)
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
		// From the background, hasp still takes the terminal back and says
		// what it has to say. Ignored only now, since a child inherits it.
		signal.Ignore(unix.SIGTTOU)
	}
	j.pid = pid
	return err
}

// wait reports stops and the end.
func (j *job) wait() {
	for {
		var ws syscall.WaitStatus
		switch _, err := syscall.Wait4(j.pid, &ws, syscall.WUNTRACED, nil); err {
		case nil:
		case syscall.EINTR:
			continue
		default:
			ws = exitFailed << 8 // it has ended, and nobody knows how
		}
		j.changes <- ws
		if !ws.Stopped() {
			return
		}
	}
}

// attend sees the command to its end. If the lock is lost, it calls onLoss and
// ends the whole group.
func (j *job) attend(w watch) ending {
	j.watch = w
	gone := w.lease.Context().Done()
	for {
		var ws syscall.WaitStatus
		var sig os.Signal
		changed := false
		select {
		case ws = <-j.changes:
			changed = true
		case sig = <-j.signals:
		case <-gone:
			gone = nil
		case <-j.deadline:
			j.signal(unix.SIGKILL)
		}
		// Before anything that lets the command go on: hasp may have been
		// stopped past the term just now.
		j.checkLost()
		switch {
		case changed && ws.Stopped():
			j.stopped(ws.StopSignal())
		case changed:
			return j.ended(ws)
		case sig != nil:
			j.passOn(sig.(syscall.Signal))
		}
	}
}

// checkLost begins to end the group if the lock is lost. A stopped process
// acts on SIGTERM when it is continued, and then before anything else.
func (j *job) checkLost() {
	if j.lost || j.lease.Err() == nil {
		return
	}
	j.lost = true
	j.onLoss()
	j.deadline = time.After(j.grace)
	j.signal(unix.SIGTERM)
	j.signal(unix.SIGCONT)
}

// passOn gives the group a signal that was meant for it.
func (j *job) passOn(sig syscall.Signal) {
	if sig == unix.SIGCONT {
		j.tty.recheck(j.pid)
	}
	j.signal(sig)
}

// continued looks whether hasp was continued at the moment when the command
// ended, and has not heard of it yet.
func (j *job) continued() {
	for {
		select {
		case sig := <-j.signals:
			if sig == unix.SIGCONT {
				j.tty.recheck(j.pid)
			}
		default:
			return
		}
	}
}

// signal sends sig to the whole group. The group's id is not given to another
// while anybody is left in it; between the end of the last and the moment
// hasp hears of it, only a wrap-around of all process ids could do that.
func (j *job) signal(sig syscall.Signal) {
	_ = syscall.Kill(-j.pid, sig)
}

// ended takes the terminal back. If the lock was lost, it first sees to it
// that nobody is left in the group: they had their SIGTERM, and have the rest
// of the grace time.
func (j *job) ended(ws syscall.WaitStatus) ending {
	if j.lost {
		j.sweep()
	}
	e := ending{code: ws.ExitStatus(), lost: j.lost}
	if ws.Signaled() {
		e.code = exitSignal + int(ws.Signal())
		e.typed = j.tty.lentTo(j.pid) && ws.Signal() == unix.SIGINT
	}
	j.continued()
	if j.tty.takeBack() {
		// Others of hasp's own group, such as a pager at the end of a pipe,
		// may have been stopped for want of the terminal.
		_ = syscall.Kill(0, unix.SIGCONT)
	}
	return e
}

// sweep waits until the group is empty, and kills it when its time is up.
func (j *job) sweep() {
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	for syscall.Kill(-j.pid, 0) == nil {
		select {
		case <-tick.C:
		case <-j.deadline:
			j.signal(unix.SIGKILL)
			return
		}
	}
}
