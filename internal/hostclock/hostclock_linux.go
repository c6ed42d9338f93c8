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
	var now syscall.Timespec
	syscall.RawSyscall(syscall.SYS_CLOCK_GETTIME, clockMonotonic, uintptr(unsafe.Pointer(&now)), 0) // no error, because every Linux has this clock
	return now.Nano()
}

// Yield lets other threads of the host use this processor, if they wait for it.
func Yield() { _, _, _ = syscall.Syscall(syscall.SYS_SCHED_YIELD, 0, 0, 0) }

// suspended returns the difference of two clocks, only one of which runs during a suspend. It
// returns 0 if the kernel lacks one of the clocks.
func suspended() time.Duration {
	// Read the boot clock first. If this process stands still between the two readings, the result
	// is then too small and not too large. The next call corrects a result that is too small.
	var at [2]syscall.Timespec
	for i, id := range [...]uintptr{clockBoottime, clockMonotonic} {
		if _, _, errno := syscall.RawSyscall(syscall.SYS_CLOCK_GETTIME, id, uintptr(unsafe.Pointer(&at[i])), 0); errno != 0 {
			return 0
		}
	}
	return time.Duration(at[0].Nano() - at[1].Nano())
}
