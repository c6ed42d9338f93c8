package filelock

import "golang.org/x/sys/windows"

// openFlags has nothing to add: open cannot be told not to follow a link, so
// that [openFile] looks first.
const openFlags = 0

// peekable is false: replacing a file that somebody reads at this moment is a
// sharing violation, so that every look is made under the guard.
const peekable = false

var (
	// fullErrors: no room on the disk or in the quota.
	fullErrors = []error{windows.ERROR_DISK_FULL, windows.ERROR_HANDLE_DISK_FULL, windows.ERROR_DISK_QUOTA_EXCEEDED}

	// noLockErrors: a file system that cannot lock.
	noLockErrors = []error{windows.ERROR_INVALID_FUNCTION, windows.ERROR_NOT_SUPPORTED}
)

// syncDir does nothing: a directory cannot be flushed here, and its changes
// are in the file system's journal in order.
func syncDir(string) error { return nil }
