//go:build unix && !linux

package redistest

import (
	"os"
	"os/exec"
	"syscall"
)

// endWithParent does nothing here: a test binary that is killed leaves its
// servers running.
func endWithParent(*exec.Cmd) {}

func stop(p *os.Process) error { return p.Signal(syscall.SIGSTOP) }
func cont(p *os.Process) error { return p.Signal(syscall.SIGCONT) }
