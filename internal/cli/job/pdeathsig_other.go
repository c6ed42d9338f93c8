//go:build unix && !linux

package job

import "syscall"

// dieWithParent does nothing: this system has no such signal. If hasp is killed,
// the command continues, and the key is free when its term is over.
func dieWithParent(*syscall.SysProcAttr) {}
