package filelock

import "golang.org/x/sys/windows"

// openFlags is 0, because no flag forbids that a call of open follows a symbolic link. Therefore
// openFile checks the file before it opens the file.
const openFlags = 0

// readsNeedNoGuard is false, because Windows reports a sharing violation if a file is replaced
// while another process reads it.
const readsNeedNoGuard = false

var (
	// fullErrors say that the disk is full, or the quota is reached.
	fullErrors = []error{windows.ERROR_DISK_FULL, windows.ERROR_HANDLE_DISK_FULL, windows.ERROR_DISK_QUOTA_EXCEEDED}

	// noLockErrors say that the file system does not support locks.
	noLockErrors = []error{windows.ERROR_INVALID_FUNCTION, windows.ERROR_NOT_SUPPORTED}
)
