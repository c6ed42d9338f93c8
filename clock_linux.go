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

// suspended returns how long the machine has been suspended since it was
// booted: the difference of two clocks of which only one counts a suspend.
// The boot clock is read first, so that a pause between the two readings
// makes the answer too small and never too large; the next look mends it.
func suspended() time.Duration {
	boot := gettime(clockBoottime)
	return boot - gettime(clockMonotonic)
}

func gettime(id uintptr) time.Duration {
	var ts syscall.Timespec
	if _, _, errno := syscall.RawSyscall(syscall.SYS_CLOCK_GETTIME, id, uintptr(unsafe.Pointer(&ts)), 0); errno != 0 {
		return 0
	}
	return time.Duration(ts.Nano())
}
