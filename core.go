package hasp

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/clock"
)

// core is what the parts of a Client share: the settings that never change, the mutex, and the
// count of the goroutines that Close waits for.
type core struct {
	opts   Options
	traits backend.Traits
	clock  *clock.Clock
	trip   atomic.Int64 // moving average of the time of a call to the store, as a time.Duration

	closing context.Context // ends with ErrClosed when Close begins
	close   context.CancelCauseFunc
	closed  chan struct{} // closed when Close has ended

	// mu guards the state of all parts, and those fields of line, hold and Lease whose comments say
	// so. One mutex guards everything, because an Unlock or a loss changes most parts at once. It
	// is not held across I/O. A function whose name ends in Locked is called with mu held, and does
	// not unlock mu.
	mu sync.Mutex

	// calls is the number of this Client's goroutines, plus its calls in flight except Lock and
	// TryLock.
	calls int

	stopped bool       // Close has stopped waiting and closes the driver; no goroutine may start
	changed *sync.Cond // signals each change that Close or an Unlock may wait for
	lookers lookers    // the callers that look for a slot
}

// newCore returns the core of a Client that is not closed.
func newCore(opts Options, traits backend.Traits) *core {
	c := &core{
		opts:    opts,
		traits:  traits,
		clock:   clock.New(clock.Suspended, traits.Reach == backend.Process),
		closed:  make(chan struct{}),
		lookers: lookers{},
	}
	c.changed = sync.NewCond(&c.mu)
	c.closing, c.close = context.WithCancelCause(context.Background())
	return c
}

// enter begins a call on the caller's goroutine. Close waits until the method leave ends the call.
// If Close has stopped waiting, enter returns ErrClosed.
func (c *core) enter() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stopped {
		return ErrClosed
	}
	c.calls++
	return nil
}

// leave ends a call that enter, or other code with mu held, has counted.
func (c *core) leave() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls--
	c.changed.Broadcast()
}

// spawn runs f on a goroutine that Close waits for. It returns false if Close has stopped waiting.
func (c *core) spawn(f func()) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.spawnLocked(f)
}

// spawnLocked does what spawn does, with mu held.
func (c *core) spawnLocked(f func()) bool {
	if c.stopped {
		return false
	}
	c.calls++
	go func() {
		defer c.leave()
		f()
	}()
	return true
}

// noteTrip records d, which is how long an answered call took.
func (c *core) noteTrip(d time.Duration) {
	// Ignore a call longer than Timeout, because the machine or the process was stopped.
	if d > c.opts.Timeout {
		return
	}

	trip := int64(d)
	old := c.trip.Load() // 0 before the first call

	// Move the mean towards trip by an eighth of the difference. But replace a mean above 2*trip by
	// trip, because that mean is probably the time of the first call, which also dials.
	if old > 0 && old <= 2*trip {
		trip = old + (trip-old)/8
	}
	c.trip.Store(trip)
}

// roundTrip returns the approximate time of one call, or 0 if no call was answered yet.
func (c *core) roundTrip() time.Duration { return time.Duration(c.trip.Load()) }

// answerTime returns how long a healthy store may take to answer.
func (c *core) answerTime() time.Duration {
	return min(max(4*c.roundTrip(), 50*time.Millisecond), c.opts.Timeout)
}

// settle waits until cond returns true, or until the deadline end. It calls cond with mu held.
func (c *core) settle(end time.Time, cond func() bool) {
	timer := time.AfterFunc(time.Until(end), func() {
		// Hold mu, so that the signal cannot come between the check of the time and the Wait.
		c.mu.Lock()
		defer c.mu.Unlock()
		c.changed.Broadcast()
	})
	defer timer.Stop()

	c.mu.Lock()
	defer c.mu.Unlock()
	for !cond() && time.Now().Before(end) {
		c.changed.Wait()
	}
}

// poke wakes the goroutine that receives from the channel wake, which has room for one signal.
func poke(wake chan<- struct{}) {
	select {
	case wake <- struct{}{}:
	default: // a signal is there already
	}
}

// isClosed reports whether ch, on which nothing is sent, is closed.
func isClosed(ch <-chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}
