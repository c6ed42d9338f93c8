package etcdlock

import (
	"sync/atomic"
	"time"

	hostclock "github.com/hasplock/hasp/internal/clock"
)

// clock measures the ages of leases, which grow even while the machine is suspended. So it adds the
// time of suspends, which Go's monotonic clock leaves out.
type clock struct {
	base      time.Time
	suspended func() time.Duration // the time slept since the boot; only differences are used
	slept     atomic.Int64         // the largest reading of suspended so far
}

func newClock() *clock {
	k := &clock{base: time.Now(), suspended: hostclock.Suspended}
	k.slept.Store(int64(k.suspended()))
	return k
}

// The method now returns the time since a fixed moment in the past.
func (k *clock) now() time.Duration {
	// Keep the largest reading, because a reading may be too small if the process pauses during it.
	return time.Duration(raise(&k.slept, int64(k.suspended()))) + time.Since(k.base)
}

// raise sets the number in a to the larger of that number and n, and returns the new number.
func raise(a *atomic.Int64, n int64) int64 {
	for {
		old := a.Load()
		if old >= n {
			return old
		}
		if a.CompareAndSwap(old, n) {
			return n
		}
	}
}
