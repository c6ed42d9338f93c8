//go:build !unix

package crew

import (
	"errors"
	"os"
)

// Pause is not supported here.
func Pause(*os.Process) error { return errors.ErrUnsupported }

// Resume is not supported here.
func Resume(*os.Process) error { return errors.ErrUnsupported }
