package filelock

import "golang.org/x/sys/windows"

// openFlags is 0, because no flag forbids that a call of open follows a symbolic link. Therefore
// openFile checks the file before it opens the file.
const openFlags = 0

// readsNeedNoGuard is false, because Windows reports a sharing violation if a file is replaced
// while another process reads it.
const readsNeedNoGuard = false

// noLockErrors say that the file system does not support locks.
var noLockErrors = []error{windows.ERROR_INVALID_FUNCTION, windows.ERROR_NOT_SUPPORTED}
