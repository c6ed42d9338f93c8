package hasp

import (
	"context"
	"fmt"
	"iter"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/hostclock"
)

// Client is a [Locker] over one driver, for any number of goroutines. A program needs only one
// Client per store. Callers of one Client wait for a key in order of arrival, and the leases of a
// Client are renewed together.
type Client struct {
	*core
	store    store
	reaper   reaper
	observer observer
	renewer  renewer
	queue    queue
	recalls  recalls
	closed   chan struct{} // closed when Close has ended
}

var _ Locker = (*Client)(nil)

// New returns a Client over d. Most programs call New of a strategy's package instead, or [Open].
// The Client owns d: Close closes it, and New closes it if New fails. If d is nil, an option is out
// of range, the TTL is above the longest term that the store grants, or Traits.Reach is empty, the
// error is ErrInvalid.
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

// newClient returns a Client over d. If it fails, it closes d.
func newClient(d backend.Driver, o *Options) (*Client, error) {
	traits := d.Traits()
	opts, err := o.withDefaults()
	if err == nil && traits.Reach == "" {
		err = fmt.Errorf("%w: the driver's Traits have no Reach", ErrInvalid)
	}
	if err == nil {
		err = checkLongest(traits, opts.TTL)
	}
	if err != nil {
		d.Close()
		return nil, err
	}

	c := &Client{core: newCore(opts, traits), closed: make(chan struct{})}
	c.store = store{core: c.core, driver: d}
	if c.store.waiter, _ = d.(backend.Waiter); c.store.waiter == nil {
		c.store.waker, _ = d.(backend.Waker)
	}
	c.reaper = reaper{store: &c.store, wake: make(chan struct{}, 1)}
	c.observer.core = c.core
	c.queue = queue{core: c.core, polls: c.store.waiter == nil && c.store.waker == nil, lines: map[string]*line{}, lookers: map[string]chan int{}, recalled: make(chan string, 1)}
	c.recalls = recalls{store: &c.store, queue: &c.queue}
	c.renewer = renewer{store: &c.store, reaper: &c.reaper, observer: &c.observer, wake: make(chan struct{}, 1)}
	return c, nil
}

// Lock waits until it holds key. Its errors are of type [*Error]. It returns ErrHeld if ctx or
// WithMaxWait ended the wait while another caller held the key. It returns ErrUnavailable if the
// store could not be reached for Options.Timeout, or until WithMaxWait ended the wait. It returns
// the context's error if ctx ended the wait before the store had answered. Its other errors are
// ErrClosed, ErrInvalid and errors.ErrUnsupported.
//
// The context bounds the wait and the hold: when it ends, the context of the lease ends as well,
// and the lease is renewed for at most one more term. The key stays locked until Unlock, or until
// the term ends. With [Do], the lease is renewed until the function returns.
//
// A context derived from a lease's context re-enters: if that lease holds the same key on the same
// Client, Lock returns immediately with a lease on the same hold. Unlock the inner lease first, as
// defer does. If the outer lease is unlocked first, the inner lease's context ends, and the hold is
// renewed for at most one more term. A call with any other context waits for the key, even if its
// caller holds it.
func (c *Client) Lock(ctx context.Context, key string, opts ...Option) (*Lease, error) {
	return c.lock(ctx, "lock", key, opts)
}

// TryLock makes one attempt, bounded by ctx and Options.Timeout. It returns ErrHeld if the key is
// held. If another caller of this Client holds the key or waits for it, TryLock usually returns
// without a call to the store. It ignores WithMaxWait.
func (c *Client) TryLock(ctx context.Context, key string, opts ...Option) (*Lease, error) {
	return c.lock(ctx, "trylock", key, opts)
}

// Status is a store's report about a key.
type Status = backend.Status

// Inspect returns what the store knows about key: the holder, when the hold began, the rest of its
// term, the fence, and the waiters. If the driver cannot inspect, the error is
// errors.ErrUnsupported.
func (c *Client) Inspect(ctx context.Context, key string) (Status, error) {
	s, err := c.store.status(ctx, key)
	return s, newError("inspect", key, err)
}

// Break frees key, whichever caller holds it. Break is the only call that may admit two holders at
// the same time, because the old holder learns of the Break only at its next renewal. If the store
// has confirmed the old hold less than 50 ms ago, the old holder's Client may even hand that hold
// over to another of its callers.
func (c *Client) Break(ctx context.Context, key string) error {
	c.queue.breaks(key)
	_, err := inspect(&c.store, ctx, key, func(ctx context.Context, in backend.Inspector, key string) (struct{}, error) {
		return struct{}{}, in.Break(ctx, key)
	})
	return newError("break", key, err)
}

// Entry is a key and its Status.
type Entry = backend.Entry

