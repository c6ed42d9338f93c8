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

// hold is one token's hold of a key in the store. It has one lease, or several by
// re-entry.
//
// A hold begins with a grant (newHold, Client.startHoldLocked). Answers of the store
// renew it (answer). When its last lease is unlocked, the next caller in line may
// get it (handOverLocked). It ends when it is released, when the store reports that
// it is lost (loseLocked), or when its deadline passes (endExpiredLocked).
type hold struct {
	c        *Client
	claim    backend.Claim // what renewals ask for; its TTL is guarded by c.mu
	fence    uint64        // 0 unless a fence was asked for
	granted  instant       // when the grant was received
	deadline atomic.Int64  // instant until which the lease is trusted; written under c.mu

	// All below is guarded by c.mu.
	line   *line    // the line of its key
	leases []*Lease // the leases that have not ended; an inner lease comes after those around it
	joined int      // how many leases it has had so far

	// What the store knows, as far as this Client can tell.
	kept       instant // until when the store may keep it: the longest term requested, answered or not
	confirmed  instant // when the last call began in which the store confirmed it
	distrusted instant // the last Break: a call that began earlier confirms nothing
	limit      instant // the end of WithMaxHold: no renewal passes it

	// Its renewal.
	renew     bool          // renewals go on
	unrenewed bool          // WithoutRenewal: renew was never true
	due       instant       // when the next renewal begins
	early     time.Duration // how much earlier it may begin, to travel with others
	queued    bool          // it waits in a lane for a batch
	busy      chan struct{} // closed when the renewal or Extend in flight ends; nil if there is none
	failed    int           // consecutive renewals that were not answered
	orphaned  instant       // when a renewal first noticed that the contexts of all Locks have ended; else 0
	extended  bool          // Extend was called, so the hold is not handed over
	next      instant       // when the renewer must serve it: its key in the heap
	index     int           // in c.holds; -1 if it is not there, because it has ended

	// Its end.
	lapsed   bool // it ended by its deadline, so the store may still keep it
	leftHead bool // it is no longer at the head of its line

	// The first lease and its slot in leases are part of the hold, to save two
	// allocations.
	first Lease
	place [1]*Lease
}

// newHold returns a hold for a grant. The call began at start, when the machine had
// slept for slept. If the grant's term has ended before the answer came, newHold
// releases the token in the background and returns errLate.
func (c *Client) newHold(cl backend.Claim, g backend.Grant, start, now instant, slept int64) (*hold, error) {
	term := cl.TTL - backend.Drift(cl.TTL)
	until := start.add(term)
	if !g.Until.IsZero() {
		until = c.clock.at(g.Until, slept)
	}
	if now >= until {
		c.reap(cl, reapOnce)
		return nil, errLate
	}

	h := &hold{c: c, claim: cl, fence: g.Fence, granted: now, kept: now.add(cl.TTL), distrusted: -1, limit: never, index: -1}

	// The hold was confirmed when its term began. A Waiter's call may have begun long
	// before that.
	h.confirmed = min(max(start, until.add(-term)), now)
	since := h.confirmed
	if until.add(-term) < start {
		// A Waiter's grant of less than a whole term. Its beginning is not known.
		since = now
		if c.traits.Ordered {
			h.confirmed = now // the message that handed the key over confirms the hold
		}
	}
	h.renewAt(now, since.add(spread(until.sub(since)/renewalsPerT)))
	h.deadline.Store(int64(until))
	return h, nil
}

// startHoldLocked makes h the hold of ln, and returns its first lease.
func (c *Client) startHoldLocked(ctx context.Context, r *request, ln *line, h *hold) *Lease {
	h.line, h.renew, h.unrenewed = ln, !r.noRenew, r.noRenew
	ln.hold, ln.lastAnswer, ln.outage, ln.silent, ln.asking = h, nil, false, false, false
	switch {
	case c.traits.Ordered:
		ln.turns = 1
	case !ln.waiting.empty():
		if ln.turns == 0 {
			ln.pace.began = h.granted
		}
		ln.turns++
	}
	c.open++

	// With a max hold, the first claim may have asked for less than the whole term.
	// Renewals ask for the whole term, but not past the limit.
	l := c.addLeaseLocked(ctx, r, h, h.granted)
	if r.maxHold > 0 {
		h.claim.TTL = r.ttl
		h.limit = l.maxHold
	}
	c.scheduleLocked(h)
	return l
}

