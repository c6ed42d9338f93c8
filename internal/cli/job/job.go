// Package job runs a command under a lock for "hasp run", in a process group of its own. It lends
// the command hasp's terminal, passes signals on, and ends the command when the lock is lost.
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

	// OnLoss is called once, on a goroutine of its own, when the lease is lost. It writes, and a
	// write may block, so the end of the command does not wait for OnLoss. Attend returns only
	// after OnLoss, which must give up after a second.
	OnLoss func()
}

// Result is how a command ended.
type Result struct {
	Code int  // the command's exit code, or 128 and the number of the signal
	Lost bool // the lease was lost before the command ended

	// typed reports that the user typed Ctrl-C: SIGINT ended the command while its group had the
	// terminal. hasp's own group did not receive that SIGINT.
	typed bool
}

// NotIgnored returns sigs without those that this process has ignored since its start. nohup and
// non-interactive shells rely on that.
func NotIgnored(sigs []os.Signal) []os.Signal {
	var keep []os.Signal
	for _, sig := range sigs {
		if !signal.Ignored(sig) {
			keep = append(keep, sig)
		}
	}
	return keep
}
