//go:build !unix

package conformance

import (
	"errors"
	"fmt"
	"os"
)

// pause says that a process cannot be stopped here.
func pause(*os.Process) error {
	return fmt.Errorf("no signal stops a process on this platform: %w", errors.ErrUnsupported)
}

// resume is what pause makes needless.
func resume(*os.Process) error { return nil }
