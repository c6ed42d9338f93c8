package filelock

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// hostClock says how this process reads the boot clock of the host.
type hostClock struct {
	boot   string        // the kernel's random identifier of this boot; empty if there is none
	name   string        // name of the clock: see instant
	offset time.Duration // how far this process's boot clock is ahead of the host's
}

// hostBootClock returns the boot clock of the host. In a time namespace this process's clock has an
// offset, which the kernel reports. If the offset is not known, the name of the clock includes the
// namespace. Then records of other namespaces have another clock, and their terms are counted by
// the wall clock.
var hostBootClock = sync.OnceValue(func() hostClock {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return hostClock{}
	}

	boot := strings.TrimSpace(string(b))
	const initial = "time:[4026531834]" // PROC_TIME_INIT_INO
	ns, err := os.Readlink("/proc/self/ns/time")
	if err != nil || ns == initial {
		return hostClock{boot: boot, name: boot}
	}
	if offset, ok := bootOffset(ns); ok {
		return hostClock{boot: boot, name: boot, offset: offset}
	}
	return hostClock{boot: boot, name: boot + "/" + ns}
})

// bootOffset returns the offset of the boot clock in ns, the time namespace of this process.
func bootOffset(ns string) (offset time.Duration, ok bool) {
	// The file below has the offsets for future children, so check that their namespace is this
	// process's own.
	if children, err := os.Readlink("/proc/self/ns/time_for_children"); err != nil || children != ns {
		return 0, false
	}
	b, err := os.ReadFile("/proc/self/timens_offsets")
	if err != nil {
		return 0, false
	}
	for line := range strings.Lines(string(b)) {
		var clock string
		var sec, nsec int64
		if n, _ := fmt.Sscan(line, &clock, &sec, &nsec); n == 3 && clock == "boottime" {
			return time.Duration(sec)*time.Second + time.Duration(nsec), true
		}
	}
	return 0, false
}

func bootClock() instant {
	c := hostBootClock()
	var ts unix.Timespec
	if c.boot == "" || unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts) != nil {
		return instant{}
	}
	return instant{boot: c.boot, clock: c.name, up: time.Duration(ts.Nano()) - c.offset}
}
