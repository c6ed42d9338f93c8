package hasp

import (
	"context"
	"fmt"
	"slices"
)

// A caller whose context is the context of a lease, or was derived from it, re-enters: if
// that lease, or one around it, holds the key, the new lease shares its hold.

// innermost returns the innermost lease that holds key, or nil if none does. It looks at
// around, which is the innermost lease of the caller's context, and at the leases that
// around is nested in.
func (c *Client) innermost(around *Lease, key string) *Lease {
	for {
		o := c.around(around, key)
		// Err ends the lease if its deadline has passed. It locks mu itself.
		if o == nil || o.Err() == nil {
			return o
		}
	}
}

// around searches the leases on the hold of key for inner and for those that inner is
// nested in. It returns the innermost of them, or nil. The lease may have expired.
func (c *Client) around(inner *Lease, key string) *Lease {
	c.mu.Lock()
	defer c.mu.Unlock()
	if ln := c.lines[key]; ln != nil && ln.hold != nil {
		for _, o := range slices.Backward(ln.hold.leases) {
			if o.state.Load() == held && o.isAround(inner) {
				return o
			}
		}
	}

	// There may be more shared holds of the key than leases around the caller.
	if readers := c.readers[key]; len(readers) > 0 {
		for o := inner; o != nil; o = o.around {
			if o.c == c && readers[o.hold.line] && o.state.Load() == held {
				return o
			}
		}
	}
	return nil
}

// reenter adds a lease to the hold of the key, if a lease around the caller has it. It
// returns nil, nil if there is none, or if it has just ended.
func (c *Client) reenter(ctx context.Context, r *request) (*Lease, error) {
	outer := c.innermost(r.around, r.key)
	if outer == nil {
		return nil, nil
	}
	h := outer.hold
	if h.claim.Shared && !r.shared {
		return nil, fmt.Errorf("%w: the outer lease of the key is shared, and cannot become exclusive; unlock it first", ErrInvalid)
	}
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
		return nil, nil // it ended after innermost had returned it
	}

	// The key must stay taken for the min hold even if the holder dies. Neither a max hold
	// of the outer lease nor a term that is not renewed can be raised.
	now := c.clock.now()
	if r.minHold > 0 {
		end := h.limit
		if h.unrenewed {
			end = min(end, instant(h.deadline.Load()))
		}
		if now.add(r.minHold) > end {
			return nil, fmt.Errorf("%w: the outer lease ends in %v, before the min hold, %v", ErrInvalid, end.sub(now), r.minHold)
		}
	}

	// If the hold is renewed, a renewal asks for a longer term at once. Until its answer,
	// the term is the shorter one.
	if r.ttl > h.claim.TTL {
		h.claim.TTL = r.ttl
		h.distrusted = now // so that a renewal in flight, which asked for less, is followed by another
		h.renewAt(now, now)
	}

	l := c.addLeaseLocked(ctx, r, h, now)
	l.reentry = true
	h.resumeRenewalLocked(now)
	c.scheduleLocked(h)
	return l, nil
}

// resumeRenewalLocked makes renewals of h go on if they have stopped, and reports whether
// they had: the contexts of all Locks had ended, or the term had reached the max hold.
// After it has returned true, the caller schedules h.
func (h *hold) resumeRenewalLocked(now instant) bool {
	if h.renew || h.unrenewed {
		return false
	}
	h.renew, h.orphaned = true, 0
	h.renewAt(now, now)
	return true
}

// nest places l inside l.around. With LockAll, there may be thousands of leases around
// one. So each lease has a second pointer outwards, jump, which may skip many
// leases. Together the pointers are a skip list, in which isAround takes
// logarithmic time. See https://doi.org/10.1016/0020-0190(83)90106-0 (Myers).
func (l *Lease) nest() {
	a := l.around
	l.depth, l.jump = a.depth+1, a
	if j := a.jump; a.depth-j.depth == j.depth-j.jump.depth {
		l.jump = j.jump
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
