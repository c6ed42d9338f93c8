package hasp

import (
	"sync/atomic"
	"time"
)

// instant is a moment by a Client's clock, in nanoseconds since the Client was created. 0 means no
// moment. An instant includes the time of the suspends that the clock notices: see clock.local and
// package hostclock. An instant "by clock.awake" does not include suspends.
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

// clock is Go's monotonic clock plus the time for which the machine has slept. Inside a synctest
// bubble, Go's clock is virtual.
//
// Only the method read reads the time of sleep, and at most once a millisecond, because that takes
// system calls. The engine calls read around calls that acquire or renew a hold, in Lease.Err, and
// once a second while leases are held. The method now uses the last reading.
type clock struct {
	base      time.Time            // just before the clock was created
	suspended func() time.Duration // returns how long the machine has slept since its boot; only the growth counts
	local     bool                 // the store is in this process, so suspends do not count
	before    time.Duration        // suspended() when the clock was created
	slept     atomic.Int64         // the largest suspended() − before so far
	nextCheck atomic.Int64         // when read must call suspended again, by Go's clock since base
}

// checkInterval is how long read uses the last reading, by Go's clock, which stops during a
// suspend. So read may notice a suspend later by up to checkInterval.
const checkInterval = time.Millisecond

func newClock(suspended func() time.Duration, local bool) *clock {
	k := &clock{base: time.Now().Add(-1), suspended: suspended, local: local, before: suspended()}
	// Take the largest of several readings. A reading during which the process pauses is too small,
	// and then that pause would later count as a suspend.
	for range 3 {
		k.before = max(k.before, suspended())
	}
	return k
}

// now reads Go's clock, and adds the last reading of the time of sleep.
func (k *clock) now() instant {
	return instant(int64(time.Since(k.base)) + k.slept.Load())
}

// awake returns the present time without the time of sleep.
func (k *clock) awake() instant { return instant(time.Since(k.base)) }

// minSuspend is the shortest suspend that counts, because readings of two clocks may differ by less
// without a suspend.
const minSuspend = int64(time.Millisecond)

// read returns the present time, and how long the machine has slept: the difference is the time by
// awake. It reads the time of sleep, unless that was read within checkInterval.
func (k *clock) read() (now instant, slept int64) {
	awake := int64(time.Since(k.base))
	slept = k.slept.Load()
	if k.local || awake < k.nextCheck.Load() {
		return instant(awake + slept), slept
	}

	seen := int64(k.suspended() - k.before)
	// Store only a larger value, because instants must not go back, and another goroutine may store
	// one meanwhile.
	for seen >= slept+minSuspend && !k.slept.CompareAndSwap(slept, seen) {
		slept = k.slept.Load()
	}
	k.nextCheck.Store(awake + int64(checkInterval)) // after slept is stored, because another goroutine would use the old value
	slept = k.slept.Load()
	return instant(int64(time.Since(k.base)) + slept), slept // the same slept in both
}

// at converts t, a time by this process's clock, to an instant. slept is how long the machine had
// slept when t was read, or at a moment before that. If a suspend came in between, the result is
// too early, which is safe for a deadline.
func (k *clock) at(t time.Time, slept int64) instant {
	return instant(int64(t.Sub(k.base)) + slept)
}

// time converts t to a time, for people and for timers.
func (k *clock) time(t instant) time.Time {
	// Compute the result from the present time, because the wall clock of base lacks the suspends
	// since base was read.
	now := time.Now()
	return now.Add(time.Duration(int64(t)-k.slept.Load()) - now.Sub(k.base))
}
