//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

package filelock

import "golang.org/x/sys/unix"

// openFlags protect against files that are not regular. With these flags, a call of open follows no
// symbolic link, and does not block on a FIFO.
const openFlags = unix.O_NOFOLLOW | unix.O_NONBLOCK

// readsNeedNoGuard is true, because a file may be replaced or removed while another process reads
// it.
const readsNeedNoGuard = true

// noLockErrors say that the file system does not support flock.
var noLockErrors = []error{unix.ENOLCK, unix.ENOTSUP, unix.ENOSYS}
