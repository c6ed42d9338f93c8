package filelock

import (
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// bootID returns the kernel's random identifier of this boot, and the name of the
// boot clock. In a time namespace that clock has an offset, so its readings must not
// be compared with others. Then the namespace is part of the clock's name, and the
// wall clock decides between clocks of different names.
var bootID = sync.OnceValues(func() (boot, clock string) {
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
	boot, clock := bootID()
	var ts unix.Timespec
	if boot == "" || unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts) != nil {
		return instant{}
	}
	return instant{boot: boot, clock: clock, up: time.Duration(ts.Nano())}
}
