// Package clock has the clocks that hasp uses. A Clock is the time of one Client: Go's monotonic
// clock plus the time for which the machine has slept. Now and SinceBoot return the same time in
// all processes of the host. Suspended returns how long the host has slept.
package clock

import (
	"sync/atomic"
	"time"
)

// Suspended returns how long the host has slept since its boot. It is a variable so that a
// simulation can replace it before the simulation creates a Client.
var Suspended = suspended

// Instant is a moment by a Clock, in nanoseconds since the Clock was created. 0 means no moment. An
// Instant includes the suspends that the Clock notices. A time "of Clock.Awake" is an Instant that
// does not include suspends.
type Instant int64

// Never is an Instant that is later than every deadline.
const Never = Instant(1<<63 - 1)

// Add returns t + d, or the constant Never if the sum would be larger.
func (t Instant) Add(d time.Duration) Instant {
	if d > 0 && t > Never-Instant(d) {
		return Never
	}
	return t + Instant(d)
}

// Clock is Go's monotonic clock plus the time for which the machine has slept. Inside a synctest
// bubble, Go's clock is virtual.
//
// Only the method Read reads the time of sleep, at most once a millisecond, because a reading takes
// system calls. The engine calls Read before and after each call that acquires or renews a hold, in
// Lease.Err, and once a second while leases are held. The method Now uses the last reading.
type Clock struct {
	base   time.Time     // just before the clock was created
	local  bool          // suspends do not count
	before time.Duration // suspended() when the clock was created
	slept  atomic.Int64  // the largest suspended() − before so far

	// suspended returns how long the machine has slept since its boot. Only differences are used.
	suspended func() time.Duration

	// nextCheck says when Read must call suspended again: a time of Go's clock, counted from base.
	nextCheck atomic.Int64
}

// checkInterval is how long the method Read uses the last reading. Go's clock measures this time,
// and stops during a suspend. Therefore Read may notice a suspend up to checkInterval late.
const checkInterval = time.Millisecond

// New returns a Clock that asks suspended how long the machine has slept. If local is true, the
// Clock notices no suspend, because it serves a store in this process.
func New(suspended func() time.Duration, local bool) *Clock {
	k := &Clock{
		base:      time.Now().Add(-1), // so that no reading is the Instant 0, which means no moment
		suspended: suspended,
		local:     local,
		before:    suspended(),
	}

	// Take the largest of several readings. If the process pauses during a reading, that reading is
	// too small, and the pause would later count as a suspend.
	for range 3 {
		k.before = max(k.before, suspended())
	}
	return k
}

// Now returns the time of Go's clock plus the last reading of the time of sleep.
func (k *Clock) Now() Instant {
	return Instant(int64(time.Since(k.base)) + k.slept.Load())
}

// Awake returns the present time without the time of sleep.
func (k *Clock) Awake() Instant { return Instant(time.Since(k.base)) }

// minSuspend is the shortest suspend that counts. Even without a suspend, readings of two clocks
// may differ by less than that.
const minSuspend = int64(time.Millisecond)

// Read returns the Instant now, and how long the machine has slept; now − slept is the time of
// Clock.Awake. It reads the time of sleep anew if the last reading is older than checkInterval.
func (k *Clock) Read() (now Instant, slept int64) {
	awake := int64(time.Since(k.base))
	slept = k.slept.Load()
	if k.local || awake < k.nextCheck.Load() {
		return Instant(awake + slept), slept
	}

	seen := int64(k.suspended() - k.before)

	// Store only a larger value, because instants must not go back. If another goroutine has stored
	// a value meanwhile, CompareAndSwap fails. Then compare with that value.
	for seen >= slept+minSuspend && !k.slept.CompareAndSwap(slept, seen) {
		slept = k.slept.Load()
	}

	// Store nextCheck only after slept. Otherwise another goroutine would use the old slept.
	k.nextCheck.Store(awake + int64(checkInterval))

	// Load slept once for both results, so that now − slept is the time of Awake. Another goroutine
	// may have raised k.slept.
	slept = k.slept.Load()
	return Instant(int64(time.Since(k.base)) + slept), slept
}

// At converts the time t of this process's clock to an Instant. The argument slept is how long the
// machine had slept when t was read, or at an earlier moment. If a suspend came between that moment
// and t, the result is too early, which is safe for a deadline.
func (k *Clock) At(t time.Time, slept int64) Instant {
	return Instant(int64(t.Sub(k.base)) + slept)
}

// Time converts t to a time.Time, for people and for timers.
func (k *Clock) Time(t Instant) time.Time {
	// Add the time from now to t to the present time. If t was added to base, the wall clock of the
	// result would lack the suspends since base was read.
	now := time.Now()
	return now.Add(time.Duration(int64(t)-k.slept.Load()) - now.Sub(k.base))
}

// Skip moves k forward by d, as if the process had been stopped for d. It is for tests.
func (k *Clock) Skip(d time.Duration) { k.slept.Add(int64(d)) }
