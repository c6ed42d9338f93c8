//go:build !(linux || darwin || dragonfly || freebsd || netbsd || openbsd || solaris)

package resp

import "syscall"

// quietOf returns nil, because this system cannot report whether there are bytes to read.
func quietOf(syscall.RawConn) func() bool { return nil }
