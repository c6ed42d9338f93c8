package hasp

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
)

var errUnsupported = errors.ErrUnsupported

// Client is a [Locker] over one driver. It may be used by many goroutines at
// once. Within a Client callers that wait for one key stand in line, and
// leases are renewed together, so a program needs one Client per store.
type Client struct {
	driver backend.Driver
	waiter backend.Waiter // driver, if it is one
	traits backend.Traits
	lined  bool // callers stand in line here; those of a driver that keeps the order itself stand in its queue
	turns  int  // holds of one key in a row, before others get their turn
	opts   Options
	clock  *clock
	roundT atomic.Int64 // moving average of one call to the store, in ns

	closing context.Context // ends with ErrClosed when Close begins
	close   context.CancelCauseFunc
	closed  chan struct{} // closed when Close has ended

	mu      sync.Mutex // guards all below, and what line, hold and Lease say it guards; not held across I/O
	lines   map[string]*line
	spare   []*line       // for reuse
	sought  sought        // keys that somebody else held a moment ago
	holds   holdHeap      // holds that are trusted, by the time of what they need next
	open    int           // holds that are trusted or being released, or ended by Close and not unlocked
	callers int           // in all lines; those of holds included, one each
	calls   int           // goroutines that talk to the store or drive leases
	gone    bool          // Close has ended: no goroutine may start
	changed chan struct{} // what Close waits on: closed and replaced when one of these has fallen

	renewer renewer
	reaper  reaper
}

var _ Locker = (*Client)(nil)

// New returns a Client over d, which it owns from now on. It panics if d is
// nil or the options are out of range.
func New(d backend.Driver, o *Options) *Client {
	if d == nil {
		panic("hasp: New: driver is nil")
	}
	opts, err := o.withDefaults()
	if err != nil {
		panic("hasp: New: " + err.Error())
	}
	return newClient(d, opts)
}

func newClient(d backend.Driver, opts Options) *Client {
	c := &Client{
		driver:  d,
		traits:  d.Traits(),
		opts:    opts,
		clock:   newClock(suspended),
		closed:  make(chan struct{}),
		lines:   map[string]*line{},
		changed: make(chan struct{}),
	}
	c.waiter, _ = d.(backend.Waiter)
	c.lined, c.turns = !c.traits.Ordered, maxTurns
	if c.traits.Ordered {
		c.lined, c.turns = c.traits.Turns > 1, c.traits.Turns
	}
	c.closing, c.close = context.WithCancelCause(context.Background())
	c.renewer.wake = make(chan struct{}, 1)
	c.reaper.wake = make(chan struct{}, 1)
	return c
}

// Lock waits until it holds key. It returns ErrHeld if ctx or WithMaxWait
// ended the wait while another held the key, the store's error if the store
// could not be reached for Options.Timeout, ErrClosed and ErrInvalid; an
// [*Error] around each.
//
// The context bounds the wait and the hold: when it ends, the context of the
// lease ends too. The key stays locked until Unlock, and renewed for one more
// term at most.
//
// A context derived from that of a lease re-enters: if that lease holds the
// same key on the same Client, Lock returns at once with a lease on the same
// hold.
func (c *Client) Lock(ctx context.Context, key string, opts ...Option) (*Lease, error) {
	return c.lock(ctx, "lock", key, opts)
}

// TryLock makes one attempt and returns ErrHeld if the key is held. If a
// caller of this Client holds the key or waits for it, it says so without
// asking the store. It is bounded by ctx and Options.Timeout.
func (c *Client) TryLock(ctx context.Context, key string, opts ...Option) (*Lease, error) {
	return c.lock(ctx, "trylock", key, opts)
}

// Inspect tells who holds key, since when and how long, its fence, and who
// waits: what the store knows. A driver that cannot tell is
// errors.ErrUnsupported.
func (c *Client) Inspect(ctx context.Context, key string) (backend.Status, error) {
	in, err := c.inspector(key)
	if err != nil {
		return backend.Status{}, &Error{"inspect", key, err}
	}
	s, err := call(c, ctx, c.opts.Timeout, func(ctx context.Context) (backend.Status, error) {
		return in.Inspect(ctx, c.opts.Prefix+key)
	}, nil)
	if err != nil {
		return backend.Status{}, &Error{"inspect", key, err}
	}
	return s, nil
}

