package main

import (
	"os/exec"
	"syscall"
)

// endWithParent has the kernel end a server when this program dies.
func endWithParent(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}
