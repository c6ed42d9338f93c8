// Package job runs a command under a lock for "hasp run", in a process group of its own. It lends
// hasp's terminal to the command, passes signals on to it, and ends it when the lock is lost.
package job

import (
	"os"
	"os/signal"
	"time"

	"github.com/hasplock/hasp"
)

const (
	exitFailed = 1   // the exit code if the command's own code is not known
	exitSignal = 128 // plus the number of the signal that ended the command
)

// Watch has the arguments of Job.Attend.
type Watch struct {
	Lease   *hasp.Lease    // the lock that the command runs under
	Signals chan os.Signal // receives the signals in PassedOn
	Grace   time.Duration  // the time between SIGTERM and SIGKILL if the lease is lost

	// If the lease is lost, OnLoss is called once, on its own goroutine. OnLoss may block in a
	// write, so Attend ends the command without waiting for OnLoss. Attend waits for OnLoss before
	// it returns, so OnLoss must give up after a second.
	OnLoss func()
}

// Result says how a command ended.
type Result struct {
	Code int  // the command's exit code, or 128 + the number of the signal that ended it
	Lost bool // the lease was lost before the command ended

	// typed says that the user typed Ctrl-C. This is assumed if SIGINT ended the command while its
	// group had the terminal. hasp's own group did not receive that SIGINT.
	typed bool
}

// NotIgnored returns sigs without the signals that this process has ignored since its start. hasp
// must go on ignoring these signals, because nohup and non-interactive shells rely on that.
func NotIgnored(sigs []os.Signal) []os.Signal {
	var keep []os.Signal
	for _, sig := range sigs {
		if !signal.Ignored(sig) {
			keep = append(keep, sig)
		}
	}
	return keep
}
