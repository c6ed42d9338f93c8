//go:build unix

package main

import (
	"os/exec"
	"syscall"
)

// apart starts cmd in a session of its own, without a terminal: what it does
// to its group does not reach the tests, and they do not depend on where they
// are started.
func apart(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} }
