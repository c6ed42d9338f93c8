//go:build unix

package cli

import (
	"os/exec"
	"syscall"
)

func init() {
	apart = func(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} }
}
