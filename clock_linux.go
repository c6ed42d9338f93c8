package hasp

import (
	"syscall"
	"time"
	"unsafe"
)

// Clock identifiers of clock_gettime(2).
const (
	clockMonotonic = 1
	clockBoottime  = 7
)

// suspended returns how long the machine has been suspended since its boot. That is
// the difference of two clocks, of which only one counts a suspend.
func suspended() time.Duration {
	// The boot clock is read first. So a pause between the two readings makes the
	// result too small, which the next reading corrects, and never too large.
	boot := gettime(clockBoottime)
	return boot - gettime(clockMonotonic)
}

// gettime reads a clock. It returns 0 if the kernel does not have the clock.
func gettime(id uintptr) time.Duration {
	var ts syscall.Timespec
	if _, _, errno := syscall.RawSyscall(syscall.SYS_CLOCK_GETTIME, id, uintptr(unsafe.Pointer(&ts)), 0); errno != 0 {
		return 0
	}
	return time.Duration(ts.Nano())
}
