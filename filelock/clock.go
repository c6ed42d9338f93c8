package filelock

import "time"

// instant is one moment, read from two clocks of the host. All processes of a
// host read the same two, so no clock is ever compared with that of another
// machine.
type instant struct {
	// boot is the kernel's identifier of this boot. While it is the same, what
	// was written is there to be read, on the disk or not. Empty where there
	// is none.
	boot string

	clock string        // names the clock of up: the boot, and more where one boot has several
	up    time.Duration // since the boot, counting through a suspend
	wall  time.Time
}

// readClock is [instant] as the platform can tell it. Where the kernel has no
// identifier of a boot, or it cannot be read, the wall clock alone decides,
// and exclusion holds as far as nobody sets it forward by a term.
func readClock() instant {
	now := bootClock()
	now.wall = time.Now().Round(0)
	return now
}

// started is when this boot began, by the wall clock of now.
func (i instant) started() time.Time { return i.wall.Add(-i.up) }
