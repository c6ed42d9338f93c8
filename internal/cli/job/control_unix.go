//go:build unix

package job

import (
	"context"
	"os"
	"os/signal"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hasplock/hasp/backend"
)

// stopped reacts to a stop of the command. It distinguishes four cases, in this order:
//
//   - The command needs the terminal, and hasp has it: hasp lends it to the command.
//   - The lease is lost: hasp continues the command, so that it acts on SIGTERM. If the command
//     was stopped because it needs the terminal, hasp does nothing.
//   - The signal is SIGSTOP, and the terminal is not lent to the command: hasp does nothing, and
//     the stopped command still holds the lock.
//   - Otherwise hasp takes the terminal back and stops with its own group, as if Ctrl-Z had
//     reached the whole job, so that the shell prompts. When the shell continues hasp, hasp
//     continues the command.
func (j *Job) stopped(sig syscall.Signal) {
	needsTerminal := sig == unix.SIGTTIN || sig == unix.SIGTTOU
	isSIGSTOP := !needsTerminal && sig != unix.SIGTSTP // these four signals stop a process
	switch {
	case needsTerminal && j.tty.ours():
	case j.lost && needsTerminal:
		return // another group has the terminal, so the command would stop again; SIGKILL ends it later
	case j.lost:
	case isSIGSTOP && !j.tty.lentTo(j.pid):
		return
	default:
		j.tty.takeBack()
		j.suspend()
		j.checkLost() // the command must have SIGTERM before it continues
	}
	j.tty.lend(j.pid) // has an effect only if hasp has the terminal
	j.signal(unix.SIGCONT)
}

// inShell reports whether a shell has made a group for hasp within its session. Otherwise, as under
// ssh, hasp must not stop, because no process would continue it.
func inShell() bool {
	sid, err := unix.Getsid(0)
	return err == nil && sid != unix.Getpgrp()
}

// suspend stops hasp's own group. It returns when hasp is continued. If no process would continue
// hasp, it returns at once, and then the command goes on.
//
// suspend sends SIGTSTP to the other processes of the group, which can handle that signal. It stops
// hasp itself by SIGSTOP. SIGTSTP would not stop hasp, because Go keeps its handler once a program
// has asked for the signal.
func (j *Job) suspend() {
	if !inShell() {
		return
	}

	// Pass on the signals that have arrived, but drop an old SIGCONT. It must not end the wait
	// below.
	for len(j.w.Signals) > 0 {
		if sig := <-j.w.Signals; sig != unix.SIGCONT {
			j.signal(sig.(syscall.Signal))
		}
	}
	j.settle()

	// Ignore SIGTSTP before the group receives it. Otherwise Go's handler could run after hasp is
	// continued, and hasp would stop the command again.
	signals := NotIgnored(PassedOn) // SIGTSTP is among them, unless hasp ignored it before
	signal.Ignore(unix.SIGTSTP)
	_ = syscall.Kill(0, unix.SIGTSTP)
	_ = syscall.Kill(syscall.Getpid(), unix.SIGSTOP)

	for sig := range j.w.Signals {
		if sig == unix.SIGCONT {
			break // hasp is continued
		}
		j.signal(sig.(syscall.Signal))
	}
	signal.Notify(j.w.Signals, signals...) // receive SIGTSTP again
}

// StopItself stops hasp at each SIGTSTP (Ctrl-Z), until ctx ends. This is needed because after the
// first signal.Notify for that signal, Go's handler of it stays, so the signal itself does not stop
// hasp any more.
func StopItself(ctx context.Context) {
	if !inShell() || signal.Ignored(unix.SIGTSTP) {
		return
	}
	typed := make(chan os.Signal, 1)
	signal.Notify(typed, unix.SIGTSTP)
	defer signal.Stop(typed)
	for {
		select {
		case <-typed:
			_ = syscall.Kill(syscall.Getpid(), unix.SIGSTOP)
		case <-ctx.Done():
			return
		}
	}
}

// settle renews the lease, so that no renewal is in flight or due when hasp stops. If hasp stopped
// in the middle of a renewal, it could block the store for others until it is continued. For
// example, it could hold filelock's file lock.
func (j *Job) settle() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = j.w.Lease.Extend(ctx, backend.MinTTL) // ignore a loss, which hasp notices later
}

// DieAlike sends SIGINT to hasp and the scripts that called it, if Ctrl-C ended the command. The
// terminal has sent SIGINT only to the command's group. So without DieAlike, a script would
// continue with its next command.
func (r Result) DieAlike() {
	if !r.typed {
		return
	}

	signal.Reset(unix.SIGINT)
	_ = syscall.Kill(0, unix.SIGINT)
	time.Sleep(time.Second) // the signal ends this sleep, unless hasp's group ignores the signal
}
