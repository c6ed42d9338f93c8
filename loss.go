package hasp

// This file ends holds that are not unlocked: by the clock, or by an answer of the store.

// endExpiredLocked ends the leases of h whose time is over by the clock, and returns
// them. After the caller has released mu, it calls endContext of each.
func (c *Client) endExpiredLocked(h *hold, now instant) []*Lease {
	if now >= min(instant(h.deadline.Load()), h.limit) {
		h.lapsed = true
		return c.loseLocked(h, h.lapseLocked())
	}

	// The hold goes on. Leases whose WithMaxHold has passed end.
	var ended []*Lease
	for i := len(h.leases) - 1; i >= 0; i-- {
		if l := h.leases[i]; now >= l.maxHold {
			h.leases = append(h.leases[:i], h.leases[i+1:]...)
			l.loseLocked(&LostError{Reason: LostMaxHold})
			ended = append(ended, l)
		}
	}
	if len(ended) > 0 && len(h.leases) == 0 {
		h.lapsed = true
		c.loseLocked(h, nil) // it has no lease left
	} else if len(ended) > 0 {
		c.scheduleLocked(h)
	}
	return ended
}

// lapseLocked returns why h has ended by the clock.
func (h *hold) lapseLocked() *LostError {
	switch {
	case h.limit <= instant(h.deadline.Load()):
		return &LostError{Reason: LostMaxHold}
	case h.failure != nil:
		return &LostError{LostUnanswered, h.failure}
	case !h.renew:
		return &LostError{Reason: LostNotRenewed}
	}
	// Every renewal so far has succeeded, and the next one has had no chance to fail.
	return &LostError{Reason: LostStopped}
}

// loseLocked ends h as lost because of why, and returns its leases. After the caller has
// released mu, it calls endContext of each.
func (c *Client) loseLocked(h *hold, why *LostError) []*Lease {
	ended := h.leases
	h.leases = nil
	for _, l := range ended {
		l.loseLocked(why)
	}
	c.unscheduleLocked(h)
	c.leaveHeadLocked(h)
	return ended
}

// loseLocked ends l as lost because of why, and returns why.
func (l *Lease) loseLocked(why *LostError) error {
	l.loss = why // before state, after which it is read without mu
	l.state.Store(lost)
	return why
}

// expire ends the leases of h whose time is over by the clock.
func (c *Client) expire(h *hold) {
	now := c.clock.now()
	c.mu.Lock()
	var gone []*Lease
	if h.index >= 0 { // otherwise it has ended already
		gone = c.endExpiredLocked(h, now)
	}
	c.mu.Unlock()
	for _, l := range gone {
		l.endContext(l.loss) // not under mu
	}
}

// endContext ends the context of a lease that has ended, and queues its event for the
// observer. The caller must not hold mu, because the end of a context runs code of its
// users.
func (l *Lease) endContext(cause error) {
	if x := l.ctx.Load(); x != nil {
		x.cancel(cause)
	}
	l.c.observeLost(l, cause)
}
