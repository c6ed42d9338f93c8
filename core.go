package hasp

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/hostclock"
)

// core is what the parts of a Client share: the settings that never change, the mutex, and the
// count of the goroutines that Close waits for.
type core struct {
	opts   Options
	traits backend.Traits
	clock  *clock
	trip   atomic.Int64 // about how long one call to the store takes, as a time.Duration: a moving average

	closing context.Context // ends with ErrClosed when Close begins
	close   context.CancelCauseFunc

	// mu guards the state of all parts, and those fields of line, hold and Lease whose comments say
	// so. One mutex guards all, because an Unlock and a loss change most parts at one moment. It is
	// not held across I/O. A function whose name ends in Locked is called with mu held, and does
	// not unlock it.
	mu      sync.Mutex
	calls   int        // number of goroutines of this Client, and of calls other than Lock and TryLock
	stopped bool       // Close has stopped waiting and closes the driver, so no goroutine may start
	changed *sync.Cond // signals a change of a count or a state for which Close or an Unlock waits
}

func newCore(opts Options, traits backend.Traits) *core {
	c := &core{
		opts:   opts,
		traits: traits,
		clock:  newClock(hostclock.Suspended, traits.Reach == backend.Process),
	}
	c.changed = sync.NewCond(&c.mu)
	c.closing, c.close = context.WithCancelCause(context.Background())
	return c
}

// enter begins a call on the caller's goroutine. Close waits until leave ends the call. If Close
// has stopped waiting, enter returns ErrClosed.
func (c *core) enter() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stopped {
		return ErrClosed
	}
	c.calls++
	return nil
}

// leave ends a call that enter has begun.
func (c *core) leave() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls--
	c.changed.Broadcast()
}

// spawn runs f on a goroutine that Close waits for. If Close has stopped waiting, spawn returns
// false instead.
func (c *core) spawn(f func()) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.spawnLocked(f)
}

// spawnLocked is spawn under mu.
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

// settle waits until cond returns true, but not past end. It calls cond with mu held.
func (c *core) settle(end time.Time, cond func() bool) {
	timer := time.AfterFunc(time.Until(end), func() {
		// Hold mu, so that the signal does not come between the check of the time and the Wait
		// below.
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

// poke wakes a goroutine that waits for wake, which has room for one signal.
func poke(wake chan<- struct{}) {
	select {
	case wake <- struct{}{}:
	default:
	}
}

func isClosed(ch <-chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}