// Break frees key, whoever holds it. It is the one call that may admit two
// holders at once: the one that was broken hears of it at its next renewal.
func (c *Client) Break(ctx context.Context, key string) error {
	in, err := c.inspector(key)
	if err != nil {
		return &Error{"break", key, err}
	}
	_, err = call(c, ctx, c.opts.Timeout, func(ctx context.Context) (struct{}, error) {
		return struct{}{}, in.Break(ctx, c.opts.Prefix+key)
	}, nil)
	c.doubt(key)
	if err != nil {
		return &Error{"break", key, err}
	}
	return nil
}

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
	return in, nil
}

// doubt has a hold of key in this Client confirmed before it is handed over
// or trusted for long.
func (c *Client) doubt(key string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	ln := c.lines[key]
	if ln == nil || ln.hold == nil || ln.hold.index < 0 {
		return
	}
	h := ln.hold
	h.doubted = c.clock.now()
	h.due = h.doubted + 1
	c.schedule(h)
}

// Close ends every wait with ErrClosed and every lease's context with cause
// ErrClosed, stops renewing, and waits up to Options.Timeout for the holders
// to Unlock. It never frees a key under a running holder: what is left runs
// out by itself. Then it closes the driver and leaves no goroutine, unless a
// driver's call does not end. A second Close waits for the first.
func (c *Client) Close() error {
	c.mu.Lock()
	if c.closing.Err() != nil {
		c.mu.Unlock()
		<-c.closed
		return nil
	}
	c.close(ErrClosed)
	var ended []*Lease
	for len(c.holds) > 0 {
		ended = append(ended, c.closeHold(c.holds[0])...)
	}
	c.mu.Unlock()
	c.tell(ended, ErrClosed)

	c.settle(func() bool { return c.open == 0 })
	c.renewer.poke()
	c.reaper.poke()
	c.settle(func() bool {
		c.gone = c.calls == 0 && c.callers == c.open // nobody is on the way to a hold, and none begins
		return c.gone
	})
	c.mu.Lock()
	c.gone = true
	c.mu.Unlock()
	err := c.driver.Close()
	c.settle(func() bool { return c.calls == 0 })
	close(c.closed)
	return err
}

// settle waits up to Timeout until cond holds; cond reads what mu guards.
func (c *Client) settle(cond func() bool) {
	timer := time.NewTimer(c.opts.Timeout)
	defer timer.Stop()
	for {
		c.mu.Lock()
		ok, changed := cond(), c.changed
		c.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-changed:
		case <-timer.C:
			return
		}
	}
}

// notify wakes Close. The caller holds mu.
func (c *Client) notify() {
	if c.closing.Err() != nil {
		close(c.changed)
		c.changed = make(chan struct{})
	}
}

// observe tells the observer, if there is one.
func (c *Client) observe(e Event) {
	if c.opts.Observe != nil {
		e.Owner = c.opts.Owner
		c.opts.Observe(e)
	}
}

// ended tells the observer how a lease has ended.
func (c *Client) ended(l *Lease, kind EventKind, err error) {
	if c.opts.Observe != nil {
		c.observe(Event{Kind: kind, Key: l.key, Fence: l.hold.fence, Hold: c.clock.now().sub(l.since), Err: err})
	}
}

// roundTrip is about how long one call to the store takes.
func (c *Client) roundTrip() time.Duration { return time.Duration(c.roundT.Load()) }

func (c *Client) measured(d time.Duration) {
	old := c.roundT.Load()
	if old == 0 || old > 2*int64(d) {
		c.roundT.Store(int64(d)) // the first call may have dialled
	} else {
		c.roundT.Store(old + (int64(d)-old)/8)
	}
}

// spread takes a random part of up to a tenth off d, so that what was taken
// together is not renewed together.
func spread(d time.Duration) time.Duration { return d - rand.N(d/10+1) }
