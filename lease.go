package hasp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
)

// Lease is one caller's share of a hold. Callers that re-enter a key share the hold. A
// lease ends by Unlock or by the Client's Close, or it is lost. Several goroutines may
// use it, and any of them may unlock it.
type Lease struct {
	hold    *hold
	key     string                       // as the caller gave it
	slot    int                          // from 1; 0 without WithSlots
	id      uint64                       // of its events
	op      string                       // of its events
	parent  context.Context              // Lock's
	around  *Lease                       // the innermost lease in parent, or nil
	since   instant                      // when the caller got it
	maxHold instant                      // deadline of WithMaxHold, or never
	keep    instant                      // end of WithMinHold, or 0
	loss    *LostError                   // why it was lost; set before state is lost
	ctx     atomic.Pointer[leaseContext] // made by the first call of Context
	state   atomic.Int32                 // held or another of the states below; written under mu
	reentry bool                         // the caller had the hold already
	shared  bool                         // WithShared

	// These three are guarded by mu.
	untilUnlock bool // renewed until Unlock, also after Lock's context has ended; see renewUntilUnlock
	reported    bool // EventAcquired was reported
	stillHeld   bool // EventStillHeld was reported

	// parentDone is the Done channel of Lock's context, which the first renewal reads. Only
	// renewals use these two fields, one at a time.
	parentDoneRead bool
	parentDone     <-chan struct{}

	unseen *Event // the lease's end, if it came before EventAcquired was reported; guarded by mu
}

// States of a Lease. The first is held. The clock or an answer of the store makes it lost, and
// Close makes it closed. Unlock turns held and closed into releasing during its call to the store,
// and then into released, unknown or lost, or at once into released if it needs no call. A repeated
// Unlock turns unknown into released or lost.
const (
	held int32 = iota
	lost
	closed
	releasing
	unknown // the outcome of Unlock is unknown; Unlock may be repeated
	released
)

// Key returns the key as it was given to Lock.
func (l *Lease) Key() string { return l.key }

// Fence returns a number that grows with every new hold of the key. Send it with each write to the
// resource that the lock protects, and have the resource refuse a fence smaller than the largest it
// has seen. With shared leases, the resource keeps two such numbers: see WithShared. Fence returns
// 0 if the hold was taken without WithFence.
func (l *Lease) Fence() uint64 { return l.hold.fence }

// Slot returns which slot the lease holds, from 0 to n-1 for WithSlots(n). It returns 0
// for a lease without slots.
func (l *Lease) Slot() int { return max(l.slot-1, 0) }

// Expires returns when the lease ends if no further renewal succeeds. Its context
// ends then at the latest.
func (l *Lease) Expires() time.Time { return l.hold.c.clock.time(l.end()) }

// Err returns nil while the lease is held, ErrReleased after Unlock, and ErrClosed after the
// Client's Close. After its loss, Err returns a [*LostError], which matches ErrLost and gives the
// reason. Err reads the clock. So in a process that was stopped until after the term, the first
// call of Err reports the loss.
func (l *Lease) Err() error {
	l.expire()
	return l.cause()
}

// cause returns why the lease has ended, or nil. It does not read the clock.
func (l *Lease) cause() error {
	switch l.state.Load() {
	case lost:
		return l.loss
	case closed:
		return ErrClosed
	case releasing, unknown, released:
		return ErrReleased
	}
	return nil
}

// expire ends the leases of the hold whose time is over by the clock. The caller must not hold mu.
func (l *Lease) expire() {
	c, h := l.hold.c, l.hold
	now, _ := c.clock.read()
	if l.state.Load() != held || now < l.end() {
		return
	}

	c.mu.Lock()
	var gone []*Lease
	// Check again: the hold may have ended meanwhile, or a renewal may have moved its deadline.
	if h.index >= 0 {
		gone = h.endExpiredLocked(now)
	}
	c.mu.Unlock()
	for _, l := range gone {
		l.endContext(l.loss) // not under mu
	}
}

func (l *Lease) end() instant { return min(instant(l.hold.deadline.Load()), l.maxHold) }

// Context returns the context of the lease, a child of Lock's context. When the lease is lost, the
// context ends with a [*LostError] as its cause: at the lease's deadline at the latest, whether or
// not the store can be reached. Unlock ends it with cause ErrReleased, and the Client's Close with
// cause ErrClosed. When Lock's context ends, this context ends with the same cause.
//
// If Lock's context was that of another lease, the end of the other lease ends this context too,
// with the other's cause. [Lease.Err] says whether this lease itself has ended.
//
// The context's Err and Done read the clock, as [Lease.Err] does. Contexts derived from it do not:
// they end when a timer fires, which may be late.
func (l *Lease) Context() context.Context { return l.context(nil) }

