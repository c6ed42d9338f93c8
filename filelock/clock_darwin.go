package filelock

import (
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// bootID is the kernel's UUID of this boot session.
var bootID = sync.OnceValue(func() string {
	id, err := unix.Sysctl("kern.bootsessionuuid")
	if err != nil {
		return ""
	}
	return id
})

// bootClock reads mach_continuous_time, which counts through sleep and, unlike CLOCK_MONOTONIC of
// macOS, cannot be set.
func bootClock() instant {
	boot := bootID()
	var ts unix.Timespec
	if boot == "" || unix.ClockGettime(unix.CLOCK_MONOTONIC_RAW, &ts) != nil {
		return instant{}
	}
	return instant{boot: boot, up: time.Duration(ts.Nano())}
}
