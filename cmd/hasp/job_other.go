//go:build !unix

package main

import (
	"errors"
	"os"
	"os/exec"
	"time"

	"github.com/hasplock/hasp"
)

// endingSignals end hasp while it waits. While the command runs the console
// sends them to it as well, so that there is nothing to pass on: hasp waits
// for what the command makes of them.
var (
	endingSignals = []os.Signal{os.Interrupt}
	passedOn      = endingSignals
)

// job is a command.
type job struct {
	cmd  *exec.Cmd
	done chan struct{}
}

// watch is what a job is attended by.
type watch struct {
	lease   *hasp.Lease
	signals chan os.Signal
	grace   time.Duration // not used: there is no SIGTERM here
	onLoss  func()
}

// ending is how a job came to its end.
type ending struct {
	code int
	lost bool
}

func startJob(path string, argv, env []string) (*job, error) {
	cmd := &exec.Cmd{Path: path, Args: argv, Env: env, Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	j := &job{cmd: cmd, done: make(chan struct{})}
	go func() {
		defer close(j.done)
		var exit *exec.ExitError
		if err := cmd.Wait(); err != nil && !errors.As(err, &exit) {
			_ = cmd.Process.Kill()
		}
	}()
	return j, nil
}

// attend sees the command to its end. If the lock is lost, the command is
// killed at once.
func (j *job) attend(w watch) ending {
	e := ending{}
	gone := w.lease.Context().Done()
	for {
		select {
		case <-j.done:
			if e.code = j.cmd.ProcessState.ExitCode(); e.code < 0 {
				e.code = exitFailed
			}
			return e
		case <-w.signals:
		case <-gone:
			e.lost, gone = true, nil
			w.onLoss()
			_ = j.cmd.Process.Kill()
		}
	}
}

func (j *job) dieAlike(ending) {}
