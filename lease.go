package hasp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/calls"
	"github.com/hasplock/hasp/internal/clock"
)

// Lease is one caller's share of a hold. Callers that re-enter a key share the hold. A lease ends
// by Unlock, Detach or the Client's Close, or it is lost. Several goroutines may use it, and any of
// them may unlock it.
type Lease struct {
	hold    *hold
	key     string          // the key as the caller gave it
	ttl     time.Duration   // the term that it asks renewals for
	id      uint64          // ID of its events
	op      string          // Op of its events
	parent  context.Context // Lock's context
	around  *Lease          // the innermost lease in the context of Lock's caller, or nil
	since   clock.Instant   // when the caller got the lease
	maxHold clock.Instant   // deadline of WithMaxHold, or Never
	keep    clock.Instant   // end of WithMinHold, or 0
	loss    *LostError      // why it was lost; set before state becomes lost

	ctx     atomic.Pointer[leaseContext] // created by the first call of Context
	state   atomic.Int32                 // one of the states below; written under mu
	slot    int32                        // number of its slot, from 1; 0 without WithSlots
	reentry bool                         // the lease joined a hold that its caller had

	// These three are guarded by mu:

	untilUnlock bool // renewed also after Lock's context has ended; see renewUntilUnlock
	reported    bool // EventAcquired was reported
	stillHeld   bool // EventStillHeld was reported

	// parentDone is the Done channel of Lock's context. The first renewal sets these two fields.
	// Only renewals use them, and no two renewals of a lease run at the same time.
	parentDoneRead bool
	parentDone     <-chan struct{}

	// unseen is the event of the lease's end, if the lease ended before EventAcquired was reported.
	// It is guarded by mu.
	unseen *Event
}

// States of a Lease. A lease begins as held. The clock or an answer of the store makes it lost, and
// Close makes it closed. An Unlock that calls the store makes it releasing during the call, and
// released, unknown or lost after the call. Any other Unlock makes it released immediately. A
// repeated Unlock turns unknown into released or lost.
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
// resource that the lock protects. Let the resource refuse a fence that is smaller than the largest
// it has seen; package fence provides guards that do so. With shared leases, the resource keeps two
// such numbers: see WithShared. Fence returns 0 if the hold was taken without WithFence.
func (l *Lease) Fence() uint64 { return l.hold.fence }

// Shared reports whether the lease is shared: other leases may hold the key at the same time. A
// lease WithShared that joined the exclusive hold of an outer lease is not shared.
func (l *Lease) Shared() bool { return l.hold.claim.Shared }

// Slot returns which slot the lease holds, from 0 to n-1 for WithSlots(n). It returns 0 for a lease
// without slots.
func (l *Lease) Slot() int { return max(int(l.slot)-1, 0) }

// Expires returns the time at which the lease ends if no further renewal succeeds. The lease's
// context ends at that time at the latest.
func (l *Lease) Expires() time.Time { return l.hold.renewer.clock.Time(l.end()) }

// Err returns nil while the lease is held, ErrReleased after Unlock or Detach, and ErrClosed after
// the Client's Close. After its loss, Err returns a [*LostError], which matches ErrLost and gives
// the reason. Err reads the clock. So if the process was stopped until after the term, the first
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

// expire reads the clock. If l's time has passed, it ends each lease of l's hold whose time has
// passed. The caller must not hold mu.
func (l *Lease) expire() {
	h := l.hold
	r := h.renewer
	now, _ := r.clock.Read()
	if l.state.Load() != held || now < l.end() {
		return
	}

	// The hold may have ended meanwhile, and then its index is -1. Or a renewal may have moved its
	// deadline, and then endExpiredLocked ends no lease.
	var ended []*Lease
	r.mu.Lock()
	if h.index >= 0 {
		ended = h.endExpiredLocked(now)
	}
	r.mu.Unlock()

	for _, l := range ended {
		l.endContext(l.loss) // without mu, because this runs users' code
	}
}

