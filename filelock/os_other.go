//go:build !linux && !darwin && !freebsd && !netbsd && !openbsd && !dragonfly && !windows

package filelock

import "errors"

// openFlags has nothing to add: [openFile] looks before it opens.
const openFlags = 0

// peekable is false where it is not known to be true.
const peekable = false

var (
	fullErrors   []error
	noLockErrors = []error{errors.ErrUnsupported}
)

// syncDir does nothing where a directory may not be one that can be flushed.
func syncDir(string) error { return nil }
