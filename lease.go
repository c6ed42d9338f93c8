package hasp

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
)

// Lease is one caller's hold on a key. It ends by Unlock, or it is lost. It
// may be used by several goroutines, and unlocked by another than the one
// that locked it.
type Lease struct {
	c       *Client
	hold    *hold
	key     string
	parent  context.Context // Lock's
	around  *Lease          // the innermost lease whose context Lock was called with
	since   instant
	maxHold instant // deadline of WithMaxHold, or never
	state   atomic.Int32
	ctx     atomic.Pointer[leaseContext] // made when first asked for

	unlocking bool // Unlock's outcome is unknown; guarded by c.mu
	settled   bool // it has since turned out well, which nobody was told; guarded by c.mu
}

// States of a Lease. They only grow, but for closed, which may still become
// released.
const (
	held int32 = iota
	lost
	closed
	released
)

// Key returns the key as it was given to Lock.
func (l *Lease) Key() string { return l.key }

// Fence returns a number that is larger with every new hold of the key. Hand
// it to the resource that the lock protects, which refuses a smaller one than
// it has seen. It is 0 unless asked for with WithFence.
func (l *Lease) Fence() uint64 { return l.hold.fence }

// Expires returns until when the lease is trusted if no further renewal
// succeeds: the moment its context ends at the latest.
func (l *Lease) Expires() time.Time { return l.c.clock.time(l.end()) }

func (l *Lease) end() instant { return min(instant(l.hold.deadline.Load()), l.maxHold) }

// Err tells about the hold only: nil while it is trusted, ErrLost, ErrReleased
// after Unlock, ErrClosed after the Client's Close. It asks the clock, so a
// process that was stopped past its term hears of the loss at its first look.
func (l *Lease) Err() error {
	if l.state.Load() == held {
		if l.c.clock.now() < l.end() {
			return nil
		}
		l.c.expire(l.hold)
	}
	return l.cause()
}

// cause is why the lease has ended, or nil, without a look at the clock.
func (l *Lease) cause() error {
	switch l.state.Load() {
	case lost:
		return ErrLost
	case closed:
		return ErrClosed
	case released:
		return ErrReleased
	}
	return nil
}

// Unlock gives the key back, or this lease of it if others remain by re-entry,
// in at most one call to the store. It is not bound by the end of ctx, only
// by Options.Timeout.
//
// ErrLost says that the lease was lost before: others may have had the key
// meanwhile. ErrReleased says that Unlock had succeeded already. Any other
// error of the store means that the outcome is unknown: the lease has ended
// here and is not renewed, the release goes on in the background, and Unlock
// may be called again to learn of it.
func (l *Lease) Unlock(ctx context.Context) error {
	if err := l.unlock(ctx); err != nil {
		return &Error{"unlock", l.key, err}
	}
	return nil
}

func (l *Lease) unlock(ctx context.Context) error {
	c, h := l.c, l.hold
	l.Err() // an end that only the clock knows of
	c.mu.Lock()
	switch state := l.state.Load(); {
	case state == lost:
		lapsed := h.lapsed
		h.lapsed = false
		c.mu.Unlock()
		if lapsed {
			c.reap(h.claim, reapOnce)
		}
		return ErrLost
	case l.unlocking:
		c.mu.Unlock()
		return l.unlockAgain(ctx)
	case l.settled:
		l.settled = false
		c.mu.Unlock()
		return nil
	case state == released:
		c.mu.Unlock()
		return ErrReleased
	case c.gone || isClosed(c.closed):
		c.mu.Unlock()
		return ErrClosed
	}
	l.state.Store(released)
	i := slices.Index(h.leases, l)
	h.leases = slices.Delete(h.leases, i, i+1)
	last := len(h.leases) == 0
	passed := last && c.handOver(h)
	if last && !passed {
		c.unschedule(h)
	}
	c.mu.Unlock()
	l.cancel(ErrReleased)

	var err error
	if last && !passed {
		err = l.release(ctx)
	}
	kind := EventReleased
	if errors.Is(err, ErrLost) {
		kind = EventLost
	}
	c.ended(l, kind, err)
	return err
}

func isClosed(ch chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}

// release tells the store, and lets the next in line go when it has answered.
func (l *Lease) release(ctx context.Context) error {
	c, h := l.c, l.hold
	if c.traits.Reach != backend.Process {
		// The line does not wait for an answer longer than the term lasts: the
		// next one asks the store anyway.
		if left := instant(h.deadline.Load()).sub(c.clock.now()); left < c.opts.Timeout {
			timer := time.AfterFunc(left, func() {
				c.mu.Lock()
				defer c.mu.Unlock()
				c.forget(h)
			})
			defer timer.Stop()
		}
	}
	err := c.releaseOnce(ctx, h.claim)
	c.mu.Lock()
	c.forget(h)
	switch {
	case err == nil:
	case errors.Is(err, ErrLost):
		l.state.Store(lost)
	default:
		l.unlocking = true
	}
	unknown := l.unlocking
	c.mu.Unlock()
	if unknown {
		c.reapLease(l)
	}
	return err
}

