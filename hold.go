package hasp

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
)

// hold is one token's hold of a key in the store. It has one lease, or several by re-entry.
//
// A hold begins with a grant (newHold, startLocked). Answers of the store renew it (answer). When
// its last lease is unlocked, the next caller in line may get it (handOverLocked). It ends when it
// is released, when the store reports that it is lost (loseLocked), when its deadline or its max
// hold passes (endExpiredLocked), or when the Client is closed (Close).
type hold struct {
	c        *Client
	claim    backend.Claim // what renewals ask for; its TTL is guarded by mu
	fence    uint64        // 0 unless a fence was asked for
	granted  instant       // when the grant was received
	deadline atomic.Int64  // instant until which the lease is trusted; written under mu

	// All below is guarded by mu.
	line   *line    // the line of its key
	leases []*Lease // those neither lost nor unlocked; an inner lease comes after those around it

	// The state in the store, as far as this Client can tell.
	kept      instant // the store may keep the hold until then: the latest end of a requested term, answered or not
	confirmed instant // when the last call that confirmed it began; see newHold for a Waiter's grant
	raised    instant // when a re-entry raised the term that renewals ask for; earlier calls asked for less
	limit     instant // the end of WithMaxHold, or never; renewals ask for a term that ends just after it
	keep      instant // the latest end of a min hold that counts, or 0; a release leaves the key taken until then

	// Its renewal.
	due      instant       // when the next renewal begins
	early    time.Duration // how much earlier it may begin, to share a batch with others
	busy     chan struct{} // closed when the renewal or Extend in flight ends; nil if there is none
	failure  error         // why the last of the renewals that failed did; nil if there is none
	orphaned instant       // when a renewal first noticed that the contexts of all Locks have ended; else 0
	failed   int32         // consecutive renewals that failed or were not answered; a release counts as well
	index    int32         // in the renewer's heap; -1 if it is not there, because it has ended
	joined   int32         // how many leases it has had so far
	renewal  int8          // renews, paused or unrenewed
	queued   bool          // it waits in a lane for a batch
	extended bool          // Extend was called, so the hold is not handed over
	lapsed   bool          // it ended by its deadline or by WithMaxHold, so the store may still keep it

	// See linger.go.
	linger  time.Duration // how long it may linger, from its grant; of the caller that has it, or had it last
	lingers instant       // until when it lingers; 0 if it does not
	ghost   *Lease        // nil until it lingers for the first time

	// The first lease and its place in leases are part of the hold, to save two allocations.
	first Lease
	place [1]*Lease
}

// States of the renewal of a hold.
const (
	renews    int8 = iota
	paused         // the contexts of all Locks have ended, or the term has reached the max hold
	unrenewed      // WithoutRenewal
)

// newHold returns the hold of a grant, for a call that began at start. Slept is how long the
// machine had slept by then. If the grant's term ended before the answer came, newHold has the
// reaper release the token, and returns errLate.
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
	// a Waiter has granted less than a whole term, the begin of the term is not known, so renewal
	// counts from now. An Ordered driver hands over by a message, which confirms the hold now.
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

// startLocked makes h the hold of ln, and returns its first lease. Waited is how long the Client
// waited for it. Sought says that the first attempt did not get it.
func (h *hold) startLocked(ctx context.Context, r *request, ln *line, waited time.Duration, sought bool) *Lease {
	h.line = ln
	if r.noRenew {
		h.renewal = unrenewed
	}
	ln.startedLocked(h, waited, sought)

	// With a max hold, the first claim may have asked for less than the whole term. Renewals ask
	// for the whole term, but end little after the limit.
	l := h.addLeaseLocked(ctx, r, h.granted)
	if r.maxHold > 0 {
		h.claim.TTL = r.ttl
		h.limit = l.maxHold
	}
	h.c.renewer.scheduleLocked(h)
	return l
}

// addLeaseLocked adds a lease to h.
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
	if len(h.leases) == 0 { // the outermost lease decides
		h.linger = h.lingerFor(r)
	}
	h.leases = append(h.leases, l)
	h.joined++
	return l
}

// handOverLocked gives h, whose last lease was unlocked, to the next caller in line. It returns
// false, and h must be released, if that caller cannot use h, if other Clients should get a turn,
// or if h has left the line. A hand-over needs no call to the store, because the store knows only
// the token of the hold, and has confirmed it a moment ago.
func (h *hold) handOverLocked() bool {
	ln, now := h.line, h.c.clock.now()
	t := ln.first()
	if ln.hold != h || ln.rowOverLocked(now) || !h.suitsLocked(t.r, now) {
		return false
	}
	ln.giveLeaseLocked(t, h.addLeaseLocked(t.ctx, t.r, now))
	return true
}

// suitsLocked reports whether h is just the hold that a caller with r would acquire, and the store
// has confirmed h a moment ago.
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

// passableLocked reports whether a later caller may have h: nothing was asked for that is only its
// first caller's.
func (h *hold) passableLocked() bool {
	return !h.extended && h.renewal == renews && !h.claim.Fenced && h.limit == never && h.keep == 0
}
