package filelock

import (
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// hostClock returns the kernel's random identifier of this boot, and the name of this process's
// boot clock. In a time namespace that clock has an offset, so the clock's name includes the
// namespace. The terms of records from other namespaces are counted by the wall clock.
var hostClock = sync.OnceValues(func() (boot, clock string) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", ""
	}

	boot = strings.TrimSpace(string(b))
	const initial = "time:[4026531834]" // PROC_TIME_INIT_INO
	if ns, err := os.Readlink("/proc/self/ns/time"); err == nil && ns != initial {
		return boot, boot + "/" + ns
	}
	return boot, boot
})

func bootClock() instant {
	boot, clock := hostClock()
	var ts unix.Timespec
	if boot == "" || unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts) != nil {
		return instant{}
	}
	return instant{boot: boot, clock: clock, up: time.Duration(ts.Nano())}
}
