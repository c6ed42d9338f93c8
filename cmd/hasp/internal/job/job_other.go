//go:build !unix

package job

import (
	"errors"
	"os"
	"os/exec"
)

// Ending are the signals that end hasp while it waits for the lock.
var Ending = []os.Signal{os.Interrupt}

// PassedOn is the same. The console sends these signals to the command as well,
// so there is nothing to pass on: hasp waits until the command ends.
var PassedOn = Ending

// Job is a command.
type Job struct {
	cmd  *exec.Cmd
	done chan struct{}
}

// Start starts a command with hasp's own standard streams.
func Start(path string, argv, env []string) (*Job, error) {
	cmd := &exec.Cmd{Path: path, Args: argv, Env: env, Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	j := &Job{cmd: cmd, done: make(chan struct{})}
	go func() {
		defer close(j.done)
		var exit *exec.ExitError
		if err := cmd.Wait(); err != nil && !errors.As(err, &exit) {
			_ = cmd.Process.Kill()
		}
	}()
	return j, nil
}

// Attend returns when the command has ended. If the lease is lost, it kills the
// command at once: there is no SIGTERM here.
func (j *Job) Attend(w Watch) Result {
	var r Result
	gone := w.Lease.Context().Done()
	for {
		select {
		case <-j.done:
			if r.Code = j.cmd.ProcessState.ExitCode(); r.Code < 0 {
				r.Code = exitFailed
			}
			return r
		case <-w.Signals:
		case <-gone:
			r.Lost, gone = true, nil
			w.OnLoss()
			_ = j.cmd.Process.Kill()
		}
	}
}

// DieAlike does nothing here.
func (j *Job) DieAlike(Result) {}
