package hostclock

import (
	"syscall"
	"time"
	"unsafe"
)

// These are clocks of clock_gettime(2).
const (
	clockMonotonic = 1
	clockBoottime  = 7
)

// Now returns a time in nanoseconds. All processes of the host share its clock, and no process can
// set it.
func Now() int64 {
	now, _ := read(clockMonotonic) // no error, because every Linux has this clock
	return now
}

// suspended returns the difference of two clocks, of which only one counts a suspend. It returns 0
// if the kernel lacks one of the clocks.
func suspended() time.Duration {
	// Read the boot clock first. If this process stands still between the two readings, the result
	// is then too small and not too large. The next call corrects a result that is too small.
	boot, ok1 := read(clockBoottime)
	monotonic, ok2 := read(clockMonotonic)
	if !ok1 || !ok2 {
		return 0
	}
	return time.Duration(boot - monotonic)
}

// read returns the time of a clock in nanoseconds. It reports whether the kernel has the clock.
func read(id uintptr) (now int64, ok bool) {
	var ts syscall.Timespec
	_, _, errno := syscall.RawSyscall(syscall.SYS_CLOCK_GETTIME, id, uintptr(unsafe.Pointer(&ts)), 0)
	return ts.Nano(), errno == 0
}
