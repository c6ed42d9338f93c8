//go:build unix && !linux

package job

import "syscall"

// dieWithParent does nothing: there is no such signal here. A command whose
// hasp was killed runs on while the key's term runs out.
func dieWithParent(*syscall.SysProcAttr) {}
