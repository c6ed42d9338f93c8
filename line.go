package hasp

import (
	"context"
	"time"

	"github.com/hasplock/hasp/backend"
)

// Bounds of a hand-over within the line.
const (
	freshEnough = 50 * time.Millisecond // since the store last confirmed the hold
	maxTurns    = 32                    // holds of one key in a row, before others get their turn
)

// line is the callers of one Client that want or have one key. All of it is
// guarded by Client.mu. It exists while anybody is in it, so that a key that
// was used once leaves nothing behind.
//
// At most one caller is at the head: it talks to the store, or holds the key,
// or gives it back. A driver that keeps the order itself has all callers talk
// to the store, and its lines only count, unless several may share a place in
// its queue: then that place is the head's.
type line struct {
	key     string
	callers int    // in this line, the head and the holder included
	talking bool   // somebody is at the head
	hold    *hold  // the head's, while it is trusted
	waiting []turn // in order of arrival
	turns   int    // holds in a row of this Client while others of it waited; in an ordered driver, on one place
	said    error  // the store's last word on the key: ErrHeld, or an outage
	ailing  instant
	sick    bool // since ailing no attempt was answered
}

// turn is one caller's place in the line. What ends the wait comes through
// ready, at most once: the head, or a lease.
type turn struct {
	r     *request
	ctx   context.Context
	since instant
	ready chan ticket
}

// ticket lets a caller out of the line: with the lease it was handed, with an
// error, or with neither to the head.
type ticket struct {
	lease *Lease
	err   error
	after time.Duration  // how long to leave the key to others first
	place *backend.Claim // the place in the driver's queue of the head before, if that has given up
}

// maxSpare is how many lines are kept for reuse.
const maxSpare = 64

// enter puts a caller into the line of key. The caller holds mu.
func (c *Client) enter(key string) *line {
	ln := c.lines[key]
	if ln == nil {
		if n := len(c.spare); n > 0 {
			ln, c.spare = c.spare[n-1], c.spare[:n-1]
		} else {
			ln = new(line)
		}
		ln.key = key
		c.lines[key] = ln
	}
	ln.callers++
	c.callers++
	return ln
}

// leave takes a caller out. The last one leaves a line that nobody refers to.
// The caller holds mu.
func (c *Client) leave(ln *line) {
	c.callers--
	c.notify()
	if ln.callers--; ln.callers > 0 {
		return
	}
	delete(c.lines, ln.key)
	if len(c.spare) < maxSpare {
		*ln = line{}
		c.spare = append(c.spare, ln)
	}
}

// yield lets the next in line go to the head, with the place in the driver's
// queue that the last one has left, if it is what the next one wants. The
// caller holds mu.
func (c *Client) yield(ln *line, place *backend.Claim) {
	ln.talking, ln.hold = false, nil
	if place != nil && !c.inherits(ln, place) {
		c.reapLocked(*place, reapOnce)
		place = nil
	}
	if len(ln.waiting) == 0 {
		ln.turns = 0
		return
	}
	next := ln.pop()
	ln.talking = true
	t := ticket{place: place}
	if !c.traits.Ordered && ln.turns >= c.turns {
		ln.turns = 0
		t.after = max(2*c.roundTrip(), minSleep)
	}
	next.ready <- t
}

// inherits reports whether the next in line wants just what a place in the
// driver's queue was taken for. The caller holds mu.
func (c *Client) inherits(ln *line, place *backend.Claim) bool {
	if len(ln.waiting) == 0 || c.closing.Err() != nil {
		return false
	}
	want := c.claim(ln.waiting[0].r, place.Token)
	want.Stays = true
	return want == *place
}

func (ln *line) pop() turn {
	next := ln.waiting[0]
	ln.waiting[0] = turn{}
	ln.waiting = ln.waiting[1:]
	return next
}

// drop takes a turn out of the line, or reports that it had its ticket
// already.
func (ln *line) drop(t turn) bool {
	for i := range ln.waiting {
		if ln.waiting[i].ready == t.ready {
			ln.waiting = append(ln.waiting[:i], ln.waiting[i+1:]...)
			return true
		}
	}
	return false
}

// handOver gives the hold of the last lease on it to the next in line, if that
// one can have it as it is. The store is not told: it knows the Client's
// token, and confirmed it a moment ago. The caller holds mu.
func (c *Client) handOver(h *hold) bool {
	ln := h.line
	if ln.hold != h || len(ln.waiting) == 0 || ln.turns >= c.turns || h.extended || !h.renew ||
		h.claim.Fenced || h.limit != never || c.closing.Err() != nil {
		return false
	}
	now := c.clock.now()
	next := ln.waiting[0].r
	if h.confirmed <= h.doubted || now.sub(h.confirmed) >= freshEnough || now >= instant(h.deadline.Load()) ||
		next.ttl != h.claim.TTL || next.noRenew || next.fenced || next.maxHold > 0 {
		return false
	}
	t := ln.pop()
	ln.turns++
	c.leave(ln) // the one that unlocks; the next is counted already
	t.ready <- ticket{lease: c.lease(t.ctx, t.r, h, now)}
	return true
}

// pass lets the next go after the head has given up, and lets those give up
// too who have ridden out the same outage as long. The caller holds mu.
func (c *Client) pass(ln *line, place *backend.Claim) {
	if ln.sick {
		now := c.clock.now()
		for len(ln.waiting) > 0 && now.sub(max(ln.ailing, ln.waiting[0].since)) >= c.opts.Timeout {
			ln.pop().ready <- ticket{err: ln.said}
		}
	}
	c.yield(ln, place)
}

// why is why a caller in line does not have the key: this Client holds it, or
// what the store said last to the head. The caller holds mu.
func (c *Client) why(ln *line) error {
	switch {
	case ln.hold != nil:
		left := instant(ln.hold.deadline.Load()).sub(c.clock.now())
		return &backend.HeldError{Owner: c.opts.Owner, RetryAfter: max(left, 0)}
	case ln.said != nil:
		return ln.said
	}
	return &backend.HeldError{}
}

// hold makes h known and returns its first lease. The caller holds mu.
func (c *Client) hold(ctx context.Context, r *request, ln *line, h *hold) *Lease {
	h.line, h.renew, h.unrenewed = ln, !r.noRenew, r.noRenew
	ln.hold, ln.said, ln.sick = h, nil, false
	switch {
	case c.traits.Ordered:
		ln.turns = 1
	case len(ln.waiting) > 0:
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

// forget ends a hold's place at the head, if it has not ended. The caller
// holds mu.
func (c *Client) forget(h *hold) {
	if h.forgotten {
		return
	}
	h.forgotten = true
	c.open--
	if c.lined {
		c.yield(h.line, nil)
	} else if h.line.hold == h {
		h.line.hold = nil
	}
	c.leave(h.line)
}
