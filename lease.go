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

// Lease is one caller's hold of a key. It ends by Unlock, or it is lost. Several
// goroutines may use it, and any of them may unlock it.
type Lease struct {
	c       *Client
	hold    *hold
	key     string
	parent  context.Context              // Lock's
	around  *Lease                       // the innermost lease whose context Lock was called with
	depth   int                          // how many leases are around it
	jump    *Lease                       // one of these, or itself if there is none: see nest
	since   instant                      // when the caller got it
	maxHold instant                      // deadline of WithMaxHold, or never
	state   atomic.Int32                 // held, lost, closed or released
	ctx     atomic.Pointer[leaseContext] // made by the first call of Context

	// ended is the Done channel of Lock's context. The first renewal reads it and
	// sets asked.
	asked bool
	ended <-chan struct{}

	observed bool   // EventAcquired has been reported; guarded by c.mu
	unseen   *Event // the lease's end, if it came before EventAcquired; guarded by c.mu

	asking    bool          // an Unlock is in flight; guarded by c.mu
	answered  chan struct{} // closed when asking ends, if another Unlock waits for that; guarded by c.mu
	unlocking bool          // Unlock's outcome is unknown; guarded by c.mu
	settled   bool          // a repeat has released it since, and the next Unlock returns nil; guarded by c.mu
}

// States of a Lease. A held lease changes its state once. Only a closed one may
// still become released.
const (
	held int32 = iota
	lost
	closed
	released
)

// Key returns the key as it was given to Lock.
func (l *Lease) Key() string { return l.key }

// Fence returns a number that grows with every new hold of the key. Send it with
// each write to the resource that the lock protects, and have the resource refuse a
// fence smaller than the largest it has seen. It is 0 without WithFence.
func (l *Lease) Fence() uint64 { return l.hold.fence }

// Expires returns when the lease ends if no further renewal succeeds. Its context
// ends then at the latest.
func (l *Lease) Expires() time.Time { return l.c.clock.time(l.end()) }

func (l *Lease) end() instant { return min(instant(l.hold.deadline.Load()), l.maxHold) }

// Err returns nil while the lease is held, ErrLost after its loss, ErrReleased after
// Unlock, and ErrClosed after the Client's Close. It reads the clock. So a process
// that was stopped until after the end of its term gets ErrLost from its first call.
func (l *Lease) Err() error {
	if l.state.Load() == held {
		if now, _ := l.c.look(); now < l.end() {
			return nil
		}
		l.c.expire(l.hold)
	}
	return l.cause()
}

// nest places l inside l.around. The leases around one may be thousands, by
// LockAll. So each has a second pointer outwards, some of which skip many
// leases: a skip list, of which the first pointers alone would be a list.
// See https://doi.org/10.1016/0020-0190(83)90106-0 (Myers).
func (l *Lease) nest() {
	l.jump = l
	if a := l.around; a != nil {
		l.depth, l.jump = a.depth+1, a
		if j := a.jump; a.depth-j.depth == j.depth-j.jump.depth {
			l.jump = j.jump
		}
	}
}

// isAround reports whether inner is l or nested in it.
func (l *Lease) isAround(inner *Lease) bool {
	for inner.depth > l.depth {
		if inner.jump.depth >= l.depth {
			inner = inner.jump
		} else {
			inner = inner.around
		}
	}
	return inner == l
}

// cause returns why the lease has ended, or nil. It does not read the clock.
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

// Unlock ends the lease. If it is the last lease of its hold, Unlock releases the
// key, in at most one call to the store. The end of ctx does not interrupt that
// call; Options.Timeout bounds it.
//
// ErrLost means that the lease was lost before: another caller may have held the
// key since. ErrReleased means that Unlock has succeeded before. After any other
// error of the store the outcome is unknown: the lease has ended and is no longer
// renewed, and the Client repeats the release in the background. Call Unlock again
// to learn the outcome.
func (l *Lease) Unlock(ctx context.Context) error {
	ends, err := l.unlock(ctx)
	switch {
	case ends && errors.Is(err, ErrLost):
		l.c.observeEnd(l, EventLost, err)
	case ends:
		l.c.observeEnd(l, EventReleased, err)
	}
	if err != nil {
		return &Error{"unlock", l.key, err}
	}
	return nil
}

