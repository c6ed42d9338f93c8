// Package job runs a command under a lock for "hasp run": in a process group of
// its own, with hasp's terminal, signals passed on, and an end when the lock is
// lost.
package job

import (
	"os"
	"os/signal"
	"time"

	"github.com/hasplock/hasp"
)

const (
	exitFailed = 1   // of a command whose exit code is not known
	exitSignal = 128 // + the number of the signal that ended the command
)

// Watch is what Job.Attend needs.
type Watch struct {
	Lease   *hasp.Lease    // the lock that the command runs under
	Signals chan os.Signal // receives PassedOn
	Grace   time.Duration  // between SIGTERM and SIGKILL when the lease is lost

	// OnLoss is called once, when the lease is lost. It writes, and a write may block: a
	// pager may not read on, and Ctrl-S stops a terminal. The end of the command must not
	// wait for that, so OnLoss has a goroutine of its own. Attend returns when OnLoss has,
	// which must give up after a second.
	OnLoss func()
}

// Result is how a command ended.
type Result struct {
	Code int  // the command's exit code, or 128 and the number of the signal
	Lost bool // the lease was lost before the command ended

	// typed reports that SIGINT ended the command while its group had the
	// terminal: the user typed Ctrl-C, and hasp's own group did not receive it.
	typed bool
}

// NotIgnored returns sigs without the signals that this process was started to
// ignore. nohup and non-interactive shells rely on that.
func NotIgnored(sigs []os.Signal) []os.Signal {
	var keep []os.Signal
	for _, sig := range sigs {
		if !signal.Ignored(sig) {
			keep = append(keep, sig)
		}
	}
	return keep
}