// addLeaseLocked adds a lease to h.
func (c *Client) addLeaseLocked(ctx context.Context, r *request, h *hold, now instant) *Lease {
	l := &h.first
	if l.c != nil {
		l = new(Lease)
	}
	l.c, l.hold, l.key, l.parent, l.around = c, h, r.key, ctx, r.around
	l.nest()

	l.since, l.maxHold = now, never
	if r.maxHold > 0 {
		l.maxHold = l.since.add(r.maxHold)
	}

	if h.leases == nil {
		h.leases = h.place[:0]
	}
	h.leases = append(h.leases, l)
	h.joined++
	return l
}

// innermost returns the innermost held lease of key among around and the leases
// around it, or nil. Around is the innermost lease of the caller's context.
func (c *Client) innermost(around *Lease, key string) *Lease {
	if around == nil {
		return nil
	}
	for {
		o := c.around(around, key)
		// Err ends the lease if its deadline has passed. It locks mu itself.
		if o == nil || o.Err() == nil {
			return o
		}
	}
}

// around returns the innermost lease on the hold of key that is inner or is around
// inner, or nil. The lease may have expired.
func (c *Client) around(inner *Lease, key string) *Lease {
	c.mu.Lock()
	defer c.mu.Unlock()
	ln := c.lines[key]
	if ln == nil || ln.hold == nil {
		return nil
	}
	for _, o := range slices.Backward(ln.hold.leases) {
		if o.state.Load() == held && o.isAround(inner) {
			return o
		}
	}
	return nil
}

// reenter adds a lease to the hold of outer. It returns nil, nil if outer has just
// ended.
func (c *Client) reenter(ctx context.Context, r *request, outer *Lease) (*Lease, error) {
	h := outer.hold
	if r.fenced && !h.claim.Fenced {
		return nil, fmt.Errorf("%w: the outer lease has no fence; pass WithFence to its Lock as well", ErrInvalid)
	}
	if err := c.checkLongest(r.ttl); err != nil {
		// The store would refuse renewals for that term, and both leases would be lost.
		return nil, err
	}

	c.mu.Lock()
	defer c.mu.Unlock()
	if outer.state.Load() != held {
		return nil, nil // it ended after the caller had found it
	}

	// A longer term is requested at once. Until the answer, the store keeps the
	// shorter one.
	now := c.clock.now()
	if r.ttl > h.claim.TTL {
		h.claim.TTL = r.ttl
		h.renewAt(now, now)
	}

	l := c.addLeaseLocked(ctx, r, h, now)
	if !h.renew && !h.unrenewed {
		// Renewal had stopped, because the contexts of all leases had ended.
		h.renew, h.orphaned = true, 0
		h.renewAt(now, now)
	}
	c.scheduleLocked(h)
	return l, nil
}

// checkLongest returns an error if the store grants no term of ttl.
func (c *Client) checkLongest(ttl time.Duration) error {
	if longest := c.traits.MaxTTL; longest > 0 && ttl > longest {
		return fmt.Errorf("%w: ttl %v is above %v, the longest term of this store", ErrInvalid, ttl, longest)
	}
	return nil
}

// renewAt sets the time of the next renewal to due. If other holds are renewed up to
// batchWindow earlier, the renewal travels with them, but not earlier by more than a
// quarter of the time until due. Without that bound, renewals of a short term would
// run in a tight loop against a store that refuses connections at once.
func (h *hold) renewAt(now, due instant) {
	h.due = due
	h.early = min(batchWindow, max(due.sub(now), 0)/4)
}

