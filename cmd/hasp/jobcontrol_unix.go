//go:build unix

package main

import (
	"context"
	"os/signal"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hasplock/hasp"
)

// stopped answers a stop of the command.
//
// If it was stopped because it wanted the terminal, and the terminal is
// hasp's to give, the command gets it. Otherwise hasp does as the command
// did: it takes the terminal back and stops with its own group, as if Ctrl-Z
// had reached all of the job, so that the shell prompts; when the shell has
// continued it, it continues the command. A stop that is none of the
// terminal's, such as kill -STOP, changes nothing: the command still holds
// the lock.
func (j *job) stopped(sig syscall.Signal) {
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

// suspend stops hasp's own group and returns when it is continued. Where no
// shell has made a group for hasp within its session, as under ssh, nobody
// would continue it, and the kernel would not stop it on Ctrl-Z either: then
// suspend returns at once.
//
// Others of the group get SIGTSTP and may prepare. hasp itself takes SIGSTOP:
// Go keeps its handler of SIGTSTP once it was asked for, and the default
// action of the signal cannot be had back. Ignored, hasp's own SIGTSTP is
// dropped by the kernel; with no more than nobody to tell it to, the handler
// could come to run after the stop, and stop the command once more.
func (j *job) suspend() {
	if sid, err := unix.Getsid(0); err != nil || sid == unix.Getpgrp() {
		return
	}
	for len(j.signals) > 0 { // an old SIGCONT is not the one to wait for
		if sig := <-j.signals; sig != unix.SIGCONT {
			j.signal(sig.(syscall.Signal))
		}
	}
	j.settle()
	heard := notIgnored(passedOn)
	signal.Ignore(unix.SIGTSTP)
	_ = syscall.Kill(0, unix.SIGTSTP)
	_ = syscall.Kill(syscall.Getpid(), unix.SIGSTOP)
	for sig := range j.signals {
		if sig == unix.SIGCONT {
			break
		}
		j.signal(sig.(syscall.Signal))
	}
	signal.Notify(j.signals, heard...)
}

// settle has the lease confirmed, so that no renewal is under way and none is
// due for a third of the term: a hasp that stopped in the middle of one could
// keep others from the store, such as filelock's, for as long as it is stopped.
func (j *job) settle() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = j.lease.Extend(ctx, hasp.MinTTL) // a loss is noticed later
}

// dieAlike ends hasp, and the scripts it was called by, by the Ctrl-C that
// ended the command. The terminal sent it to the command's group alone, and a
// script goes on with its next command unless it is interrupted itself.
func (j *job) dieAlike(e ending) {
	if !e.typed {
		return
	}
	signal.Reset(unix.SIGINT)
	_ = syscall.Kill(0, unix.SIGINT)
	time.Sleep(time.Second) // cut short by the signal, unless this group ignores it
}