func (l *Lease) end() clock.Instant { return min(l.hold.Deadline(), l.maxHold) }

// loseLocked marks l as lost, with the error why as the reason, and returns that error.
func (l *Lease) loseLocked(why *LostError) error {
	l.loss = why // set before state, because cause reads both without mu
	l.state.Store(lost)
	return why
}

// endContext ends the context of a lease that has ended, and queues its event for the observer. The
// caller must not hold mu, because the end of a context runs code of its users.
func (l *Lease) endContext(cause error) {
	if x := l.ctx.Load(); x != nil {
		x.cancel(cause)
	}
	if r := l.hold.renewer; r.opts.Observe != nil {
		r.observer.lost(l, cause)
	}
}

// Context returns the context of the lease, a child of Lock's context. When the lease is lost, the
// context ends with a [*LostError] as its cause. It ends at the lease's deadline at the latest,
// whether or not the store can be reached. Unlock ends it with cause ErrReleased, and the Client's
// Close with cause ErrClosed. When Lock's context ends, this context ends with the same cause.
//
// If Lock's context was derived from the context of another lease, the end of that lease ends this
// context too, with the same cause. [Lease.Err] says whether this lease itself has ended.
//
// The context's Err and Done read the clock, as [Lease.Err] does. Contexts derived from this
// context do not read the clock: they end when a timer fires, which may be late.
func (l *Lease) Context() context.Context { return l.context() }

