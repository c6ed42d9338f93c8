//go:build !unix

package job

import (
	"context"
	"os"
	"os/exec"
	"sync"
)

// Ending has the signals that end hasp while it waits for the lock.
var Ending = []os.Signal{os.Interrupt}

// PassedOn has the signals that hasp ignores while the command runs. The console sends them to the
// command as well.
var PassedOn = Ending

// Job is a command.
type Job struct{ *exec.Cmd }

// Start starts a command with hasp's own standard streams.
func Start(path string, argv, env []string) (*Job, error) {
	j := &Job{&exec.Cmd{Path: path, Args: argv, Env: env, Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr}}
	return j, j.Cmd.Start()
}

// Attend returns when the command has ended. If the lease is lost, Attend kills the command at
// once, because this system has no SIGTERM.
func (j *Job) Attend(w Watch) Result {
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = j.Wait()
	}()

	var r Result
	var reported sync.WaitGroup
	gone := w.Lease.Context().Done()
	for {
		select {
		case <-done:
			r.Code = j.ProcessState.ExitCode()
			if r.Code < 0 { // the code is not known
				r.Code = exitFailed
			}
			reported.Wait()
			return r
		case <-w.Signals: // the console has also sent it to the command
		case <-gone:
			r.Lost = true
			gone = nil // do not receive from it again
			_ = j.Process.Kill()
			reported.Go(w.OnLoss)
		}
	}
}

// DieAlike does nothing on this system.
func (r Result) DieAlike() {}

// StopItself does nothing, because no signal stops a process here.
func StopItself(context.Context) {}
