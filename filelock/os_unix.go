//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

package filelock

import (
	"os"

	"golang.org/x/sys/unix"
)

// openFlags keep a file that somebody planted from doing harm: a symbolic
// link is not followed out of the directory, and a FIFO does not make open
// wait for its other end.
const openFlags = unix.O_NOFOLLOW | unix.O_NONBLOCK

// peekable says that a file may be replaced and removed while it is read.
const peekable = true

var (
	// fullErrors: no room on the disk, in the quota, under the process's limit.
	fullErrors = []error{unix.ENOSPC, unix.EDQUOT, unix.EFBIG}

	// noLockErrors: a file system without flock.
	noLockErrors = []error{unix.ENOLCK, unix.ENOTSUP, unix.ENOSYS}
)

// syncDir makes the names in dir durable.
func syncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}
