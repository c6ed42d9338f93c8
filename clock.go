package hasp

import (
	"sync/atomic"
	"time"
)

// instant is a moment by a Client's clock, in nanoseconds since the Client was
// created. It counts through a suspend of the machine. Go's monotonic clock does not
// on every platform.
type instant int64

// never is later than every deadline.
const never = instant(1<<63 - 1)

// add returns t + d, and at most never.
func (t instant) add(d time.Duration) instant {
	if d > 0 && t > never-instant(d) {
		return never
	}
	return t + instant(d)
}

func (t instant) sub(u instant) time.Duration { return time.Duration(t - u) }

// clock is Go's monotonic clock plus the time for which the machine has slept. Inside
// a synctest bubble, Go's clock is virtual. To read the time of sleep takes system
// calls. So it is read only by check: around calls to a store outside the process, at
// most once a millisecond, and once a second while leases are held. In between, now
// uses the last reading.
type clock struct {
	base      time.Time            // when the clock was created
	suspended func() time.Duration // how long the machine has slept since its boot; only the growth counts
	before    time.Duration        // suspended() when the clock was created
	slept     atomic.Int64         // the largest suspended() − before so far
	nextCheck atomic.Int64         // by Go's clock, since base: check reads suspended again then
}

// checkInterval is how long check relies on a reading, in time that the machine is
// awake. A suspend within it is noticed by the next check.
const checkInterval = time.Millisecond

func newClock(suspended func() time.Duration) *clock {
	k := &clock{base: time.Now(), suspended: suspended, before: suspended()}
	// A pause within a reading makes it too small. Every later reading is compared
	// with this one. If it were too small, the pause would count as a suspend.
	for range 3 {
		k.before = max(k.before, suspended())
	}
	return k
}

// now reads Go's clock, and adds the last reading of the time of sleep.
func (k *clock) now() instant {
	return instant(int64(time.Since(k.base)) + k.slept.Load())
}

// minSuspend is the shortest suspend that counts. Two readings of two clocks may
// differ by less without a suspend.
const minSuspend = int64(time.Millisecond)

// check returns now. It first reads how long the machine has slept, unless that was
// done a moment ago.
func (k *clock) check() instant {
	awake := int64(time.Since(k.base))
	if awake < k.nextCheck.Load() {
		return instant(awake + k.slept.Load())
	}

	k.nextCheck.Store(awake + int64(checkInterval))
	seen := int64(k.suspended() - k.before)
	for {
		// Another goroutine may have stored a larger value meanwhile. Instants must
		// not go back, so only a larger one is stored.
		old := k.slept.Load()
		if seen < old+minSuspend || k.slept.CompareAndSwap(old, seen) {
			return k.now()
		}
	}
}

// at converts a time of this process's clock that was read when the machine had slept
// for slept. A suspend since then makes the result earlier, which is safe for a
// deadline.
func (k *clock) at(t time.Time, slept int64) instant {
	return instant(int64(t.Sub(k.base)) + slept)
}

// time converts t to a time, for people and for timers.
func (k *clock) time(t instant) time.Time {
	return k.base.Add(time.Duration(int64(t) - k.slept.Load()))
}
