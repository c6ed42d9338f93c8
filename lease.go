package hasp

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
)

// Lease is one caller's share of a hold. Callers that re-enter a key share the hold. A lease ends
// by Unlock or by the Client's Close, or it is lost. Several goroutines may use it, and any of them
// may unlock it.
type Lease struct {
	hold    *hold
	key     string                       // the key as the caller gave it
	slot    int                          // number of its slot, from 1; 0 without WithSlots
	id      uint64                       // ID of its events
	op      string                       // Op of its events
	parent  context.Context              // Lock's context
	around  *Lease                       // the innermost lease around the caller of Lock, or nil
	since   instant                      // when the caller got it
	maxHold instant                      // deadline of WithMaxHold, or never
	keep    instant                      // end of WithMinHold, or 0
	loss    *LostError                   // why it was lost; set before state becomes lost
	ctx     atomic.Pointer[leaseContext] // made by the first call of Context
	state   atomic.Int32                 // one of the states below; written under mu
	reentry bool                         // the lease joined a hold that its caller had
	shared  bool                         // WithShared

	// These three are guarded by mu.
	untilUnlock bool // renewed until Unlock, also after Lock's context has ended; see renewUntilUnlock
	reported    bool // EventAcquired was reported
	stillHeld   bool // EventStillHeld was reported

	// parentDone is the Done channel of Lock's context. The first renewal sets both fields. Only
	// renewals use them, and no two renewals of a lease run at the same time.
	parentDoneRead bool
	parentDone     <-chan struct{}

	unseen *Event // event of the lease's end, if the lease ended before EventAcquired was reported; guarded by mu
}

// States of a Lease. The first is held. The clock or an answer of the store makes it lost, and
// Close makes it closed. If an Unlock calls the store, it makes the lease releasing during the
// call, and then released, unknown or lost. Otherwise it makes the lease released immediately. A
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
// it has seen. With shared leases, the resource keeps two such numbers: see WithShared. Fence
// returns 0 if the hold was taken without WithFence.
func (l *Lease) Fence() uint64 { return l.hold.fence }

// Slot returns which slot the lease holds, from 0 to n-1 for WithSlots(n). It returns 0 for a lease
// without slots.
func (l *Lease) Slot() int { return max(l.slot-1, 0) }

// Expires returns when the lease ends if no further renewal succeeds. Its context ends then at the
// latest.
func (l *Lease) Expires() time.Time { return l.hold.c.clock.time(l.end()) }

// Err returns nil while the lease is held, ErrReleased after Unlock, and ErrClosed after the
// Client's Close. After its loss, Err returns a [*LostError], which matches ErrLost and gives the
// reason. Err reads the clock. So if the process was stopped until after the term, the first call
// of Err reports the loss.
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

// If l's time is over by the clock, expire ends all leases of its hold whose time is over. The
// caller must not hold mu.
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
// If Lock's context was derived from the context of another lease, the end of that lease ends this
// context too, with the same cause. [Lease.Err] says whether this lease itself has ended.
//
// The context's Err and Done read the clock, as [Lease.Err] does. Contexts derived from it do not:
// they end when a timer fires, which may be late.
func (l *Lease) Context() context.Context { return l.context(nil) }

// context returns the context of l. If it makes the context and joint is not nil, the end of l also
// calls joint.
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

// renewUntilUnlock makes renewals go on until Unlock, also after the end of Lock's context.
// WithoutRenewal and WithMaxHold keep their effect.
func (l *Lease) renewUntilUnlock() {
	c, h := l.hold.c, l.hold
	c.mu.Lock()
	defer c.mu.Unlock()
	l.untilUnlock = true

	// If the contexts of all Locks have ended while the process was stopped, renewal may have
	// stopped by now.
	if l.state.Load() == held && h.index >= 0 && h.resumeRenewalLocked(c.clock.now()) {
		c.renewer.scheduleLocked(h)
	}
}

// countMinHold makes l's min hold count, if l has one. Lock or LockAll calls it last: if the call
// unlocks the lease before it returns, the key must not stay taken.
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

// unlock returns the error of Unlock. If this call has ended the lease, and no event has reported
// that yet, ends is true.
func (l *Lease) unlock(ctx context.Context) (ends bool, err error) {
	l.expire()
	was, err := l.beginUnlock()
	switch {
	case err != nil:
		return false, err
	case was == unknown:
		return false, l.unlockAgain(ctx)
	}

	// Cancel the context without mu, because a cancel runs users' code.
	if x := l.ctx.Load(); x != nil {
		x.cancel(ErrReleased)
	}
	ends = was == held               // if Close ended the lease, an event has reported that
	if l.state.Load() != releasing { // only this call changes that state
		return ends, nil
	}

	c, h := l.hold.c, l.hold
	err = c.store.release(ctx, h.claim, h.keep)

	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls--
	c.changed.Broadcast()
	h.failed = 0
	switch {
	case err == nil:
		l.state.Store(released)
	case errors.Is(err, ErrLost):
		err = l.loseLocked(&LostError{Reason: LostRevoked})
	default:
		l.state.Store(unknown)
		h.failed = 1                         // the store may hang; set this before endedLocked, which reads it
		c.reaper.addHoldLocked(h, h.keep, 1) // the reaper repeats the release
	}
	h.line.endedLocked(h)
	return ends, err
}

