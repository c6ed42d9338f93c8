package hasp

import (
	"sync/atomic"
	"time"
)

// instant is a moment by a Client's clock, in nanoseconds since the Client
// was made. It counts through a suspend of the machine, which Go's monotonic
// clock does not on every platform.
type instant int64

// never is later than every deadline.
const never = instant(1<<63 - 1)

// add does not pass never.
func (t instant) add(d time.Duration) instant {
	if d > 0 && t > never-instant(d) {
		return never
	}
	return t + instant(d)
}

func (t instant) sub(u instant) time.Duration { return time.Duration(t - u) }

// clock adds to Go's monotonic clock, which is virtual inside a synctest
// bubble, the time the machine has slept. The latter needs system calls; it
// is read around calls to a store that other machines share, once a
// millisecond at most, and once a second while leases are held, and every look
// in between uses what was read last.
type clock struct {
	base      time.Time
	suspended func() time.Duration // total so far; only its growth counts
	awake     time.Duration        // suspended() when the clock was made
	slept     atomic.Int64         // largest suspended() − awake seen
	again     atomic.Int64         // since base, by Go's clock: when a look reads it again
}

// goodFor is how long a look is, of time that the machine is awake. A suspend
// soon after one is like a suspend after a call has returned, of which the
// next look tells.
const goodFor = time.Millisecond

func newClock(suspended func() time.Duration) *clock {
	k := &clock{base: time.Now(), suspended: suspended, awake: suspended()}
	// A reading may be too small, by a pause within it. What every later one
	// is compared with must not be, or that pause would be taken for a suspend.
	for range 3 {
		k.awake = max(k.awake, suspended())
	}
	return k
}

// now is one reading of the monotonic clock.
func (k *clock) now() instant {
	return instant(int64(time.Since(k.base)) + k.slept.Load())
}

// minSuspend is what two readings of two clocks may differ by without a
// suspend. No machine sleeps for less.
const minSuspend = int64(time.Millisecond)

// look notices a suspend, and is now.
func (k *clock) check() instant {
	awake := int64(time.Since(k.base))
	if awake < k.again.Load() {
		return instant(awake + k.slept.Load())
	}
	k.again.Store(awake + int64(goodFor))
	seen := int64(k.suspended() - k.awake)
	for {
		old := k.slept.Load()
		if seen < old+minSuspend || k.slept.CompareAndSwap(old, seen) {
			return k.now()
		}
	}
}

// at converts a reading of this process's clock that was made after the
// machine had slept for slept. A suspend since then only makes the result
// earlier, which is the safe side for a deadline.
func (k *clock) at(t time.Time, slept int64) instant {
	return instant(int64(t.Sub(k.base)) + slept)
}

// time converts back, for people and for timers.
func (k *clock) time(t instant) time.Time {
	return k.base.Add(time.Duration(int64(t) - k.slept.Load()))
}