// context does what Context does.
func (l *Lease) context() *leaseContext {
	if x := l.ctx.Load(); x != nil {
		return x
	}

	// If two goroutines make the first call at the same time, one of their contexts is discarded.
	x := newLeaseContext(l.parent, l, l)
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

// abandoned reports whether Lock's context has ended. Only the batch that renews the hold calls it,
// so no two calls for one lease run at the same time. The caller must not hold mu.
//
// It calls the context's Done only once, and never its Err, because the context may be of any type,
// and slow methods would delay the other renewals of the batch.
func (l *Lease) abandoned() bool {
	if !l.parentDoneRead {
		l.parentDoneRead = true
		l.parentDone = l.parent.Done()
	}
	return isClosed(l.parentDone)
}

// renewUntilUnlock lets renewals go on until Unlock, also after the end of Lock's context.
// WithoutRenewal and WithMaxHold keep their effect.
func (l *Lease) renewUntilUnlock() {
	r := l.hold.renewer
	r.mu.Lock()
	defer r.mu.Unlock()
	l.untilUnlock = true
}

// countMinHold lets l's min hold take effect, if l has one. Lock or LockAll calls it at the end,
// because a call that fails unlocks the lease, and must not leave the key taken.
func (l *Lease) countMinHold() {
	h := l.hold
	r := h.renewer
	r.mu.Lock()
	defer r.mu.Unlock()
	h.keep = max(h.keep, l.keep)
}

// event returns an event of l, with the fields that all events of l have.
func (l *Lease) event(kind EventKind, err error) Event {
	return Event{
		Kind:    kind,
		ID:      l.id,
		Op:      l.op,
		Key:     l.key,
		Shared:  l.Shared(),
		Reentry: l.reentry,
		Fence:   l.hold.fence,
		Err:     err,
	}
}

// join adds a lease to the hold of outer, and returns that lease. If outer has just ended, join
// returns errNoneAround.
func (outer *Lease) join(ctx context.Context, r *request) (*Lease, error) {
	h := outer.hold
	rn := h.renewer
	if h.claim.Shared && !r.shared {
		return nil, fmt.Errorf("%w: the outer lease of the key is shared, "+
			"and cannot become exclusive; unlock it first", ErrInvalid)
	}
	if r.fenced && !h.claim.Fenced {
		return nil, fmt.Errorf("%w: the outer lease has no fence; "+
			"pass WithFence to its Lock as well", ErrInvalid)
	}
	if err := checkLongest(rn.traits, r.ttl); err != nil {
		// Refuse the term here. Otherwise the store would refuse renewals for it, and both leases
		// would be lost.
		return nil, err
	}

	rn.mu.Lock()
	defer rn.mu.Unlock()
	if outer.state.Load() != held {
		return nil, errNoneAround
	}

	now := rn.clock.Now()

	// If the new lease has a longer term, a renewal asks for it immediately. Until the store has
	// answered, the shorter term counts. If the hold is not renewed, it keeps the shorter term.
	if r.ttl > h.claim.TTL {
		h.claim.TTL = r.ttl
		h.raised = now
		h.planLocked(now, now)
	}

	r.slot = int(outer.slot)
	l := h.addLeaseLocked(ctx, r, now)
	l.reentry = true
	h.resumeRenewalLocked(now) // the new lease's context has not ended
	rn.scheduleLocked(h)
	return l, nil
}

// Unlock ends the lease. If it is the last lease of its hold, Unlock releases the key, in at most
// one call to the store. The end of ctx does not interrupt that call; Options.Timeout bounds it.
//
// ErrLost, which is a [*LostError] with the reason, means that the lease was lost before the call,
// so another caller may have held the key since. ErrReleased means that an earlier Unlock or Detach
// has succeeded. After ErrUnavailable it is unknown whether the key is free. The lease has ended
// and is no longer renewed, and the Client repeats the release in the background until Close. Call
// Unlock again, before the term ends, to learn the outcome. ErrClosed means that Close had stopped
// waiting for the holder: the key is free when its term ends, at the latest.
func (l *Lease) Unlock(ctx context.Context) error {
	switch {
	case l == nil:
		return errNilLease
	case ctx == nil:
		return newError("unlock", l.key, errNilContext)
	}

	ends, err := l.unlock(ctx)
	if o := l.hold.renewer.observer; ends && o.opts.Observe != nil {
		o.unlocked(ctx, l, err)
	}
	return newError("unlock", l.key, err)
}

// unlock does what Unlock does, but reports no event. The result ends is true if this call has
// ended a lease that was held. Then the caller must report the end. Otherwise the end was reported
// before.
func (l *Lease) unlock(ctx context.Context) (ends bool, err error) {
	l.expire()
	h := l.hold
	r := h.renewer
	before, err := l.beginUnlock()
	switch {
	case err != nil:
		return false, err
	case before == unknown:
		return false, l.unlockAgain(ctx)
	}

	mustRelease := l.state.Load() == releasing // only this call changes that state
	if mustRelease {
		// endRelease turns the outcome of the release into the error of Unlock. The outcome is
		// errNoReturn if the driver, or the function of the context, panics.
		sent := r.clock.Awake()
		err = errNoReturn
		defer func() { err = l.endRelease(sent, err) }()
	}

	// Cancel the context without mu, because a cancel runs users' code.
	if x := l.ctx.Load(); x != nil {
		x.cancel(ErrReleased)
	}
	if mustRelease {
		err = r.release(ctx, h.claim, h.keep)
	}
	ends = before == held // otherwise Close has ended the lease, and has reported that
	return ends, err
}

// beginUnlock ends the lease, if it is held or was ended by Close. It returns the state before the
// call. The state after the call says what is left to do: if it is releasing or unknown, the caller
// must call the store's release, and Close waits for that call. If it is released, nothing is left
// to do, because other leases share the hold, or the Client keeps it for its next caller. If
// beginUnlock returns an error, Unlock must return that error.
func (l *Lease) beginUnlock() (before int32, err error) {
	h := l.hold
	r := h.renewer
	r.mu.Lock()
	defer r.mu.Unlock()
	for l.state.Load() == releasing {
		r.changed.Wait() // until the other Unlock's call has ended, which Timeout bounds
	}

	before = l.state.Load()
	switch {
	case before == lost:
		if h.lapsed {
			// Release the token, because by the store's clock the hold may not have ended yet.
			h.lapsed = false
			h.reapLocked(&reap{keep: h.keep})
		}
		return before, l.loss
	case before == released:
		return before, ErrReleased
	case r.stopped: // the driver is closed, or will be soon
		return before, ErrClosed
	case before == unknown:
		r.calls++ // unlockAgain ends this call
		return before, nil
	}

	i := slices.Index(h.leases, l)
	if i < 0 {
		return before, fmt.Errorf("%w: this Lease is a copy: unlock the one that Lock returned",
			ErrInvalid)
	}

	// End this lease before a hand-over, because the next caller runs immediately after that, and
	// its context may be derived from this lease's.
	l.state.Store(released)
	h.dropLocked(i)
	if len(h.leases) > 0 || h.passLocked(l.key) {
		return before, nil
	}

	r.unscheduleLocked(h) // a renewal must not follow the release
	l.state.Store(releasing)
	r.calls++ // endRelease ends this call
	return before, nil
}

// endRelease records the outcome err of the release, and returns the error of Unlock. The argument
// sent is when the release began, as Clock.Awake gives it.
func (l *Lease) endRelease(sent clock.Instant, err error) error {
	h := l.hold
	r := h.renewer
	now, _ := r.clock.Read()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.calls--
	r.changed.Broadcast()
	h.Failed = 0 // the store has answered, unless the last case below says otherwise

	switch {
	case err == nil:
		l.state.Store(released)
		delete(r.resumed, h.claim.Token)
	case errors.Is(err, ErrLost) && now < h.Deadline():
		// The term has not ended, so the hold was broken, or the store lost its data.
		err = l.loseLocked(&LostError{Reason: LostRevoked})
	case errors.Is(err, ErrLost):
		err = l.loseLocked(h.lapseLocked()) // the term has ended during the call
	default:
		l.state.Store(unknown)
		h.Failed = 1 // the store may hang; set this before endedLocked, which reads it
		if !r.traits.Ordered {
			// Callers of this Client wait in a line. The next one must know how long the outage has
			// lasted, because that bounds its wait.
			h.line.Answered(err, sent)
		}
		h.reapLocked(&reap{keep: h.keep, failed: 1}) // the reaper repeats the release
	}

	r.unreserveLocked(h)
	h.endedLocked()
	return err
}

// unlockAgain repeats the release of an Unlock whose outcome is unknown, and returns the error of
// this Unlock. If the outcome is known now, it also sets the state.
func (l *Lease) unlockAgain(ctx context.Context) error {
	h := l.hold
	r := h.renewer
	defer r.leave() // beginUnlock has counted the call
	err := r.release(ctx, h.claim, h.keep)
	switch {
	case err == nil || errors.Is(err, ErrLost):
		// The store does not have the token any more.
	case isClosed(r.closed):
		return ErrClosed // the driver was closed during the call
	default:
		return err
	}

	now, _ := r.clock.Read() // because the machine may have slept past the term
	r.mu.Lock()
	defer r.mu.Unlock()
	if l.state.Load() != unknown {
		return l.cause() // another call of Unlock has repeated the release meanwhile
	}

	l.state.Store(released)
	if err == nil || now < h.Deadline() {
		// The term cannot have run out before the deadline. So ErrLost probably means that an
		// earlier release has reached the store, or that the key was broken.
		return nil
	}
	return l.loseLocked(&LostError{Reason: LostUnanswered}) // the term has ended meanwhile
}

// Extend makes the lease last for at least ttl from now, in one call to the store, and never
// shortens it. Later renewals still ask for the lease's own term. A ttl below 100 ms, or one that
// WithMaxHold or the store does not allow, is ErrInvalid. If the lease has ended, the error is
// ErrLost, ErrReleased or ErrClosed. After ErrUnavailable or an error of ctx the outcome is
// unknown, and the lease lasts at least as long as before.
func (l *Lease) Extend(ctx context.Context, ttl time.Duration) error {
	if l == nil {
		return errNilLease
	}
	return newError("extend", l.key, l.extend(ctx, ttl))
}

// extend does what Extend does. Detach calls it as well.
func (l *Lease) extend(ctx context.Context, ttl time.Duration) error {
	if ctx == nil {
		return errNilContext
	}
	if err := checkTTL(ttl); err != nil {
		return err
	}
	r := l.hold.renewer
	start := r.clock.Now()
	cl, bound, err := l.beginExtend(ctx, ttl)
	if err != nil {
		return err
	}
	err = l.callExtend(ctx, cl, bound)

	// Report a term that is too short, because a store without space may grant no longer term than
	// the present one, and report success.
	if err == nil && l.end() < start.Add(ttl-backend.Drift(ttl)) {
		err = &backend.UnavailableError{Err: errors.New("the store has granted a shorter term")}
	}

	// Read the clock, because the answer may have come after the lease's end.
	return cmp.Or(l.Err(), err)
}

// beginExtend waits for the end of a renewal in flight, and then marks the hold as busy. It returns
// the claim to renew, and how long the call may last.
func (l *Lease) beginExtend(ctx context.Context, ttl time.Duration) (
	backend.Claim, time.Duration, error) {
	for {
		if err := cmp.Or(ctx.Err(), l.Err()); err != nil {
			return backend.Claim{}, 0, err
		}
		cl, bound, inFlight, err := l.tryExtend(ttl)
		if inFlight == nil {
			return cl, bound, err
		}

		// Try again after the end of the renewal. The loop checks ctx.
		select {
		case <-inFlight:
		case <-ctx.Done():
		}
	}
}

// tryExtend does the work of beginExtend if no renewal is in flight. Otherwise it only returns a
// channel that is closed when the renewal in flight ends.
func (l *Lease) tryExtend(ttl time.Duration) (
	cl backend.Claim, bound time.Duration, inFlight <-chan struct{}, err error) {
	h := l.hold
	r := h.renewer
	r.mu.Lock()
	defer r.mu.Unlock()
	if h.busy != nil {
		return cl, 0, h.busy, nil
	}
	if l.state.Load() != held {
		return cl, 0, nil, l.cause() // the lease ended after Err had returned
	}
	now := r.clock.Now()
	if now.Add(ttl) > min(h.limit, l.maxHold) {
		err = fmt.Errorf("%w: %v from now is past the lease's max hold", ErrInvalid, ttl)
		return cl, 0, nil, err
	}

	cl = h.claim
	cl.TTL = termFor(ttl)
	if err := checkLongest(r.traits, cl.TTL); err != nil {
		// Refuse the term here, because a refusal of the store would count as a failed renewal.
		return cl, 0, nil, err
	}

	// Bound the call, so that an Extend without an answer leaves a third of the term for renewals.
	// But let it last at least as long as one try of a renewal.
	term := h.termLocked()
	left := time.Duration(l.end() - now)
	bound = min(r.opts.Timeout, max(term/triesPerT, left-term/renewalsPerT))

	h.busy = make(chan struct{})
	h.unpassed = true
	h.kept = max(h.kept, now.Add(cl.TTL))
	r.scheduleLocked(h) // no renewal is due while h is busy
	return cl, bound, nil, nil
}

// callExtend makes the call of an Extend that has made the hold busy.
func (l *Lease) callExtend(ctx context.Context, cl backend.Claim, bound time.Duration) error {
	h := l.hold
	r := h.renewer
	returns := false
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()

		// Usually the call itself ends the busy time of h, perhaps after this method. But if Close
		// has stopped waiting, or a method of ctx has panicked, the call may not have begun. Then
		// end the busy time here.
		if !returns || r.stopped {
			h.callEndedLocked()
			if h.index >= 0 {
				r.scheduleLocked(h)
			}
		}
	}()

	if err := r.enter(); err != nil {
		return err // r.stopped is true
	}
	defer r.leave()
	_, err := calls.Call(&r.caller, ctx, bound, func(ctx context.Context) (struct{}, error) {
		return struct{}{}, r.extend(ctx, h, cl, bound)
	}, nil)
	returns = true
	return err
}

