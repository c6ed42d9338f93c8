package hasp

import (
	"context"
	"fmt"
)

// A caller whose context is the context of a lease, or was derived from it, re-enters: if
// that lease, or one around it, holds the key, the new lease shares its hold.

// reenter adds a lease to the hold of the innermost lease around the caller that holds the
// key, or a slot of it if r has slots. It returns nil, nil if there is none.
func (c *Client) reenter(ctx context.Context, r *request) (*Lease, error) {
	if r.apart {
		return nil, nil
	}
	for o := r.around; o != nil; o = o.around {
		if o.hold.c != c || o.key != r.name || (o.slot > 0) != (r.slots > 0) || o.Err() != nil {
			continue
		}
		if l, err := c.join(ctx, r, o); l != nil || err != nil {
			return l, err
		}
	}
	return nil, nil
}

// join adds a lease to the hold of outer. It returns nil, nil if outer has just ended.
func (c *Client) join(ctx context.Context, r *request, outer *Lease) (*Lease, error) {
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
		return nil, nil
	}

	now := c.clock.now()

	// If the hold is renewed, a renewal asks for a longer term at once. Until its answer,
	// the term is the shorter one.
	if r.ttl > h.claim.TTL {
		h.claim.TTL = r.ttl
		h.raised = now
		h.renewAt(now, now)
	}

	r.slot = outer.slot
	l := h.addLeaseLocked(ctx, r, now)
	l.reentry = true
	h.resumeRenewalLocked(now)
	c.renewer.scheduleLocked(h)
	return l, nil
}
