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
// A hold is born by a grant (newHold, Client.hold). Answers of the store renew it
// (answer). When its last lease is unlocked, the next caller in line may get it
// (handOver). It ends when it is released, when the store says that it is lost
// (loseLocked), or when its deadline passes (endExpired).
type hold struct {
	c        *Client
	claim    backend.Claim // what renewals ask for; its TTL is guarded by c.mu
	fence    uint64        // 0 unless a fence was asked for
	granted  instant       // when the answer came
	deadline atomic.Int64  // instant until which the lease is trusted; written under c.mu

	// All below is guarded by c.mu.
	line   *line    // the line of its key
	leases []*Lease // the leases that have not ended; an inner lease comes after those around it
	joined int      // how many leases it has had

	// What the store knows.
	kept       instant // until when the store may keep it: the longest term asked for, answered or not
	confirmed  instant // when the last call began that the store confirmed
	distrusted instant // confirmations of calls that began earlier do not count, because of a Break
	limit      instant // the end of WithMaxHold: no renewal passes it

	// Its renewal.
	renew     bool          // the hold is to be renewed
	unrenewed bool          // WithoutRenewal: it never is
	due       instant       // when the next renewal begins
	early     time.Duration // how much earlier it may begin, to travel with others
	queued    bool          // it is in a lane, and waits for a batch
	busy      chan struct{} // closed when the renewal or Extend in flight ends; nil if none is in flight
	failed    int           // renewals in a row that were not answered
	orphaned  instant       // when the contexts of all its Locks were first seen to have ended; 0 if not
	extended  bool          // Extend was called: the hold is not handed over
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

// newHold returns a hold for a grant. If the grant's term has ended before the
// answer came, newHold has the token released and returns errLate.
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

	h.confirmed = min(max(start, until.add(-term)), now)
	since := h.confirmed
	if until.add(-term) < start {
		// A Waiter's grant of less than a whole term: when it began is not known.
		since = now
		if c.traits.Ordered {
			h.confirmed = now // the message that handed the key over confirms the hold
		}
	}
	h.renewAt(now, since.add(spread(until.sub(since)/renewalsPerT)))
	h.deadline.Store(int64(until))
	return h, nil
}

// hold puts h at the head of ln and returns its first lease. The caller holds mu.
func (c *Client) hold(ctx context.Context, r *request, ln *line, h *hold) *Lease {
	h.line, h.renew, h.unrenewed = ln, !r.noRenew, r.noRenew
	ln.hold, ln.lastAnswer, ln.outage, ln.silent, ln.asking = h, nil, false, false, false
	switch {
	case c.traits.Ordered:
		ln.turns = 1
	case !ln.waiting.empty():
		ln.turns++
	}
	c.open++

	l := c.lease(ctx, r, h, h.granted)
	if r.maxHold > 0 {
		h.claim.TTL = r.ttl
		h.limit = l.maxHold
	}
	c.schedule(h)
	return l
}

// lease adds a lease to h. The caller holds mu.
func (c *Client) lease(ctx context.Context, r *request, h *hold, now instant) *Lease {
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

// innermost returns the innermost held lease of key among around, the innermost
// lease of a context, and the leases around that. It returns nil if there is none.
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
// inner. It returns nil if there is none. The lease may have expired.
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
		return nil, fmt.Errorf("%w: the outer lease has no fence; lock it with WithFence, too", ErrInvalid)
	}
	if err := c.checkLongest(r.ttl); err != nil {
		// The store would refuse renewals for that term, and both leases would be lost.
		return nil, err
	}

	c.mu.Lock()
	defer c.mu.Unlock()
	if outer.state.Load() != held {
		return nil, nil
	}

	// A longer term is asked for at once: until then the store keeps the shorter one.
	now := c.clock.now()
	if r.ttl > h.claim.TTL {
		h.claim.TTL = r.ttl
		h.renewAt(now, now)
	}
	l := c.lease(ctx, r, h, now)
	if !h.renew && !h.unrenewed {
		// Renewal had stopped, because the contexts of all leases had ended.
		h.renew, h.orphaned = true, 0
		h.renewAt(now, now)
	}
	c.schedule(h)
	return l, nil
}

// checkLongest returns an error if the store grants no term of ttl.
func (c *Client) checkLongest(ttl time.Duration) error {
	if longest := c.traits.MaxTTL; longest > 0 && ttl > longest {
		return fmt.Errorf("%w: ttl %v is above %v, the longest term of this store", ErrInvalid, ttl, longest)
	}
	return nil
}

// renewAt schedules the renewal of h for due, or for up to batchWindow earlier if
// other holds are renewed then, but not earlier by more than a quarter of the time
// until due. Without that bound, renewals of a short term against a store that
// refuses connections at once would run in a tight loop.
func (h *hold) renewAt(now, due instant) {
	h.due = due
	h.early = min(batchWindow, max(due.sub(now), 0)/4)
}

// idles reports whether the next renewal of h is neither queued nor in flight.
func (h *hold) idles() bool { return h.renew && h.busy == nil && !h.queued }