// idlesLocked reports whether the next renewal of h is neither queued nor in flight.
func (h *hold) idlesLocked() bool { return h.renew && h.busy == nil && !h.queued }

// renewalLocked returns the claim of the next renewal, or false if h must not be
// renewed. Wanted says whether the context of at least one of its Locks goes on.
func (h *hold) renewalLocked(now instant, wanted bool) (backend.Claim, bool) {
	cl := h.claim
	if h.index < 0 {
		return cl, false // it has ended
	}

	switch {
	case wanted:
		h.orphaned = 0
	case h.orphaned == 0:
		h.orphaned = now
	case now.sub(h.orphaned) > cl.TTL*(renewalsPerT-1)/renewalsPerT:
		// All contexts ended up to TTL/3 before a renewal noticed it. So the last renewal
		// came at most one term after their end.
		h.renew = false
		return cl, false
	}

	// WithMaxHold bounds the term.
	if instant(h.deadline.Load()) >= h.limit {
		h.renew = false // the present term is long enough
		return cl, false
	}
	if left := h.limit.sub(now); left < cl.TTL {
		cl.TTL = min(cl.TTL, termFor(left))
	}
	return cl, true
}

// answer records the outcome of a renewal or an Extend that asked for ttl. It was
// sent at start, when the machine had slept for slept.
func (c *Client) answer(h *hold, ttl time.Duration, start instant, slept int64, g backend.Grant, err error) {
	now, _ := c.readClock()
	c.mu.Lock()
	h.callEndedLocked()

	var gone []*Lease // their contexts end after mu was unlocked
	failed := false
	until := start.add(ttl - backend.Drift(ttl))
	if !g.Until.IsZero() {
		until = c.clock.at(g.Until, slept)
	}
	if err == nil && until <= now {
		err = errLate
	}

	switch {
	case h.index < 0:
		// The hold was unlocked or lost meanwhile. The answer changes nothing.
	case err == nil:
		// Answers may arrive in any order, and the store never shortens a term. So an
		// older answer must not move the deadline back.
		h.deadline.Store(max(h.deadline.Load(), int64(until)))
		h.confirmed = max(h.confirmed, start)
		h.failed = 0
		h.renewAt(now, max(start.add(spread(min(h.claim.TTL, until.sub(start))/renewalsPerT)), now.add(minSleep)))
		if start <= h.distrusted {
			h.renewAt(now, now+1) // the call was sent before the Break: ask again
		}
		c.scheduleLocked(h)
	case errors.Is(err, ErrLost):
		gone = c.loseLocked(h)
		// A part of the store may still have the hold, such as a minority of a
		// quorum's nodes. That would block the key for the next holder.
		c.reapHoldLocked(h)
	default:
		h.failed++
		h.renewAt(now, now.add(jitter(h.claim.TTL/(3*triesPerT))))
		failed = true
		c.scheduleLocked(h)
	}
	c.mu.Unlock()

	c.endContexts(gone, ErrLost)
	if failed {
		c.observeLater(Event{Kind: EventRenewFailed, Key: h.first.key, Fence: h.fence, Err: err})
	}
}

// callEndedLocked records that the renewal or Extend in flight has ended.
func (h *hold) callEndedLocked() {
	if h.busy != nil {
		close(h.busy)
		h.busy = nil
	}
}

// confirmSoon renews this Client's hold of key now, because key was broken. Until
// the store confirms the hold, it is not handed over.
func (c *Client) confirmSoon(key string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	ln := c.lines[key]
	if ln == nil || ln.hold == nil || ln.hold.index < 0 {
		return
	}

	h := ln.hold
	h.distrusted = c.clock.now()
	h.renewAt(h.distrusted, h.distrusted+1)
	c.scheduleLocked(h)
}

