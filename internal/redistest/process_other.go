//go:build !unix

package redistest

import (
	"errors"
	"os"
	"os/exec"
)

func endWithParent(*exec.Cmd) {}

func stop(*os.Process) error { return errors.ErrUnsupported }
func cont(*os.Process) error { return errors.ErrUnsupported }
