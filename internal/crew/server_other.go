//go:build !linux

package crew

import "syscall"

// DieWithParent does nothing, because this system has no such signal. If this program is killed,
// the process continues to run.
func DieWithParent(*syscall.SysProcAttr) {}