// List yields the keys that begin with prefix and are held or waited for, in no particular order.
// Each slot of WithSlots is a key of its own: KEY#0, KEY#1 and so on. While a caller waits for a
// slot, KEY#queue is held too. List puts Options.Prefix before prefix, and removes it from the
// keys.
//
// The list is no snapshot: a key that is taken or freed meanwhile may be missing, and a key may
// come twice. List asks the store page by page as the loop goes on, and Options.Timeout bounds each
// call. If there is an error, List yields it once, last, as an [*Error]. If the driver cannot list,
// the error is errors.ErrUnsupported.
func (c *Client) List(ctx context.Context, prefix string) iter.Seq2[Entry, error] {
	return c.store.list(ctx, prefix)
}

// Close ends every wait with ErrClosed, and every lease's context with cause ErrClosed. It stops
// renewing. Then it waits up to Options.Timeout for the holders to Unlock and for calls in flight.
// It never frees a key while its holder still runs: the remaining holds expire, and Close returns
// an error that names their keys. Finally Close closes the driver, and waits up to a second for the
// calls that are still in flight. All goroutines of the Client have ended then, except those in
// calls of the driver or of Observe that do not end. A second Close waits for the first.
func (c *Client) Close() error {
	c.mu.Lock()
	if c.closing.Err() != nil {
		c.mu.Unlock()
		<-c.closed
		return nil
	}

	// Call close and closeLocked under one lock of mu, so that no hold escapes: a caller that gets
	// a hold later finds that the Client is closing. The leases that end here can still be
	// unlocked.
	c.close(ErrClosed)
	c.changed.Broadcast()
	ended := c.renewer.closeLocked()
	c.mu.Unlock()
	for _, l := range ended {
		l.endContext(ErrClosed)
	}

	// Holders unlock while the reaper cleans up, so one Timeout is enough for both.
	end := time.Now().Add(c.opts.Timeout)
	c.settle(end, func() bool { return c.queue.open == 0 })
	poke(c.renewer.wake)
	poke(c.reaper.wake)
	c.settle(end, func() bool {
		c.stopped = c.calls == 0 && c.queue.callers == c.queue.open // no call is in flight, and all callers that are left have holds
		return c.stopped
	})
	c.mu.Lock()
	c.stopped = true
	c.mu.Unlock()

	// Close the driver, so that calls that are still in flight end.
	err := joined(c.store.driver.Close(), notUnlocked(ended))
	c.settle(time.Now().Add(min(c.opts.Timeout, lastPatience)), func() bool { return c.calls == 0 })
	close(c.closed)
	return err
}

// notUnlocked returns an error that names the keys of those leases that were not unlocked after
// Close ended them, or nil if all were.
func notUnlocked(leases []*Lease) error {
	var keys []string
	for _, l := range leases {
		if l.state.Load() == closed {
			keys = append(keys, strconv.Quote(l.key))
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

const lastPatience = time.Second

// core is what the parts of a Client share: the settings that never change, the mutex, and the
// count of the goroutines that Close waits for.
type core struct {
	opts   Options
	traits backend.Traits
	clock  *clock
	trip   atomic.Int64 // moving average of how long one call to the store takes, as a time.Duration

	closing context.Context // ends with ErrClosed when Close begins
	close   context.CancelCauseFunc

	// mu guards the state of all parts, and those fields of line, hold and Lease whose comments say
	// so. One mutex guards all, because an Unlock and a loss change most parts at one moment. It is
	// not held across I/O. A function whose name ends in Locked is called with mu held, and does
	// not unlock it.
	mu      sync.Mutex
	calls   int        // goroutines of this Client, plus calls in flight other than Lock and TryLock
	stopped bool       // Close has stopped waiting and closes the driver, so no goroutine may start
	changed *sync.Cond // signals when a count or a state changes that Close or an Unlock waits for
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

// noteTrip records that a call that was answered took d.
func (c *core) noteTrip(d time.Duration) {
	// If a call lasted longer than Timeout, ignore it: the machine or the process was stopped
	// meanwhile.
	if d > c.opts.Timeout {
		return
	}
	trip, old := int64(d), c.trip.Load()
	if old > 0 && old <= 2*trip { // a mean above 2*trip is replaced: the first call, which also dials, was slow
		trip = old + (trip-old)/8
	}
	c.trip.Store(trip)
}

// roundTrip returns about how long one call takes, or 0 if there was none.
func (c *core) roundTrip() time.Duration { return time.Duration(c.trip.Load()) }

// answerTime returns how long a healthy store may take to answer.
func (c *core) answerTime() time.Duration {
	return min(max(4*c.roundTrip(), 50*time.Millisecond), c.opts.Timeout)
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
