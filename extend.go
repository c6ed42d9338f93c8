package hasp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hasplock/hasp/backend"
)

func (l *Lease) extend(ctx context.Context, ttl time.Duration) error {
	if err := checkTTL(ttl); err != nil {
		return err
	}
	c, h := l.hold.c, l.hold
	start := c.clock.now()
	cl, bound, err := l.beginExtend(ctx, ttl)
	if err != nil {
		return err
	}

	if err = c.enter(); err == nil {
		_, err = call(&c.store, ctx, bound, func(ctx context.Context) (struct{}, error) {
			return struct{}{}, c.renewer.extend(ctx, h, cl, bound)
		}, nil)
		c.leave()
	}

	c.mu.Lock()
	if c.stopped {
		h.callEndedLocked() // Close has stopped waiting, so the call may not have begun
	}
	c.mu.Unlock()

	// Report a term that is too short: a store without space may renew the hold only for its
	// present term.
	if err == nil && l.end() < start.add(ttl-backend.Drift(ttl)) {
		err = &backend.UnavailableError{Err: errors.New("the store has granted a shorter term")}
	}

	// Read the clock, because the answer may have come after the lease's end.
	return cmp.Or(l.Err(), err)
}

// beginExtend waits for the end of a renewal in flight, and then marks the hold as busy. It returns
// the claim to renew, and how long the call may last.
func (l *Lease) beginExtend(ctx context.Context, ttl time.Duration) (backend.Claim, time.Duration, error) {
	for {
		if err := cmp.Or(ctx.Err(), l.Err()); err != nil {
			return backend.Claim{}, 0, err
		}
		cl, bound, inFlight, err := l.tryExtend(ttl)
		if inFlight == nil {
			return cl, bound, err
		}
		select {
		case <-inFlight:
		case <-ctx.Done():
		}
	}
}

// tryExtend is beginExtend, unless a renewal is in flight. Then it returns a channel that is closed
// when the renewal ends.
func (l *Lease) tryExtend(ttl time.Duration) (cl backend.Claim, bound time.Duration, inFlight <-chan struct{}, err error) {
	c, h := l.hold.c, l.hold
	c.mu.Lock()
	defer c.mu.Unlock()
	if h.busy != nil {
		return cl, 0, h.busy, nil
	}
	if l.state.Load() != held {
		return cl, 0, nil, l.cause() // the lease ended after Err had returned
	}
	now := c.clock.now()
	if now.add(ttl) > min(h.limit, l.maxHold) {
		return cl, 0, nil, fmt.Errorf("%w: %v from now is past the lease's max hold", ErrInvalid, ttl)
	}
	cl = h.claim
	cl.TTL = termFor(ttl)
	if err := checkLongest(c.traits, cl.TTL); err != nil {
		// Refuse it here, because a refusal of the store would count as a failed renewal.
		return cl, 0, nil, err
	}

	// Bound the call, so that an Extend without an answer leaves time for renewals.
	term := h.termLocked()
	bound = min(c.opts.Timeout, max(term/triesPerT, time.Duration(l.end()-now)-term/renewalsPerT))
	h.busy, h.extended = make(chan struct{}), true
	h.kept = max(h.kept, now.add(cl.TTL))
	c.renewer.scheduleLocked(h)
	return cl, bound, nil, nil
}