// beginUnlock ends the lease, if it is held or was ended by Close. It returns the state from
// before. If the state is now releasing, or was unknown, the caller must call the store's release,
// and Close waits for that call. If beginUnlock returns an error, Unlock must return that error.
func (l *Lease) beginUnlock() (was int32, err error) {
	c, h := l.hold.c, l.hold
	c.mu.Lock()
	defer c.mu.Unlock()
	for l.state.Load() == releasing {
		c.changed.Wait() // until the other Unlock's call has ended, which Timeout bounds
	}

	switch was = l.state.Load(); {
	case was == lost:
		if h.lapsed {
			// Release the hold, because the store may keep it until the term ends by the store's
			// clock.
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

	// End this lease before a hand-over. The next caller in line runs immediately after it, and may
	// have a context that is derived from this lease's.
	l.state.Store(released)
	i := slices.Index(h.leases, l)
	h.leases = slices.Delete(h.leases, i, i+1)
	if h.linger > 0 {
		h.line.q.recallLocked()
	}
	if len(h.leases) > 0 || h.line.first() != nil && h.handOverLocked() || h.linger > 0 && h.lingerLocked(l.key) {
		return was, nil
	}
	c.renewer.unscheduleLocked(h) // a renewal must not follow the release
	l.state.Store(releasing)
	c.calls++
	return was, nil
}

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

	now, _ := c.clock.read() // because the machine may have slept past the term
	c.mu.Lock()
	defer c.mu.Unlock()
	if l.state.Load() != unknown {
		return l.cause() // another call of Unlock has repeated the release meanwhile
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

// hold is one token's hold of a key in the store. It has one lease, or several by re-entry.
//
// A hold begins with a grant (newHold, startLocked). Answers of the store renew it (answer). When
// its last lease is unlocked, the next caller in line may get it (handOverLocked). It ends when it
// is released, when the store reports that it is lost (loseLocked), when its deadline or its max
// hold passes (endExpiredLocked), or when the Client is closed (Close).
type hold struct {
	c        *Client
	claim    backend.Claim // the claim of renewals and of the release; its TTL is guarded by mu
	fence    uint64        // 0 unless a fence was asked for
	granted  instant       // when the grant was received
	deadline atomic.Int64  // instant until which the lease is trusted; written under mu

	// All below is guarded by mu.
	line   *line    // the line of its key
	leases []*Lease // its leases that are neither lost nor unlocked, outer ones first

	// The state in the store, as far as this Client can tell.
	kept      instant // latest end of all requested terms, answered or not; the store may keep the hold until then
	confirmed instant // start of the last call that confirmed it; see newHold for a Waiter's grant
	raised    instant // when a re-entry raised the term that renewals ask for; earlier calls asked for less
	limit     instant // the end of WithMaxHold, or never; renewals ask for a term that ends just after it
	keep      instant // the latest end of a min hold that counts, or 0; a release leaves the key taken until then

	// Its renewal.
	due      instant       // when the next renewal is due
	early    time.Duration // how much earlier the renewal may begin, to share a batch with others
	busy     chan struct{} // closed when the renewal or Extend in flight ends; nil if there is none
	failure  error         // error of the last failed renewal; nil after a renewal that succeeded
	orphaned instant       // when a renewal first noticed that the contexts of all Locks have ended; 0 until then
	failed   int32         // renewals in a row that failed or had no answer; a release without an answer counts as well
	index    int32         // its index in the renewer's heap; -1 before its start and after its end
	joined   int32         // how many leases it has had so far
	renewal  int8          // renews, paused or unrenewed
	queued   bool          // it waits in a lane for a batch
	extended bool          // Extend was called, so the hold is not handed over
	lapsed   bool          // its deadline or its max hold has ended it, so the store may still keep it

	// See linger.go.
	linger  time.Duration // how long it may linger after its grant, by the option of the caller that has it or had it last
	lingers instant       // when it stops lingering; 0 if it does not linger
	ghost   *Lease        // nil until it lingers for the first time

	// The first lease and its place in leases are part of the hold, to save two allocations.
	first Lease
	place [1]*Lease
}

// States of the renewal of a hold.
const (
	renews    int8 = iota
	paused         // because the contexts of all Locks have ended, or the term has reached the max hold
	unrenewed      // because of WithoutRenewal
)

// newHold returns the hold that g grants. The call began at start; slept is how long the machine
// had slept by then. If the grant's term ended before the answer came, newHold has the reaper
// release the token, and returns errLate.
func newHold(c *Client, cl backend.Claim, g backend.Grant, start, now instant, slept int64) (*hold, error) {
	cl.Handle = g.Handle
	term := cl.TTL - backend.Drift(cl.TTL)
	until := start.add(term)
	if !g.Until.IsZero() {
		until = c.clock.at(g.Until, slept)
	}
	if now >= until {
		c.reaper.add(cl, reapOnce)
		return nil, errLate
	}

	h := &hold{c: c, claim: cl, fence: g.Fence, granted: now, kept: now.add(cl.TTL), limit: never, index: -1}

	// The hold was confirmed when its term began, which may be long after a Waiter's call began. If
	// a Waiter has granted less than a whole term, the start of the term is not known, so the time
	// until the renewal counts from now. If the driver is Ordered, it handed the key over by a
	// message, which also confirms the hold now.
	began := until.add(-term)
	since := min(max(start, began), now)
	h.confirmed = since
	if began < start {
		since = now
		if c.traits.Ordered {
			h.confirmed = now
		}
	}
	h.renewAt(now, renewalTime(since, until.sub(since)))
	h.deadline.Store(int64(until))
	return h, nil
}

// startLocked makes h the hold of ln, and returns its first lease. waited is how long the Client
// waited for h. If sought is true, the first attempt did not get h.
func (h *hold) startLocked(ctx context.Context, r *request, ln *line, waited time.Duration, sought bool) *Lease {
	h.line = ln
	if r.noRenew {
		h.renewal = unrenewed
	}
	ln.startedLocked(h, waited, sought)

	// With a max hold, the first claim may have asked for less than the whole term. Renewals ask
	// for the whole term, or for a term that ends just after the limit.
	l := h.addLeaseLocked(ctx, r, h.granted)
	if r.maxHold > 0 {
		h.claim.TTL = r.ttl
		h.limit = l.maxHold
	}
	h.c.renewer.scheduleLocked(h)
	return l
}

func (h *hold) addLeaseLocked(ctx context.Context, r *request, now instant) *Lease {
	// The hold has room for its first lease. Later ones are allocated.
	l := &h.first
	if l.hold != nil {
		l = new(Lease)
	}
	l.hold, l.key, l.slot, l.parent, l.around = h, r.name, r.slot, ctx, r.around
	if r.parent != nil {
		l.parent = r.parent
	}
	l.id, l.op, l.shared = r.id, r.op, r.shared
	l.since, l.maxHold = now, never
	if r.maxHold > 0 {
		l.maxHold = l.since.add(r.maxHold)
	}
	if r.minHold > 0 {
		l.keep = l.since.add(r.minHold) // the min hold counts after the call has returned; see countMinHold
	}

	if h.leases == nil {
		h.leases = h.place[:0]
	}
	if len(h.leases) == 0 { // the outermost lease decides how long h lingers
		h.linger = 0
		if r.linger > 0 {
			h.linger = h.lingerFor(r)
		}
	}
	h.leases = append(h.leases, l)
	h.joined++
	return l
}

// handOverLocked gives h, whose last lease was unlocked, to the next caller in line. It returns
// false, and h must be released, if that caller cannot use h, if other Clients should get a turn,
// or if h has left the line. A hand-over needs no call to the store, because the store knows only
// the token of the hold, and has confirmed the hold a moment ago.
func (h *hold) handOverLocked() bool {
	ln, now := h.line, h.c.clock.now()
	t := ln.first()
	if ln.hold != h || ln.rowOverLocked(now) || !h.suitsLocked(t.r, now) {
		return false
	}
	ln.giveLeaseLocked(t, h.addLeaseLocked(t.ctx, t.r, now))
	return true
}

// suitsLocked reports whether a caller with r may get h: h is what r asks for, and the store has
// confirmed h a moment ago.
func (h *hold) suitsLocked(r *request, now instant) bool {
	switch {
	case !h.passableLocked():
		return false
	case r.ttl != h.claim.TTL || r.noRenew || r.fenced || r.shared || r.maxHold > 0:
		return false
	case h.c.closing.Err() != nil:
		return false
	}
	return now.sub(h.confirmed) < max(freshEnough, h.linger) && now < instant(h.deadline.Load())
}

// passableLocked reports whether a later caller may get h: h is renewed and was not extended, and
// no caller has asked for a fence, a max hold or a min hold.
func (h *hold) passableLocked() bool {
	return !h.extended && h.renewal == renews && !h.claim.Fenced && h.limit == never && h.keep == 0
}
