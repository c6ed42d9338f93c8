package hasp

import (
	"context"
	"fmt"
	"sync/atomic"

	"github.com/hasplock/hasp/backend"
)

// hold is one token's hold of a key in the store, and the leases on it: one,
// or several by re-entry.
type hold struct {
	c        *Client
	claim    backend.Claim // what renewals ask for; its TTL is guarded by c.mu
	fence    uint64
	granted  instant      // when the answer came
	deadline atomic.Int64 // instant until which the store's word is trusted; written under c.mu

	// All below is guarded by c.mu.
	line      *line
	leases    []*Lease
	confirmed instant       // start of the last call that the store said yes to
	doubted   instant       // what was confirmed before is not to be relied on
	limit     instant       // no renewal passes it
	due       instant       // next renewal
	orphaned  instant       // when Lock's contexts were first seen to have ended; 0 if not
	lapsed    bool          // lost by its deadline, so that the store may still keep it
	busy      chan struct{} // closed when the renewal or Extend under way ends; nil if none is
	failed    int           // renewals in a row that were not answered
	unrenewed bool          // by WithoutRenewal
	renew     bool
	forgotten bool // it is not at the head of its line any more
	queued    bool // for renewal
	extended  bool
	index     int   // in c.holds; -1 if not there
	first     Lease // the first lease, and its place in leases: one allocation with the hold
	place     [1]*Lease
	next      instant // when the renewer must look at it
}

// outer returns the lease that l re-entered by, or nil.
func (l *Lease) outer() *Lease {
	for o := l.around; o != nil; o = o.around {
		if o.hold == l.hold {
			return o
		}
	}
	return nil
}

// innermost returns the lease of key on c, if any, that ctx is derived from
// and that is held.
func (c *Client) innermost(around *Lease, key string) *Lease {
	for o := around; o != nil; o = o.around {
		if o.c == c && o.key == key && o.Err() == nil {
			return o
		}
	}
	return nil
}

// reenter adds a lease to the hold of outer, or returns nil if that has just
// ended.
func (c *Client) reenter(ctx context.Context, r *request, outer *Lease) (*Lease, error) {
	h := outer.hold
	if r.fenced && !h.claim.Fenced {
		return nil, fmt.Errorf("%w: a fence cannot be had by re-entry of a lease that has none", ErrInvalid)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if outer.state.Load() != held {
		return nil, nil
	}
	now := c.clock.now()
	if r.ttl > h.claim.TTL {
		h.claim.TTL = r.ttl
		h.due = now
	}
	l := c.lease(ctx, r, h, now)
	if !h.renew && !h.unrenewed {
		h.renew, h.orphaned, h.due = true, 0, now
	}
	c.schedule(h)
	return l, nil
}

// lease adds a lease to h. The caller holds mu.
func (c *Client) lease(ctx context.Context, r *request, h *hold, now instant) *Lease {
	l := &h.first
	if l.c != nil {
		l = new(Lease)
	}
	l.c, l.hold, l.key, l.parent, l.around = c, h, r.key, ctx, r.around
	l.since, l.maxHold = now, never
	if r.maxHold > 0 {
		l.maxHold = l.since.add(r.maxHold)
	}
	if h.leases == nil {
		h.leases = h.place[:0]
	}
	h.leases = append(h.leases, l)
	return l
}
