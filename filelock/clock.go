package filelock

import "time"

// instant is one moment, read from two clocks that all processes of the host share.
type instant struct {
	// boot is the kernel's identifier of this boot, or empty if there is none. Until the next boot,
	// a file keeps all data that was written to it, even without a flush.
	boot string

	up   time.Duration // time since the boot, including suspends
	wall time.Time     // the time by the wall clock
}

// clock returns the present instant.
type clock func() instant

// readClock returns the present instant. If the boot clock cannot be read, the wall clock alone
// decides. In that case, setting the wall clock forward by a term can break exclusion.
func readClock() instant {
	now := bootClock()
	now.wall = time.Now().Round(0) // without the monotonic part
	return now
}

// bootTime returns the time of the wall clock at which this boot began.
func (i instant) bootTime() time.Time { return i.wall.Add(-i.up) }
