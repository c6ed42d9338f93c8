//go:build !linux

package crew

import "os/exec"

// endWithParent does nothing here: if this program is killed, the process continues to run.
func endWithParent(*exec.Cmd) {}
