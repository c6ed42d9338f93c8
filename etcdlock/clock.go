package etcdlock

import (
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/internal/hostclock"
)

// clock tells the ages of leases. Go's monotonic clock does not count the time for which
// the machine was suspended, but a lease grows old meanwhile. So this clock adds that time.
type clock struct {
	base      time.Time
	suspended func() time.Duration // how long the machine has slept since its boot; only the growth counts
	slept     atomic.Int64         // the largest reading of suspended so far
}

func newClock() *clock {
	k := &clock{base: time.Now(), suspended: hostclock.Suspended}
	k.slept.Store(int64(k.suspended()))
	return k
}

// now returns the time since some moment in the past.
func (k *clock) now() time.Duration {
	// If the process pauses during a reading, the result is too small. So the largest one counts.
	return time.Duration(raise(&k.slept, int64(k.suspended()))) + time.Since(k.base)
}

// raise sets a to n if that is more, and returns a.
func raise(a *atomic.Int64, n int64) int64 {
	for {
		if old := a.Load(); old >= n {
			return old
		} else if a.CompareAndSwap(old, n) {
			return n
		}
	}
}