// context returns the context of l. If it is a new one, and joint is not nil, its end calls joint as
// well.
func (l *Lease) context(joint context.CancelCauseFunc) *leaseContext {
	if x := l.ctx.Load(); x != nil {
		return x
	}

	// If two first calls meet here, one context wins, and the other is discarded.
	x := newLeaseContext(l.parent, l, l)
	if cancel := x.cancel; joint != nil {
		x.cancel = func(cause error) { cancel(cause); joint(cause) }
	}
	if !l.ctx.CompareAndSwap(nil, x) {
		x.cancel(nil)
		return l.ctx.Load()
	}

	// Cancel the context if the lease has ended before l.ctx was set.
	if err := l.Err(); err != nil {
		x.cancel(err)
	}
	return x
}

// renewUntilUnlock makes renewals go on until Unlock, also after the end of Lock's
// context. WithoutRenewal and WithMaxHold keep their effect.
func (l *Lease) renewUntilUnlock() {
	c, h := l.hold.c, l.hold
	c.mu.Lock()
	defer c.mu.Unlock()
	l.untilUnlock = true

	// Renewal may have stopped by now, because the contexts of all Locks have ended while the
	// process was stopped.
	if l.state.Load() == held && h.index >= 0 && h.resumeRenewalLocked(c.clock.now()) {
		c.renewer.scheduleLocked(h)
	}
}

// countMinHold makes l's min hold count, if l has one. Lock or LockAll calls it last, because an
// Unlock before the caller has done anything must not keep the key taken.
func (l *Lease) countMinHold() {
	l.hold.c.mu.Lock()
	defer l.hold.c.mu.Unlock()
	l.hold.keep = max(l.hold.keep, l.keep)
}

// Unlock ends the lease. If it is the last lease of its hold, Unlock releases the key, in at most
// one call to the store. The end of ctx does not interrupt that call; Options.Timeout bounds it.
//
// ErrLost, which is a [*LostError] with the reason, means that the lease was lost before: another
// caller may have held the key since. ErrReleased means that Unlock has succeeded before. After
// ErrUnavailable the outcome is unknown: the lease has ended and is no longer renewed, and the
// Client repeats the release in the background. Call Unlock again, before the term ends, to learn
// the outcome. ErrClosed means that Close had stopped waiting for the holder: the key is free when
// its term ends, at the latest.
func (l *Lease) Unlock(ctx context.Context) error {
	ends, err := l.unlock(ctx)
	if ends && l.hold.c.opts.Observe != nil {
		l.hold.c.observer.unlocked(ctx, l, err)
	}
	return newError("unlock", l.key, err)
}

// unlock returns the error of Unlock. Ends reports whether this call has ended a lease whose end no
// event has reported yet.
func (l *Lease) unlock(ctx context.Context) (ends bool, err error) {
	l.expire()
	was, err := l.beginUnlock()
	switch {
	case err != nil:
		return false, err
	case was == unknown:
		return false, l.unlockAgain(ctx)
	}

	// Cancel the context without mu, because that runs code of users.
	if x := l.ctx.Load(); x != nil {
		x.cancel(ErrReleased)
	}
	if l.state.Load() == releasing { // only this call ends that state
		err = l.release(ctx)
	}
	return was == held, err // if Close ended the lease, an event has reported that
}

// beginUnlock ends the lease, if it is held or was ended by Close, and returns its state before. If
// the lease is then releasing, or was unknown before, the caller must call the store's release, and
// Close waits for that. If beginUnlock returns an error, Unlock must return that error.
func (l *Lease) beginUnlock() (was int32, err error) {
	c, h := l.hold.c, l.hold
	c.mu.Lock()
	defer c.mu.Unlock()
	for l.state.Load() == releasing {
		c.changed.Wait() // for at most the other Unlock's call, which Timeout bounds
	}

	switch was = l.state.Load(); {
	case was == lost:
		if h.lapsed {
			// Release the hold, which the store may keep until the term ends by its clock.
			h.lapsed = false
			c.reaper.addHoldLocked(h, h.keep, 0)
		}
		return was, l.loss
	case was == released:
		return was, ErrReleased
	case c.stopped:
		return was, ErrClosed
	case was == unknown:
		c.calls++
		return was, nil
	}

	// End this lease first: the next caller in line, whose context may derive from this lease's,
	// runs at once after a hand-over.
	l.state.Store(released)
	i := slices.Index(h.leases, l)
	h.leases = slices.Delete(h.leases, i, i+1)
	if len(h.leases) > 0 || h.line.first() != nil && h.handOverLocked() || h.lingerLocked(l.key) {
		return was, nil
	}
	c.renewer.unscheduleLocked(h) // a renewal must not follow the release
	l.state.Store(releasing)
	c.calls++
	return was, nil
}

// release releases the key in the store, and then promotes the next caller in line.
func (l *Lease) release(ctx context.Context) error {
	c, h := l.hold.c, l.hold
	err := c.store.release(ctx, h.claim, h.keep)

	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls--
	c.changed.Broadcast()
	l.state.Store(released)
	h.failed = 0
	if err != nil && !errors.Is(err, ErrLost) {
		l.state.Store(unknown)
		h.failed = 1 // set before the next caller is promoted, because the store may hang
	}
	h.line.endedLocked(h)

	switch l.state.Load() {
	case unknown:
		c.reaper.addHoldLocked(h, h.keep, 1) // the reaper repeats the release
	case released:
		if err != nil {
			err = l.loseLocked(&LostError{Reason: LostRevoked})
		}
	}
	return err
}

