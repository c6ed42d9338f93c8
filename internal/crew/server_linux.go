package crew

import (
	"os/exec"
	"syscall"
)

// endWithParent makes the kernel kill the process when the thread that forks it ends.
func endWithParent(c *exec.Cmd) {
	if c.SysProcAttr == nil {
		c.SysProcAttr = &syscall.SysProcAttr{}
	}
	c.SysProcAttr.Pdeathsig = syscall.SIGKILL
}