// renewal returns the claim of the next renewal, or false if h is not to be
// renewed. Wanted reports whether the context of one of its Locks goes on. The
// caller holds mu.
func (h *hold) renewal(now instant, wanted bool) (backend.Claim, bool) {
	cl := h.claim
	if h.index < 0 {
		return cl, false
	}

	switch {
	case wanted:
		h.orphaned = 0
	case h.orphaned == 0:
		h.orphaned = now
	case now.sub(h.orphaned) > cl.TTL*(renewalsPerT-1)/renewalsPerT:
		// All contexts have ended. They may have ended up to TTL/3 before the first
		// renewal that saw it, so the hold has been renewed for a whole term since.
		h.renew = false
		return cl, false
	}

	// WithMaxHold bounds what there is to ask for.
	if instant(h.deadline.Load()) >= h.limit {
		h.renew = false // nothing is left to ask for
		return cl, false
	}
	if left := h.limit.sub(now); left < cl.TTL {
		cl.TTL = min(cl.TTL, termFor(left))
	}
	return cl, true
}

// answer notes the outcome of a renewal or an Extend that asked for ttl and was
// sent at start.
func (c *Client) answer(h *hold, ttl time.Duration, start instant, slept int64, g backend.Grant, err error) {
	now, _ := c.look()
	c.mu.Lock()
	h.idle()

	var gone []*Lease
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
			h.renewAt(now, now+1) // it was sent before the Break: ask again
		}
		c.schedule(h)
	case errors.Is(err, ErrLost):
		gone = c.loseLocked(h)
		// Part of the store may still have the hold, such as a minority of a
		// quorum's nodes. That would block the key for the next holder.
		c.reapHold(h)
	default:
		h.failed++
		h.renewAt(now, now.add(jitter(h.claim.TTL/(3*triesPerT))))
		failed = true
		c.schedule(h)
	}
	c.mu.Unlock()

	c.endContexts(gone, ErrLost)
	if failed {
		c.observeLater(Event{Kind: EventRenewFailed, Key: h.first.key, Fence: h.fence, Err: err})
	}
}

// idle notes that the renewal or Extend in flight has ended. The caller holds mu.
func (h *hold) idle() {
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
	c.schedule(h)
}

// handOver gives h, whose last lease was unlocked, to the next caller in line. It
// returns false if that caller cannot have it as it is: then h is released. A
// hand-over costs no call, because the store knows the Client's token only, and
// has confirmed it a moment ago. The caller holds mu.
func (c *Client) handOver(h *hold) bool {
	ln := h.line
	if ln.hold != h || ln.waiting.empty() || ln.turns >= c.turns || h.extended || !h.renew ||
		h.claim.Fenced || h.limit != never || c.closing.Err() != nil {
		return false
	}

	now := c.clock.now()
	next := ln.waiting.first.r
	if h.confirmed <= h.distrusted || now.sub(h.confirmed) >= freshEnough || now >= instant(h.deadline.Load()) ||
		next.ttl != h.claim.TTL || next.noRenew || next.fenced || next.maxHold > 0 {
		return false
	}

	t := ln.waiting.pop()
	ln.turns++
	c.leave(ln) // the caller that unlocks; the line already counts the next one
	t.ready <- ticket{lease: c.lease(t.ctx, t.r, h, now)}
	return true
}

// endExpired ends the leases of h whose time is over by the clock, and returns
// them. The caller holds mu. After it has released mu, it passes the leases to
// endContexts.
func (c *Client) endExpired(h *hold, now instant) []*Lease {
	if now >= min(instant(h.deadline.Load()), h.limit) {
		h.lapsed = true
		return c.loseLocked(h)
	}

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
		c.schedule(h)
	}
	return ended
}

// loseLocked ends h as lost, and returns its leases. The caller holds mu. After it
// has released mu, it passes the leases to endContexts.
func (c *Client) loseLocked(h *hold) []*Lease {
	ended := h.leases
	h.leases = nil
	for _, l := range ended {
		l.state.Store(lost)
	}
	c.unschedule(h)
	c.leaveHead(h)
	return ended
}

// closeHold ends the leases of h for Close, and returns them. They can still be
// unlocked. The caller holds mu. After it has released mu, it passes the leases to
// endContexts.
func (c *Client) closeHold(h *hold) []*Lease {
	for _, l := range h.leases {
		l.state.Store(closed)
	}
	c.unschedule(h)
	return append([]*Lease(nil), h.leases...)
}

// expire ends the leases of h whose time is over.
func (c *Client) expire(h *hold) {
	now := c.clock.now()
	c.mu.Lock()
	var gone []*Lease
	if h.index >= 0 {
		gone = c.endExpired(h, now)
	}
	c.mu.Unlock()
	c.endContexts(gone, ErrLost)
}

// endContexts ends the contexts of leases that have ended, and queues their
// events. It does not wait for the observer. The caller does not hold mu, because
// the end of a context runs code of its callers.
func (c *Client) endContexts(ended []*Lease, cause error) {
	for _, l := range ended {
		l.cancel(cause)
		c.observeEnd(l, EventLost, cause)
	}
}

// leaveHead takes h from the head of its line, and lets the next caller go there.
// The second call for a hold does nothing. The caller holds mu.
func (c *Client) leaveHead(h *hold) {
	if h.leftHead {
		return
	}
	h.leftHead = true
	c.open--
	if c.lined {
		c.promoteNext(h.line, nil)
	} else if h.line.hold == h {
		h.line.hold = nil
	}
	c.leave(h.line)
}