// Detach ends the lease and leaves the key taken for [Client.Resume]. First it extends the lease,
// in one call to the store, so the key stays taken for at least ttl from now without renewals.
// After Detach, the lease counts as unlocked. Another process can resume the handle while this
// process runs, after the Client's Close, or after this process has ended. With memlock, only a
// Client on the same Store can resume it.
//
// After an error the lease goes on, perhaps with a longer term, and the caller must still unlock
// it. The errors are those of [Lease.Extend]. ErrInvalid can also mean that another lease shares
// the hold by re-entry, or that the key is not UTF-8, which JSON cannot contain.
func (l *Lease) Detach(ctx context.Context, ttl time.Duration) (Handle, error) {
	if l == nil {
		return Handle{}, errNilLease
	}
	x, err := l.detach(ctx, ttl)
	if err != nil {
		return Handle{}, newError("detach", l.key, err)
	}

	r := l.hold.renewer
	returns := false
	defer func() {
		// If Observe has panicked, the handle is lost, and no caller could free the key.
		if !returns {
			r.reaper.add(l.hold.claim, reapOnce)
		}
	}()
	r.observer.detached(ctx, l)
	returns = true
	return x, nil
}

// detach does what Detach does, but reports no event.
func (l *Lease) detach(ctx context.Context, ttl time.Duration) (x Handle, err error) {
	h := l.hold
	r := h.renewer

	// Check first, so that a Detach that cannot succeed does not change the term.
	r.mu.Lock()
	err = l.detachableLocked()
	r.mu.Unlock()
	if err == nil {
		err = l.extend(ctx, ttl)
	}
	if err != nil {
		return x, err
	}

	r.mu.Lock()

	// During the call, another caller may have re-entered the key or unlocked the lease.
	if err = l.detachableLocked(); err != nil {
		r.mu.Unlock()
		return x, err
	}

	// Round(0) removes the reading of the monotonic clock, which means nothing to other processes.
	x = Handle{
		Key:    l.key,
		Token:  h.claim.Token,
		Owner:  h.claim.Owner,
		TTL:    h.claim.TTL,
		Fence:  h.fence,
		Shared: h.claim.Shared,
		Slot:   int(l.slot),
		Until:  r.clock.Time(h.Deadline()).Round(0),
	}
	if h.keep != 0 {
		x.MinHold = r.clock.Time(h.keep).Round(0)
	}
	if end := min(h.limit, l.maxHold); end != clock.Never {
		x.MaxHold = r.clock.Time(end).Round(0)
	}

	// A renewal in flight cannot shorten the term, and its answer is ignored.
	l.state.Store(released)
	delete(r.resumed, x.Token)
	h.leases = nil
	r.unscheduleLocked(h)
	h.endedLocked()
	r.mu.Unlock()

	// Cancel the context without mu, because a cancel runs users' code.
	if lc := l.ctx.Load(); lc != nil {
		lc.cancel(ErrReleased)
	}
	return x, nil
}

// detachableLocked returns why l cannot be detached, or nil.
func (l *Lease) detachableLocked() error {
	switch {
	case l.state.Load() != held:
		return l.cause()
	case len(l.hold.leases) > 1:
		return fmt.Errorf("%w: another lease has re-entered the key; "+
			"unlock the inner lease first", ErrInvalid)
	case !utf8.ValidString(l.key):
		return fmt.Errorf("%w: the key is not UTF-8, so a handle cannot contain it", ErrInvalid)
	}
	return nil
}