func (c *Client) releaseOnce(ctx context.Context, cl backend.Claim) error {
	if c.traits.Reach == backend.Process {
		return c.driver.Release(context.WithoutCancel(ctx), cl)
	}
	return c.releaseApart(ctx, cl)
}

func (c *Client) releaseApart(ctx context.Context, cl backend.Claim) error {
	ctx = context.WithoutCancel(ctx)
	var err error
	if c.endsWith(ctx) {
		_, err = direct(ctx, c.opts.Timeout, func(within context.Context) (struct{}, error) {
			return struct{}{}, c.driver.Release(within, cl)
		})
	} else {
		_, err = call(c, ctx, c.opts.Timeout, func(apart context.Context) (struct{}, error) {
			return struct{}{}, c.driver.Release(apart, cl)
		}, nil)
	}
	return err
}

// unlockAgain repeats a release of unknown outcome.
func (l *Lease) unlockAgain(ctx context.Context) error {
	err := l.c.releaseOnce(ctx, l.hold.claim)
	if !l.settle(err) {
		return err
	}
	l.c.mu.Lock()
	l.settled = false
	l.c.mu.Unlock()
	return l.resultOfRepeat()
}

// settle takes the answer to a repeated release and reports whether the
// outcome is known now. "Not mine" to a repeat of ours means, before the
// deadline, that an earlier one was carried out.
func (l *Lease) settle(err error) bool {
	if err != nil && !errors.Is(err, ErrLost) {
		return false
	}
	now := l.c.clock.now()
	l.c.mu.Lock()
	defer l.c.mu.Unlock()
	if !l.unlocking {
		return true
	}
	l.unlocking = false
	if err == nil || now < instant(l.hold.deadline.Load()) {
		l.settled = true
	} else {
		l.state.Store(lost)
	}
	return true
}

func (l *Lease) resultOfRepeat() error {
	if l.state.Load() == lost {
		return ErrLost
	}
	return nil
}

// Extend makes the lease last at least ttl from now, in one call to the store.
// It never shortens it. Renewal goes on asking for the lease's own term. Less
// than 100 ms, or more than WithMaxHold allows, is ErrInvalid; ErrLost and
// ErrReleased are what they say; of any other error the outcome is unknown,
// and the lease lasts as long as it did at least.
func (l *Lease) Extend(ctx context.Context, ttl time.Duration) error {
	if err := l.extend(ctx, ttl); err != nil {
		return &Error{"extend", l.key, err}
	}
	return nil
}

func (l *Lease) extend(ctx context.Context, ttl time.Duration) error {
	c, h := l.c, l.hold
	if err := checkTTL(ttl); err != nil {
		return err
	}
	busy := make(chan struct{})
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := l.Err(); err != nil {
			return err
		}
		c.mu.Lock()
		if h.busy == nil {
			break
		}
		wait := h.busy
		c.mu.Unlock()
		select {
		case <-wait:
		case <-ctx.Done():
		}
	}
	defer c.mu.Unlock()
	if l.state.Load() != held {
		return l.cause()
	}
	now := c.clock.now()
	// An Extend that is not answered must leave time for renewals.
	bound := min(c.opts.Timeout, max(h.claim.TTL/triesPerT, l.end().sub(now)-h.claim.TTL/renewalsPerT))
	if now.add(ttl) > min(h.limit, l.maxHold) {
		return fmt.Errorf("%w: %v from now is past the lease's max hold", ErrInvalid, ttl)
	}
	cl := h.claim
	cl.TTL = termFor(ttl)
	h.busy, h.extended = busy, true
	c.schedule(h)
	c.mu.Unlock()
	_, err := call(c, ctx, bound, func(ctx context.Context) (struct{}, error) {
		return struct{}{}, c.renewNow(ctx, h, cl)
	}, nil)
	c.mu.Lock()
	if c.gone {
		h.idle()
	}
	if cause := l.cause(); cause != nil {
		return cause
	}
	return err
}

// Context returns the context of the hold. It ends with cause ErrLost when
// the lease is lost, at its deadline at the latest, whether or not the store
// can be reached; with cause ErrReleased on Unlock, ErrClosed on the Client's
// Close, and with Lock's context and its cause.
//
// Its Err asks the clock, as [Lease.Err] does. Contexts derived from it hear
// by timer.
func (l *Lease) Context() context.Context {
	if x := l.ctx.Load(); x != nil {
		return x
	}
	x := newLeaseContext(l)
	if !l.ctx.CompareAndSwap(nil, x) {
		x.cancel(nil)
		return l.ctx.Load()
	}
	// An end before the context was there found nothing to cancel.
	if err := l.Err(); err != nil {
		x.cancel(err)
	}
	return x
}

// cancel ends the lease's context, if anybody has asked for it. It is not
// called under c.mu, since it runs code of contexts that are not ours.
func (l *Lease) cancel(cause error) {
	if x := l.ctx.Load(); x != nil {
		x.cancel(cause)
	}
}
