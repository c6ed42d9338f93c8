package hasp

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/hostclock"
)

var errUnsupported = errors.ErrUnsupported

// Client is a [Locker] over one driver. It may be used by many goroutines at
// once. Callers of one Client that wait for one key do so in order of arrival, and
// the leases of a Client are renewed together. So a program needs one Client per
// store.
type Client struct {
	driver backend.Driver
	waiter backend.Waiter // driver, or nil if it is no Waiter
	waker  backend.Waker  // driver, or nil if it is no Waker
	polls  bool           // nothing in the store wakes the callers that wait
	traits backend.Traits
	opts   Options
	clock  *clock
	trip   atomic.Int64 // about how long one call to the store takes, as a time.Duration: a moving average

	closing context.Context // ends with ErrClosed when Close begins
	close   context.CancelCauseFunc
	closed  chan struct{} // closed when Close has ended

	// mu guards all below, and the fields of line, hold and Lease that say so. It is
	// not held across I/O. A function whose name ends in Locked needs it.
	mu        sync.Mutex
	lines     map[string]*line    // by key, without those of shared callers
	lookers   map[string]chan int // receives a slot of the key that may have become free, for the caller that looks for one
	contended contended           // keys that a Waiter has refused lately
	holds     holdHeap            // holds that are trusted, ordered by when the renewer must serve them
	open      int                 // holds that are trusted or being released, or ended by Close and not unlocked
	callers   int                 // in all lines
	calls     int                 // goroutines of this Client, and calls of callers other than Lock and TryLock
	stopped   bool                // Close waits no longer, and closes the driver: no goroutine may start
	changed   *sync.Cond          // signals that open, callers or calls has become smaller, for settle

	renewer  renewer
	reaper   reaper
	observer observer
}

var _ Locker = (*Client)(nil)

// New returns a Client over d. Most programs call New of a strategy's package instead, or [Open].
// The Client owns d: Close closes it, and New closes it if New fails. If d is nil, an option is out
// of range, or the TTL is above the longest term that the store grants, the error is ErrInvalid.
func New(d backend.Driver, o *Options) (*Client, error) {
	if d == nil {
		return nil, fmt.Errorf("hasp: new: %w: driver is nil", ErrInvalid)
	}
	c, err := newClient(d, o)
	if err != nil {
		return nil, fmt.Errorf("hasp: new: %w", err)
	}
	return c, nil
}

// newClient returns a Client over d, which it closes if it fails.
func newClient(d backend.Driver, o *Options) (*Client, error) {
	traits := d.Traits()
	opts, err := o.withDefaults()
	if err == nil {
		err = checkLongest(traits, opts.TTL)
	}
	if err != nil {
		d.Close()
		return nil, err
	}
	c := &Client{
		driver:  d,
		traits:  traits,
		opts:    opts,
		clock:   newClock(hostclock.Suspended, traits.Reach == backend.Process),
		closed:  make(chan struct{}),
		lines:   map[string]*line{},
		lookers: map[string]chan int{},
	}
	c.changed = sync.NewCond(&c.mu)
	c.waiter, _ = d.(backend.Waiter)
	if c.waiter == nil {
		c.waker, _ = d.(backend.Waker)
	}
	c.polls = c.waiter == nil && c.waker == nil

	c.closing, c.close = context.WithCancelCause(context.Background())
	c.renewer.wake = make(chan struct{}, 1)
	c.reaper.wake = make(chan struct{}, 1)
	return c, nil
}

// Lock waits until it holds key. Its errors are of type [*Error]. It returns ErrHeld
// if ctx or WithMaxWait ended the wait while another caller held the key. It returns
// ErrUnavailable if the store could not be reached for Options.Timeout, or until
// WithMaxWait ended the wait. It returns the context's error if ctx ended the wait before
// the store had answered. Its other errors are ErrClosed, ErrInvalid and
// errors.ErrUnsupported.
//
// The context bounds the wait and the hold: when it ends, the context of the lease
// ends as well. The lease is then renewed for at most one more term. The key stays locked
// until Unlock, or until the term ends. Do renews the lease until its function returns.
//
// A context derived from a lease's context re-enters: if that lease holds the same
// key on the same Client, Lock returns at once with a lease on the same hold. Unlock
// the inner lease first, as defer does. If the outer lease is unlocked first, the inner
// lease's context ends, and their hold is renewed for at most one more term. Any other
// context waits for the key, even if its caller holds it.
func (c *Client) Lock(ctx context.Context, key string, opts ...Option) (*Lease, error) {
	return c.lock(ctx, "lock", key, opts)
}

// TryLock makes one attempt, bounded by ctx and Options.Timeout. It returns ErrHeld
// if the key is held. If another caller of this Client holds the key or waits for it,
// TryLock usually returns without a call to the store. WithMaxWait has no effect on it.
func (c *Client) TryLock(ctx context.Context, key string, opts ...Option) (*Lease, error) {
	return c.lock(ctx, "trylock", key, opts)
}

// Status is what a store says about a key.
type Status = backend.Status

// Inspect returns what the store knows about key: the holder, when the hold began,
// the rest of its term, the fence, and the waiters. If the driver cannot inspect, the
// error is errors.ErrUnsupported.
func (c *Client) Inspect(ctx context.Context, key string) (Status, error) {
	s, err := c.inspect(ctx, key)
	return s, newError("inspect", key, err)
}

