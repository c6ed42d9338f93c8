// Package hasp provides named locks that processes share, behind one [Locker] interface. A strategy
// decides where locks are kept and how callers wait: in one process (memlock), on one host
// (filelock), on Redis (spinlock, pubsublock, fairlock, redlock), in PostgreSQL (pglock), in etcd
// (etcdlock), or in any store that compares and sets (caslock). Each strategy but caslock can be
// named by a URL, so a change of strategy is a change of one string.
//
//	c, err := hasp.Open(ctx, "spinlock+redis://localhost:6379", nil)
//	…
//	defer c.Close()
//	err = hasp.Do(ctx, c, "invoices/2024-06", func(ctx context.Context, lease *hasp.Lease) error {
//		return bill(ctx) // ctx ends if the lock is lost
//	})
//
// A lock in a distributed system is a lease. It has a term, and it is renewed while its holder
// lives. A lease can be lost, because a process may be stopped or cut off for longer than the term.
// Package hasp ends the lease by its own clock, before another caller can get the key
// ([Lease.Context], [Lease.Err]). A write that is in flight when the term ends can still arrive
// late. The resource can refuse such a write by its fence ([WithFence], [Lease.Fence]).
//
// Authors of a driver find the contract in package backend, and its test suite in package
// conformance.
package hasp

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/clock"
	"github.com/hasplock/hasp/internal/line"
)

// Locker takes named locks. [*Client] implements it, and every strategy creates a Client:
//
//	memlock.New(options)               // one process
//	filelock.New(dir, options)         // the processes of one host
//	spinlock.New(rdb, options)         // one Redis, by polling
//	pubsublock.New(rdb, options)       // one Redis, with messages
//	fairlock.New(rdb, options)         // one Redis, first come, first served
//	redlock.New(masters, options)      // several Redis masters, by quorum
//	pglock.New(ctx, pool, options)     // PostgreSQL
//	etcdlock.New(config, options)      // etcd
//	caslock.New(ctx, store, options)   // any store that compares and sets
//	hasp.Open(ctx, "spinlock+redis://localhost:6379", options) // any but caslock, by URL
//
// In your own functions, take a Locker and not a Client, so that a wrapper can add traces or
// metrics. A wrapper passes on its context, or one derived from it, and returns the leases of the
// Locker inside it.
type Locker interface {
	// Lock waits until it holds key, or until ctx ends, WithMaxWait has passed, or the store could
	// not be reached for Options.Timeout.
	Lock(ctx context.Context, key string, opts ...Option) (*Lease, error)

	// TryLock makes one attempt. If the key is held, the error is ErrHeld.
	TryLock(ctx context.Context, key string, opts ...Option) (*Lease, error)
}

// Client is a [Locker] over one driver, for any number of goroutines. A program needs only one
// Client per store. Callers of one Client wait for a key in order of arrival, and the leases of a
// Client are renewed together.
type Client struct {
	*core
	store    store
	reaper   reaper
	observer observer
	renewer  renewer
	queue    line.Queue
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
	if err == nil && (traits.Reach == "" || traits.MaxTTL < 0) {
		err = fmt.Errorf("%w: the driver's Traits have no Reach, or a negative MaxTTL", ErrInvalid)
	}
	if err == nil {
		err = checkLongest(traits, opts.TTL)
	}
	if err != nil {
		d.Close()
		return nil, err
	}

	c := &Client{core: newCore(opts, traits)}
	c.store = newStore(c.core, d)
	c.reaper = reaper{store: &c.store, wake: make(chan struct{}, 1)}
	c.observer.core = c.core
	c.queue = line.Queue{
		Clock:     c.clock,
		Ordered:   traits.Ordered,
		Polls:     !c.store.driver.Waits() && !c.store.driver.Wakes(),
		Timeout:   opts.Timeout,
		Owner:     opts.Owner,
		RoundTrip: c.roundTrip,
		Changed:   c.changed.Broadcast,
	}
	c.renewer = renewer{
		store:    &c.store,
		reaper:   &c.reaper,
		observer: &c.observer,
		wake:     make(chan struct{}, 1),
		resumed:  map[string]clock.Instant{},
	}
	return c, nil
}

