//go:build !(linux || darwin || dragonfly || freebsd || netbsd || openbsd || solaris)

package resp

import "syscall"

// isQuiet reports true, because it cannot find out on this system.
func isQuiet(syscall.RawConn) bool { return true }
