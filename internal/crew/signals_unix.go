//go:build unix

package crew

import (
	"os"
	"syscall"
)

// Pause stops a process, as SIGSTOP does.
func Pause(p *os.Process) error { return p.Signal(syscall.SIGSTOP) }

// Resume ends Pause.
func Resume(p *os.Process) error { return p.Signal(syscall.SIGCONT) }