// isNil reports whether c is nil or zero, so that neither New nor Open has created it.
func (c *Client) isNil() bool { return c == nil || c.core == nil }

// checkNil returns an Error if c is nil or zero.
func (c *Client) checkNil(op, key string) error {
	if c.isNil() {
		return &Error{op, key, errNilClient}
	}
	return nil
}

// unused returns the keys before the first one that this Client uses, or leaves to other Clients.
func (c *Client) unused(keys []string) []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.queue.Unused(keys)
}

// Status is a store's report about a key.
type Status = backend.Status

// Inspect returns what the store knows about key: the holder, when the hold began, the rest of its
// term, the fence, and the waiters. If the driver cannot inspect, the error is
// errors.ErrUnsupported.
func (c *Client) Inspect(ctx context.Context, key string) (Status, error) {
	if err := c.checkNil("inspect", key); err != nil {
		return Status{}, err
	}
	s, err := inspect(&c.store, ctx, key, backend.Inspector.Inspect)
	return s, newError("inspect", key, err)
}

// heldBy returns a HeldError that names the holder of key. It returns nil if the key is free or the
// driver cannot tell, or another error if the store fails. It works even if ctx has ended.
func (c *Client) heldBy(ctx context.Context, key string) error {
	// If this Client holds the key, its line knows the holder.
	c.mu.Lock()
	if ln := c.queue.Line(key); ln != nil && ln.Held() {
		defer c.mu.Unlock()
		return ln.Refusal()
	}
	c.mu.Unlock()

	s, err := inspect(&c.store, context.WithoutCancel(ctx), key, backend.Inspector.Inspect)
	switch {
	case errors.Is(err, errors.ErrUnsupported), err == nil && !s.Held:
		return nil
	case err != nil:
		return err
	case len(s.Shared) > 0:
		return &backend.HeldError{Owner: s.Shared[0], RetryAfter: s.TTL, Shared: true}
	}
	return &backend.HeldError{Owner: s.Owner, RetryAfter: s.TTL, Kept: s.Kept}
}

// Break frees key, whichever caller holds it. If the lease belongs to this Client, it is lost when
// Break returns. Break is the only call that may admit two holders at the same time, because a
// holder that belongs to another Client learns of the Break only at its next renewal. Until then,
// that Client may even hand the hold over to another of its callers: for 50 ms after the store has
// confirmed the hold, or while the key lingers.
func (c *Client) Break(ctx context.Context, key string) error {
	if err := c.checkNil("break", key); err != nil {
		return err
	}
	began := c.clock.Now()
	err := errNoReturn
	defer func() { c.broke(key, began, err) }() // also if the driver panics
	breaks := func(in backend.Inspector, ctx context.Context, key string) (struct{}, error) {
		return struct{}{}, in.Break(ctx, key)
	}
	_, err = inspect(&c.store, ctx, key, breaks)
	return newError("break", key, err)
}

// broke handles a Break of key by this Client that began at the given time and has returned err. If
// err is nil, the store has broken each hold whose grant came before the call began, so broke ends
// these holds. A hold whose grant came during the call, or is still on its way, may be broken as
// well, or it may belong to a caller that got the key by this Break. Only the store can say which,
// so broke has such a hold renewed now.
func (c *Client) broke(key string, began clock.Instant, err error) {
	if err != nil && backend.Definite(err) {
		return // no hold was broken
	}

	c.mu.Lock()
	now := c.clock.Now()
	if ln := c.queue.Line(key); ln != nil {
		ln.Broken = now // for a grant that is still on its way: see startLocked
	}

	// Collect the holds first, because the second loop changes the heap.
	var broken []*hold
	for _, s := range c.renewer.holds {
		if s.hold.claim.Key == c.opts.Prefix+key {
			broken = append(broken, s.hold)
		}
	}
	var ended []*Lease
	for _, h := range broken {
		switch {
		case h.lingers != 0:
			h.endLingerLocked(nil)
		case err == nil && h.Granted <= began:
			ended = append(ended, h.revokedLocked()...)
		default:
			h.suspectLocked(now)
		}
	}
	c.mu.Unlock()

	for _, l := range ended {
		l.endContext(l.loss) // without mu, because this runs users' code
	}
}

