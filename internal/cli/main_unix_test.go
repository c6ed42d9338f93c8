//go:build unix

package cli

import (
	"os/exec"
	"syscall"
)

// apart makes cmd start in a new session, without a terminal. So signals that cmd sends to its
// group do not reach the tests. The tests do not depend on the terminal on which they were started.
func apart(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} }
