//go:build unix

package crew

import (
	"fmt"
	"os"
	"syscall"
)

// Pause stops a child process. It returns when all threads of the process have stopped.
func Pause(p *os.Process) error {
	if err := p.Signal(syscall.SIGSTOP); err != nil {
		return err
	}

	for {
		var status syscall.WaitStatus
		_, err := syscall.Wait4(p.Pid, &status, syscall.WUNTRACED, nil)
		if err == nil && status.Stopped() {
			return nil
		}
		if err != syscall.EINTR {
			return fmt.Errorf("wait for the stop: %v, %v", err, status)
		}
	}
}

// Resume undoes Pause.
func Resume(p *os.Process) error { return p.Signal(syscall.SIGCONT) }
