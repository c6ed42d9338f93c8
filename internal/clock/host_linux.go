package clock

import (
	"fmt"
	"os"
	"strings"
	"sync"
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
	now, _ := read(clockMonotonic) // every Linux has this clock
	return now
}

// SinceBoot returns the kernel's random identifier of this boot, and the time since the boot
// including all suspends. The identifier is empty if the kernel does not tell it.
func SinceBoot() (boot string, up time.Duration) {
	id, ahead := bootID()
	now, ok := read(clockBoottime)
	if !ok {
		return "", 0
	}
	return id, time.Duration(now) - ahead
}

// read returns the time of a clock in nanoseconds, and whether the kernel has that clock.
func read(clock uintptr) (ns int64, ok bool) {
	var at syscall.Timespec
	_, _, errno := syscall.RawSyscall(syscall.SYS_CLOCK_GETTIME, clock, uintptr(unsafe.Pointer(&at)), 0)
	return at.Nano(), errno == 0
}

// bootID returns the kernel's identifier of this boot, or "" if the kernel does not tell it. It
// also returns how far the boot clock of this process's time namespace is ahead of the host's.
var bootID = sync.OnceValues(func() (id string, ahead time.Duration) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", 0
	}

	// A kernel that lacks this file has no time namespaces, so ahead is 0. The file has a line
	// "boottime SECONDS NANOSECONDS".
	offsets, _ := os.ReadFile("/proc/self/timens_offsets")
	var s, ns int64
	if _, after, found := strings.Cut(string(offsets), "boottime"); found {
		_, _ = fmt.Sscan(after, &s, &ns)
	}
	return strings.TrimSpace(string(b)), time.Duration(s)*time.Second + time.Duration(ns)
})

// suspended returns how long the host has slept since its boot: the difference of the boot clock,
// which runs during a suspend, and the monotonic clock, which does not. It returns 0 if the kernel
// lacks one of the clocks.
func suspended() time.Duration {
	// Read the boot clock first. If this process stands still between the two readings, the result
	// is then too small and not too large. The next call corrects a result that is too small.
	boot, hasBoot := read(clockBoottime)
	monotonic, hasMonotonic := read(clockMonotonic)
	if !hasBoot || !hasMonotonic {
		return 0
	}
	return time.Duration(boot - monotonic)
}
