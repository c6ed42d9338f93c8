//go:build !linux && !darwin && !freebsd && !netbsd && !openbsd && !dragonfly && !windows

package filelock

import "errors"

// openFlags is 0, so openFile checks the file before it opens the file.
const openFlags = 0

// readsNeedNoGuard is false, because a read may need the guard on this platform.
const readsNeedNoGuard = false

var noLockErrors = []error{errors.ErrUnsupported}
