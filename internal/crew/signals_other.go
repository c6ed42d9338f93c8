//go:build !unix

package crew

import (
	"errors"
	"fmt"
	"os"
)

// Pause is not supported here.
func Pause(*os.Process) error {
	return fmt.Errorf("no signal stops a process on this platform: %w", errors.ErrUnsupported)
}

// Resume is not supported here.
func Resume(*os.Process) error { return errors.ErrUnsupported }