// handOverLocked gives h, whose last lease was unlocked, to the next caller in line.
// It returns false if that caller cannot have it: then h must be released. A
// hand-over takes no call to the store, which knows only the token of the hold and
// has confirmed it a moment ago.
func (c *Client) handOverLocked(h *hold) bool {
	ln := h.line
	now := c.clock.now()
	if ln.hold != h || ln.waiting.empty() || c.rowOverLocked(ln, now) || h.extended || !h.renew ||
		h.claim.Fenced || h.limit != never || c.closing.Err() != nil {
		return false
	}

	// The next caller must want just this hold, and the store must have confirmed it a
	// moment ago, after the last Break.
	next := ln.waiting.first.r
	if h.confirmed <= h.distrusted || now.sub(h.confirmed) >= freshEnough || now >= instant(h.deadline.Load()) ||
		next.ttl != h.claim.TTL || next.noRenew || next.fenced || next.maxHold > 0 {
		return false
	}

	t := ln.waiting.pop()
	ln.turns++
	c.leaveLocked(ln) // for the caller that unlocks; the line counts the next one already
	t.ready <- ticket{lease: c.addLeaseLocked(t.ctx, t.r, h, now)}
	return true
}

// endExpiredLocked ends the leases of h whose time is over by the clock, and returns
// them. After the caller has released mu, it passes the leases to
// endContexts.
func (c *Client) endExpiredLocked(h *hold, now instant) []*Lease {
	if now >= min(instant(h.deadline.Load()), h.limit) {
		h.lapsed = true
		return c.loseLocked(h)
	}

	// The hold goes on. Leases whose WithMaxHold has passed end.
	var ended []*Lease
	for i := len(h.leases) - 1; i >= 0; i-- {
		if l := h.leases[i]; now >= l.maxHold {
			h.leases = append(h.leases[:i], h.leases[i+1:]...)
			l.state.Store(lost)
			ended = append(ended, l)
		}
	}
	if len(ended) > 0 && len(h.leases) == 0 {
		h.lapsed = true
		c.loseLocked(h)
	} else if len(ended) > 0 {
		c.scheduleLocked(h)
	}
	return ended
}

// loseLocked ends h as lost, and returns its leases. After the caller
// has released mu, it passes the leases to endContexts.
func (c *Client) loseLocked(h *hold) []*Lease {
	ended := h.leases
	h.leases = nil
	for _, l := range ended {
		l.state.Store(lost)
	}
	c.unscheduleLocked(h)
	c.leaveHeadLocked(h)
	return ended
}

// closeHoldLocked ends the leases of h for Close, and returns them. They can still be
// unlocked. After the caller has released mu, it passes the leases to
// endContexts.
func (c *Client) closeHoldLocked(h *hold) []*Lease {
	for _, l := range h.leases {
		l.state.Store(closed)
	}
	c.unscheduleLocked(h)
	return slices.Clone(h.leases) // Unlock changes h.leases
}

// expire ends the leases of h whose time is over by the clock.
func (c *Client) expire(h *hold) {
	now := c.clock.now()
	c.mu.Lock()
	var gone []*Lease
	if h.index >= 0 {
		gone = c.endExpiredLocked(h, now)
	}
	c.mu.Unlock()
	c.endContexts(gone, ErrLost)
}

// endContexts ends the contexts of leases that have ended, and queues their events
// for the observer. The caller must not hold mu, because the end of a context runs
// code of its users.
func (c *Client) endContexts(ended []*Lease, cause error) {
	for _, l := range ended {
		l.cancel(cause)
		c.observeEnd(l, EventLost, cause)
	}
}

// leaveHeadLocked takes h from the head of its line, and promotes the next caller.
// The second call for a hold does nothing.
func (c *Client) leaveHeadLocked(h *hold) {
	if h.leftHead {
		return
	}
	h.leftHead = true
	c.open--
	if c.lined {
		c.promoteNextLocked(h.line, nil)
	} else if h.line.hold == h {
		h.line.hold = nil
	}
	c.leaveLocked(h.line)
}
