//go:build !linux && !darwin && !freebsd && !netbsd && !openbsd && !dragonfly && !windows

package filelock

import "errors"

// openFlags is empty, so openFile checks the file before it opens it.
const openFlags = 0

// readsNeedNoGuard is false, because it is not known to be true here.
const readsNeedNoGuard = false

var (
	fullErrors   []error
	noLockErrors = []error{errors.ErrUnsupported}
)

// syncDir does nothing, because this platform may not be able to flush a directory.
func syncDir(string) error { return nil }