// Entry is a key and its Status.
type Entry = backend.Entry

// List yields the keys that begin with prefix and are held or waited for, in no particular order.
// Each slot of WithSlots is a key of its own: KEY#0, KEY#1 and so on. While a caller waits for a
// slot, KEY#queue is held too. List prepends Options.Prefix to prefix, and removes it from the
// keys.
//
// The list is no snapshot: a key that is taken or freed meanwhile may be missing, and a key may
// appear twice. List asks the store page by page as the loop goes on, and Options.Timeout bounds
// each call. If there is an error, List yields it once, at the end, as an [*Error]. If the driver
// cannot list, the error is errors.ErrUnsupported.
func (c *Client) List(ctx context.Context, prefix string) iter.Seq2[Entry, error] {
	if err := c.checkNil("list", prefix); err != nil {
		return func(yield func(Entry, error) bool) { yield(Entry{}, err) }
	}
	return list(&c.store, ctx, prefix)
}

// Close ends every wait with ErrClosed, and every lease's context with cause ErrClosed. It stops
// renewing. Then it waits up to Options.Timeout for the holders to Unlock and for calls in flight.
// It frees no key whose holder may still run: the remaining holds expire, and Close returns an
// error that names their keys. Finally Close closes the driver, and waits up to a second for the
// calls that are still in flight. Then all goroutines of the Client have ended, except those in a
// call of the driver or of Observe that does not return. A second Close waits for the first.
func (c *Client) Close() error {
	if c.isNil() {
		return fmt.Errorf("hasp: close: %w", errNilClient)
	}
	c.mu.Lock()
	if c.closing.Err() != nil {
		c.mu.Unlock()
		<-c.closed
		return nil
	}

	// Lock mu once for both close and closeLocked, so that Close misses no hold: a caller that gets
	// a hold later finds that the Client is closing. The leases that end here can be unlocked.
	c.close(ErrClosed)
	c.changed.Broadcast()
	ended := c.renewer.closeLocked()
	c.mu.Unlock()
	for _, l := range ended {
		l.endContext(ErrClosed)
	}

	// Holders unlock while the reaper cleans up, so one Timeout is enough for both.
	end := time.Now().Add(c.opts.Timeout)
	c.settle(end, func() bool { return c.queue.Open == 0 })
	poke(c.renewer.wake) // the goroutines of both end if nothing is left to do
	poke(c.reaper.wake)
	c.settle(end, func() bool {
		// No call is in flight, and all callers that are left have holds. Set stopped here, with
		// mu held since the check, so that no call can begin after the check.
		c.stopped = c.calls == 0 && c.queue.Callers == c.queue.Open
		return c.stopped
	})
	c.mu.Lock()
	c.stopped = true
	c.mu.Unlock()

	// Close the driver, so that calls that are still in flight end. Give them a moment for it.
	err := joined(c.store.driver.Close(), notUnlocked(ended))
	c.settle(time.Now().Add(min(c.opts.Timeout, lastPatience)), func() bool { return c.calls == 0 })
	close(c.closed)
	return err
}

// notUnlocked returns an error that names the keys of those leases that were not unlocked after
// Close ended them, or nil if all leases were.
func notUnlocked(leases []*Lease) error {
	var keys []string
	for _, l := range leases {
		if l.state.Load() == closed {
			keys = append(keys, strconv.Quote(l.key))
		}
	}
	slices.Sort(keys)
	keys = slices.Compact(keys)

	if len(keys) == 0 {
		return nil
	}
	const mostNamed = 10
	if more := len(keys) - mostNamed; more > 0 {
		keys = append(keys[:mostNamed], fmt.Sprintf("and %d more", more))
	}
	return fmt.Errorf("hasp: close: leases were not unlocked, and end with their terms: %s",
		strings.Join(keys, ", "))
}

// lastPatience is how long Close waits for calls after it has closed the driver.
const lastPatience = time.Second