func (c *Client) inspect(ctx context.Context, key string) (Status, error) {
	in, err := c.inspector(key)
	if err != nil {
		return Status{}, err
	}
	defer c.leave()
	return call(c, ctx, c.opts.Timeout, func(ctx context.Context) (Status, error) {
		return in.Inspect(ctx, c.opts.Prefix+key)
	}, nil)
}

// Break frees key, whichever caller holds it. It is the one call that may admit two
// holders at once: the old holder learns of it at its next renewal. Until then the old hold
// may pass to another caller of its Client, in the 50 ms after the store has confirmed it.
func (c *Client) Break(ctx context.Context, key string) error {
	in, err := c.inspector(key)
	if err == nil {
		defer c.leave()
		_, err = call(c, ctx, c.opts.Timeout, func(ctx context.Context) (struct{}, error) {
			return struct{}{}, in.Break(ctx, c.opts.Prefix+key)
		}, nil)
	}
	return newError("break", key, err)
}

// inspector returns the driver, if it is an Inspector. Then it has called enter.
func (c *Client) inspector(key string) (backend.Inspector, error) {
	if key == "" {
		return nil, fmt.Errorf("%w: empty key", ErrInvalid)
	}
	if c.closing.Err() != nil {
		return nil, ErrClosed
	}
	in, ok := c.driver.(backend.Inspector)
	if !ok {
		return nil, fmt.Errorf("%T cannot inspect: %w", c.driver, errUnsupported)
	}
	return in, c.enter()
}

// Close ends every wait with ErrClosed, and every lease's context with cause
// ErrClosed. It stops renewing. Then it waits up to Options.Timeout for the holders
// to Unlock and for calls in flight. It never frees a key while its holder still
// runs: the remaining holds expire, and Close returns an error that names their keys.
// At last Close closes the driver, and waits up to a second for calls that have still
// not ended. It leaves no goroutine behind unless a call of the driver or of Observe
// does not end. A second Close waits for the first.
func (c *Client) Close() error {
	c.mu.Lock()
	if c.closing.Err() != nil {
		c.mu.Unlock()
		<-c.closed
		return nil
	}

	// Under mu: after this, no caller gets a hold that the loop below misses. The leases
	// can still be unlocked.
	c.close(ErrClosed)
	c.changed.Broadcast()
	var ended []*Lease
	for len(c.holds) > 0 {
		h := c.holds[0].hold
		for _, l := range h.leases {
			l.state.Store(closed)
		}
		ended = append(ended, h.leases...)
		c.unscheduleLocked(h)
	}
	c.mu.Unlock()
	for _, l := range ended {
		l.endContext(ErrClosed)
	}

	// Holders unlock while the Client cleans up after calls of unknown outcome,
	// so one Timeout is enough for both.
	end := time.Now().Add(c.opts.Timeout)
	c.settle(end, func() bool { return c.open == 0 })
	poke(c.renewer.wake)
	poke(c.reaper.wake)
	c.settle(end, func() bool {
		c.stopped = c.calls == 0 && c.callers == c.open // no call is in flight, and every caller that is left has a hold
		return c.stopped
	})
	c.mu.Lock()
	c.stopped = true
	c.mu.Unlock()

	// A call in flight is left behind. It should end when its driver is closed.
	err := joined(c.driver.Close(), notUnlocked(ended))
	c.settle(time.Now().Add(min(c.opts.Timeout, lastPatience)), func() bool { return c.calls == 0 })
	close(c.closed)
	return err
}

// notUnlocked returns an error that names the keys of those leases that were not unlocked
// since Close has ended them, or nil.
func notUnlocked(leases []*Lease) error {
	var keys []string
	for _, l := range leases {
		if l.state.Load() == closed {
			keys = append(keys, brief(l.key))
		}
	}
	slices.Sort(keys)
	keys = slices.Compact(keys)

	const most = 10
	switch n := len(keys); {
	case n == 0:
		return nil
	case n > most:
		keys = append(keys[:most], fmt.Sprintf("and %d more", n-most))
	}
	return fmt.Errorf("hasp: close: leases were not unlocked, and end with their terms: %s", strings.Join(keys, ", "))
}

// lastPatience is how long Close waits for calls to end after it has closed
// their driver.
const lastPatience = time.Second

// settle waits until cond returns true, but not past end. It calls cond with mu
// held.
func (c *Client) settle(end time.Time, cond func() bool) {
	timer := time.AfterFunc(time.Until(end), func() {
		// The signal is sent with mu held, so it does not come between the check of the
		// time and the Wait below.
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

// enter counts a call that the caller's goroutine makes, until leave. Close waits for it.
// enter returns ErrClosed if Close waits no longer.
func (c *Client) enter() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stopped {
		return ErrClosed
	}
	c.calls++
	return nil
}

// leave ends what enter began.
func (c *Client) leave() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls--
	c.changed.Broadcast()
}

// spawn runs f on a goroutine that Close waits for. It returns false if Close waits no
// longer.
func (c *Client) spawn(f func()) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.spawnLocked(f)
}

// spawnLocked is spawn under mu.
func (c *Client) spawnLocked(f func()) bool {
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
