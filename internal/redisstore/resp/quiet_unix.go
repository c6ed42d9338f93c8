//go:build linux || darwin || dragonfly || freebsd || netbsd || openbsd || solaris

package resp

import "syscall"

// quietOf returns a function that reports whether a connection is open and has no bytes to read.
func quietOf(raw syscall.RawConn) func() bool {
	var b [1]byte
	var quiet bool
	peek := func(fd uintptr) bool {
		_, _, err := syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
		quiet = err == syscall.EAGAIN || err == syscall.EWOULDBLOCK
		return true // so that Read does not wait for bytes
	}
	return func() bool { return raw.Read(peek) == nil && quiet }
}