// unlockAgain repeats a release whose outcome is unknown.
func (l *Lease) unlockAgain(ctx context.Context) error {
	c, h := l.hold.c, l.hold
	defer c.leave() // beginUnlock has counted the call
	err := c.store.release(ctx, h.claim, h.keep)
	switch {
	case err == nil || errors.Is(err, ErrLost):
	case isClosed(c.closed):
		return ErrClosed // the driver was closed during the call
	default:
		return err
	}

	now, _ := c.clock.read() // the machine may have slept past the term
	c.mu.Lock()
	defer c.mu.Unlock()
	if l.state.Load() != unknown {
		return l.cause() // another repeat at the same time was first
	}
	l.state.Store(released)
	if err == nil || now < instant(h.deadline.Load()) {
		// Before the deadline the term cannot have run out, so after ErrLost an earlier release has
		// probably reached the store. A Break looks the same.
		return nil
	}
	return l.loseLocked(&LostError{Reason: LostUnanswered}) // the term has ended meanwhile
}

// Extend makes the lease last for at least ttl from now, in one call to the store, and never
// shortens it. Renewals still ask for the lease's own term. A ttl below 100 ms, or one that
// WithMaxHold or the store does not allow, is ErrInvalid. If the lease has ended, the error is
// ErrLost, ErrReleased or ErrClosed. After ErrUnavailable or an error of ctx the outcome is
// unknown, and the lease lasts at least as long as before.
func (l *Lease) Extend(ctx context.Context, ttl time.Duration) error {
	return newError("extend", l.key, l.extend(ctx, ttl))
}

func (l *Lease) extend(ctx context.Context, ttl time.Duration) error {
	if err := checkTTL(ttl); err != nil {
		return err
	}
	c, h := l.hold.c, l.hold
	start := c.clock.now()
	cl, bound, err := l.beginExtend(ctx, ttl)
	if err != nil {
		return err
	}

	if err = c.enter(); err == nil {
		_, err = call(&c.store, ctx, bound, func(ctx context.Context) (struct{}, error) {
			return struct{}{}, c.renewer.extend(ctx, h, cl, bound)
		}, nil)
		c.leave()
	}

	c.mu.Lock()
	if c.stopped {
		h.callEndedLocked() // Close waits no longer, so the call may not have begun
	}
	c.mu.Unlock()

	// Report a term that is too short: a store without space may renew the hold only for its
	// present term.
	if err == nil && l.end() < start.add(ttl-backend.Drift(ttl)) {
		err = &backend.UnavailableError{Err: errors.New("the store has granted a shorter term")}
	}

	// Read the clock, because the answer may have come after the lease's end.
	return cmp.Or(l.Err(), err)
}

// beginExtend waits for the end of a renewal in flight, and then marks the hold as busy. It returns
// the claim to renew, and how long the call may last.
func (l *Lease) beginExtend(ctx context.Context, ttl time.Duration) (backend.Claim, time.Duration, error) {
	for {
		if err := cmp.Or(ctx.Err(), l.Err()); err != nil {
			return backend.Claim{}, 0, err
		}
		cl, bound, inFlight, err := l.tryExtend(ttl)
		if inFlight == nil {
			return cl, bound, err
		}
		select {
		case <-inFlight:
		case <-ctx.Done():
		}
	}
}

// tryExtend is beginExtend, unless a renewal is in flight. Then it returns a channel that is
// closed when the renewal ends.
func (l *Lease) tryExtend(ttl time.Duration) (cl backend.Claim, bound time.Duration, inFlight <-chan struct{}, err error) {
	c, h := l.hold.c, l.hold
	c.mu.Lock()
	defer c.mu.Unlock()
	if h.busy != nil {
		return cl, 0, h.busy, nil
	}
	if l.state.Load() != held {
		return cl, 0, nil, l.cause() // it ended after Err had returned
	}
	now := c.clock.now()
	if now.add(ttl) > min(h.limit, l.maxHold) {
		return cl, 0, nil, fmt.Errorf("%w: %v from now is past the lease's max hold", ErrInvalid, ttl)
	}
	cl = h.claim
	cl.TTL = termFor(ttl)
	if err := checkLongest(c.traits, cl.TTL); err != nil {
		// Refuse it here, because a refusal of the store would count as a failed renewal.
		return cl, 0, nil, err
	}

	// Bound the call, so that an Extend without an answer leaves time for renewals.
	term := h.termLocked()
	bound = min(c.opts.Timeout, max(term/triesPerT, l.end().sub(now)-term/renewalsPerT))
	h.busy, h.extended = make(chan struct{}), true
	h.kept = max(h.kept, now.add(cl.TTL))
	c.renewer.scheduleLocked(h)
	return cl, bound, nil, nil
}
