//go:build unix

package cli

import (
	"os/exec"
	"syscall"
)

// apart starts cmd in a session of its own, without a terminal. So signals that
// cmd sends to its group do not reach the tests, and the tests do not depend on
// the terminal they were started on.
func apart(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} }
