//go:build !(linux || darwin || dragonfly || freebsd || netbsd || openbsd || solaris)

package resp

import "syscall"

// quietOf returns nil, because this system does not tell.
func quietOf(syscall.RawConn) func() bool { return nil }
