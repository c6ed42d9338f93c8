//go:build linux || darwin || dragonfly || freebsd || netbsd || openbsd || solaris

package resp

import "syscall"

// isQuiet reports whether a connection is open and has no bytes to read.
func isQuiet(raw syscall.RawConn) (quiet bool) {
	err := raw.Read(func(fd uintptr) bool {
		var b [1]byte
		_, _, err := syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
		quiet = err == syscall.EAGAIN || err == syscall.EWOULDBLOCK
		return true // without waiting
	})
	return quiet && err == nil
}