// unlock returns its error, and reports in ends whether it has ended a lease
// whose end no event has reported yet.
func (l *Lease) unlock(ctx context.Context) (ends bool, err error) {
	c, h := l.c, l.hold
	l.Err() // ends the lease if its deadline has passed
	c.mu.Lock()
	l.awaitAnswerLocked()
	state := l.state.Load()
	switch {
	case state == lost:
		lapsed := h.lapsed
		h.lapsed = false
		if lapsed {
			c.reapHold(h)
		}
		c.mu.Unlock()
		return false, ErrLost
	case l.settled:
		l.settled = false
		c.mu.Unlock()
		return false, nil
	case state == released && !l.unlocking:
		c.mu.Unlock()
		return false, ErrReleased
	case c.gone:
		c.mu.Unlock()
		return false, ErrClosed
	case l.unlocking:
		c.mu.Unlock()
		return false, l.unlockAgain(ctx)
	}

	l.state.Store(released)
	i := slices.Index(h.leases, l)
	h.leases = slices.Delete(h.leases, i, i+1)
	last := len(h.leases) == 0
	passed := last && c.handOver(h)
	if last && !passed {
		c.unschedule(h)
		l.asking = true
	}
	c.mu.Unlock()
	l.cancel(ErrReleased)

	if last && !passed {
		err = l.release(ctx)
	}
	return state == held, err // if Close ended the lease, an event has reported that
}

// awaitAnswerLocked blocks while another Unlock of l is in flight. The caller
// holds c.mu; awaitAnswerLocked releases it while it waits.
func (l *Lease) awaitAnswerLocked() {
	for l.asking {
		if l.answered == nil {
			l.answered = make(chan struct{})
		}
		answered := l.answered
		l.c.mu.Unlock()
		<-answered // within Timeout, which bounds the release
		l.c.mu.Lock()
	}
}

// answeredLocked wakes the calls that wait for l's Unlock. The caller holds
// c.mu.
func (l *Lease) answeredLocked() {
	l.asking = false
	if l.answered != nil {
		close(l.answered)
		l.answered = nil
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

// release releases the key in the store, and then lets the next caller in line go.
func (l *Lease) release(ctx context.Context) error {
	c, h := l.c, l.hold
	if c.traits.Reach != backend.Process {
		// The line waits for the answer until the term ends, and no longer: the next
		// caller asks the store anyway.
		if left := instant(h.deadline.Load()).sub(c.clock.now()); left < c.opts.Timeout {
			timer := time.AfterFunc(left, func() {
				c.mu.Lock()
				defer c.mu.Unlock()
				c.leaveHead(h)
			})
			defer timer.Stop()
		}
	}
	err := c.releaseOnce(ctx, h.claim)
	c.mu.Lock()
	c.leaveHead(h)
	l.answeredLocked()
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
		_, err = direct(ctx, nil, c.opts.Timeout, func(within context.Context) (struct{}, error) {
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
		if isClosed(l.c.closed) {
			return ErrClosed // the driver was closed under the call
		}
		return err
	}
	l.c.mu.Lock()
	l.settled = false
	l.c.mu.Unlock()
	return l.resultOfRepeat()
}

// settle notes the answer to a repeated release, and reports whether the outcome is
// known now. If the store no longer has the hold before its deadline, an earlier
// release has reached the store.
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

// Extend makes the lease last for at least ttl from now, in one call to the store.
// It never shortens the lease. Renewals still ask for the lease's own term. A ttl
// below 100 ms, or one that WithMaxHold or the store does not allow, is ErrInvalid.
// If the lease has ended, the error is ErrLost or ErrReleased. After any other error
// the outcome is unknown, and the lease lasts at least as long as before.
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
	if err := c.checkLongest(cl.TTL); err != nil {
		return err // before the store is asked, because a refusal there is a renewal that failed
	}
	h.busy, h.extended = busy, true
	h.kept = max(h.kept, now.add(cl.TTL))
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

// Context returns the context of the lease, a child of Lock's context. When the
// lease is lost, the context ends with cause ErrLost: at the lease's deadline at
// the latest, whether or not the store can be reached. Unlock ends it with cause
// ErrReleased, and the Client's Close with cause ErrClosed. When Lock's context
// ends, this context ends with the same cause.
//
// If Lock's context was the context of another lease, the end of the other
// lease also ends this context, with the other's cause. To distinguish an abort
// from an Unlock, call [Lease.Err]; the cause does not show it.
//
// Its Err reads the clock, as [Lease.Err] does. Contexts derived from it end by
// a timer.
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

// cancel ends the lease's context, if there is one. The caller does not hold c.mu,
// because the end of a context runs code of its users.
func (l *Lease) cancel(cause error) {
	if x := l.ctx.Load(); x != nil {
		x.cancel(cause)
	}
}
