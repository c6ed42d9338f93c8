package pgtest

import (
	"os/exec"
	"syscall"
)

// endWithParent makes the kernel kill the server when this process ends, even by SIGKILL.
func endWithParent(c *exec.Cmd) { c.SysProcAttr.Pdeathsig = syscall.SIGKILL }
