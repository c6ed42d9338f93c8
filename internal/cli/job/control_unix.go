//go:build unix

package job

import (
	"context"
	"os/signal"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hasplock/hasp/backend"
)

// stopped reacts to a stop of the command.
//
// If the command was stopped because it needs the terminal, and hasp has the
// terminal, hasp lends it to the command. Otherwise hasp takes the terminal back
// and stops with its own group, as if Ctrl-Z had reached the whole job, so that
// the shell prompts. When the shell continues hasp, hasp continues the command. A
// stop that does not come from the terminal, such as kill -STOP, changes nothing:
// the command still holds the lock.
func (j *Job) stopped(sig syscall.Signal) {
	wants := sig == unix.SIGTTIN || sig == unix.SIGTTOU
	switch {
	case wants && j.tty.ours():
	case j.lost && wants:
		return // it may not have the terminal, and is killed when its time is up
	case j.lost:
	case !wants && sig != unix.SIGTSTP && !j.tty.lentTo(j.pid):
		return
	default:
		j.tty.takeBack()
		j.suspend()
		j.checkLost()
	}
	j.tty.lend(j.pid)
	j.signal(unix.SIGCONT)
}

// suspend stops hasp's own group and returns when it is continued. If no shell
// has made a group for hasp within its session, as under ssh, no process would
// continue it, and the kernel would not stop it on Ctrl-Z either. Then suspend
// returns at once.
//
// The other processes of the group get SIGTSTP and may prepare. hasp itself takes
// SIGSTOP, because Go keeps its handler of SIGTSTP once a program has asked for
// the signal. suspend ignores SIGTSTP first, so the kernel drops hasp's own.
// Otherwise the handler could run after the stop, and stop the command again.
func (j *Job) suspend() {
	if sid, err := unix.Getsid(0); err != nil || sid == unix.Getpgrp() {
		return
	}

	for len(j.w.Signals) > 0 { // an old SIGCONT is not the one that ends this stop
		if sig := <-j.w.Signals; sig != unix.SIGCONT {
			j.signal(sig.(syscall.Signal))
		}
	}
	j.settle()

	// Ignore SIGTSTP before the group gets it, so that hasp itself takes SIGSTOP.
	signals := NotIgnored(PassedOn)
	signal.Ignore(unix.SIGTSTP)
	_ = syscall.Kill(0, unix.SIGTSTP)
	_ = syscall.Kill(syscall.Getpid(), unix.SIGSTOP)

	for sig := range j.w.Signals {
		if sig == unix.SIGCONT {
			break
		}
		j.signal(sig.(syscall.Signal))
	}
	signal.Notify(j.w.Signals, signals...)
}

// settle renews the lease, so that no renewal is in flight and none is due for a
// third of the term. If hasp stopped in the middle of a renewal, it could block
// the store for others, such as filelock's files, until it is continued.
func (j *Job) settle() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = j.w.Lease.Extend(ctx, backend.MinTTL) // a loss is noticed later
}

// DieAlike ends hasp, and the scripts that called it, by SIGINT if Ctrl-C ended
// the command. The terminal sent SIGINT to the command's group alone, and a script
// continues with its next command unless it is interrupted itself.
func (r Result) DieAlike() {
	if !r.typed {
		return
	}

	signal.Reset(unix.SIGINT)
	_ = syscall.Kill(0, unix.SIGINT)
	time.Sleep(time.Second) // cut short by the signal, unless this group ignores it
}
