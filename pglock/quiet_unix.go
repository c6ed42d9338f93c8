//go:build unix

package pglock

import (
	"net"
	"syscall"
)

// nothingToRead reports whether c is open and has nothing to read.
func nothingToRead(c net.Conn) bool {
	sc, ok := c.(syscall.Conn)
	if !ok {
		return true
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return false
	}
	var readErr error
	// Not raw.Read: pgx may have left a goroutine that reads in the background, and raw.Read
	// would wait for it.
	err = raw.Control(func(fd uintptr) {
		var b [1]byte
		_, _, readErr = syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
	})
	return err == nil && (readErr == syscall.EAGAIN || readErr == syscall.EWOULDBLOCK)
}
