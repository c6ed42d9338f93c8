//go:build unix

package conformance

import (
	"os"
	"syscall"
)

// pause stops a process as a debugger or a suspend would.
func pause(p *os.Process) error { return p.Signal(syscall.SIGSTOP) }

// resume lets it go on.
func resume(p *os.Process) error { return p.Signal(syscall.SIGCONT) }
