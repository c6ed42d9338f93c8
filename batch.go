package hasp

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/hasplock/hasp/backend"
)

// lane is holds that are due, in that order, and how many calls with such
// holds are in flight.
type lane struct {
	holds   []*hold
	flights int
}

// dispatch sends off what is due, as far as there is room: what finds none
// gathers, and travels in larger batches. The caller holds mu.
func (c *Client) dispatch() {
	c.dispatchLane(&c.renewer.well, maxBatches)
	c.dispatchLane(&c.renewer.suspect, maxSuspect)
}

func (c *Client) dispatchLane(ln *lane, most int) {
	for len(ln.holds) > 0 && ln.flights < most {
		b := &batch{c: c, lane: ln}
		n := 0
		for _, h := range ln.holds {
			if len(b.holds) == batchSize {
				break
			}
			if h.busy == nil && h.index >= 0 {
				try := min(c.opts.Timeout, h.claim.TTL/triesPerT)
				if len(b.holds) == 0 {
					b.try = try
				} else if try != b.try {
					break // these have another time to spare
				}
				h.busy = make(chan struct{})
				b.holds = append(b.holds, h)
			}
			h.queued = false
			n++
		}
		ln.holds = slices.Delete(ln.holds, 0, n)
		if len(b.holds) > 0 && c.spawnLocked(b.run) {
			ln.flights++
		}
	}
}

// batch is renewals that travel together: they have the same time to spare
// for one try, and their last try went alike.
type batch struct {
	c      *Client
	lane   *lane
	try    time.Duration
	holds  []*hold
	claims []backend.Claim
	sent   instant
	slept  int64
	over   bool  // the call has ended; guarded by c.mu
	err    error // the last answer; guarded by c.mu until the call has ended
}

// run sends the batch and takes the answers.
func (b *batch) run() {
	c := b.c
	b.prepare()
	if len(b.claims) > 0 {
		ctx, cancel := context.WithTimeout(context.Background(), b.try)
		b.send(ctx)
		cancel()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	b.lane.flights--
	c.dispatch()
}

// send makes the call. What the driver has not answered when it returns has
// failed.
func (b *batch) send(ctx context.Context) {
	c := b.c
	b.sent, b.slept = c.look()
	c.driver.Renew(ctx, b.claims, b.done)
	c.mu.Lock()
	b.over = true
	c.mu.Unlock()
	for i, h := range b.holds {
		if h != nil {
			b.err = noAnswer(b.try)
			c.answer(h, b.claims[i].TTL, b.sent, b.slept, backend.Grant{}, b.err)
		}
	}
}

// prepare makes the claims, and leaves out holds that have ended or that
// nobody wants renewed any more.
func (b *batch) prepare() {
	c := b.c
	wanted := b.wanted()
	now, _ := c.look()
	c.mu.Lock()
	defer c.mu.Unlock()
	all := b.holds
	b.holds = all[:0]
	for i, h := range all {
		if cl, ok := h.renewal(now, wanted[i]); ok {
			b.holds = append(b.holds, h)
			b.claims = append(b.claims, cl)
			continue
		}
		h.idle()
		if h.index >= 0 {
			c.schedule(h)
		}
	}
}

// wanted tells for each hold whether the context that a lease of it was
// locked with goes on. Contexts are not asked under mu: they may be leases'
// own, or anybody's.
func (b *batch) wanted() []bool {
	var leases []*Lease
	ends := make([]int, len(b.holds))
	b.c.mu.Lock()
	for i, h := range b.holds {
		leases = append(leases, h.leases...)
		ends[i] = len(leases)
	}
	b.c.mu.Unlock()
	wanted := make([]bool, len(b.holds))
	from := 0
	for i, to := range ends {
		for _, l := range leases[from:to] {
			ctx, _ := beyondUnlocked(l.parent, l.outer())
			wanted[i] = wanted[i] || ctx.Err() == nil
		}
		from = to
	}
	return wanted
}

// renewal returns what to ask for, or that the hold is not to be renewed. The
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
		// The contexts ended up to TTL/3 before that was seen.
		h.renew = false
		return cl, false
	}
	if instant(h.deadline.Load()) >= h.limit {
		h.renew = false // nothing is left to ask for
		return cl, false
	}
	if left := h.limit.sub(now); left < cl.TTL {
		cl.TTL = min(cl.TTL, termFor(left))
	}
	return cl, true
}

// done takes one answer of the driver.
func (b *batch) done(i int, g backend.Grant, err error) {
	b.c.mu.Lock()
	if b.over || i < 0 || i >= len(b.holds) || b.holds[i] == nil {
		b.c.mu.Unlock()
		return
	}
	h := b.holds[i]
	b.holds[i], b.err = nil, err
	b.c.mu.Unlock()
	b.c.answer(h, b.claims[i].TTL, b.sent, b.slept, g, err)
}

// answer takes the outcome of a renewal or an Extend for ttl, sent at start.
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
		// Unlocked or lost meanwhile: the answer changes nothing.
	case err == nil:
		// Answers may arrive in any order, and the store shortens nothing.
		h.deadline.Store(max(h.deadline.Load(), int64(until)))
		h.confirmed = max(h.confirmed, start)
		h.failed = 0
		h.due = max(start.add(spread(min(h.claim.TTL, until.sub(start))/renewalsPerT)), now.add(minSleep))
		if start <= h.doubted {
			h.due = now + 1
		}
		c.schedule(h)
	case errors.Is(err, ErrLost):
		gone = c.lose(h)
	default:
		h.failed++
		h.due = now.add(jitter(h.claim.TTL / (3 * triesPerT)))
		failed = true
		c.schedule(h)
	}
	c.mu.Unlock()
	c.tell(gone, ErrLost)
	if failed {
		c.observe(Event{Kind: EventRenewFailed, Key: h.first.key, Fence: h.fence, Err: err})
	}
}

// idle says that no renewal is under way. The caller holds mu.
func (h *hold) idle() {
	if h.busy != nil {
		close(h.busy)
		h.busy = nil
	}
}

// renewNow renews h alone, for Extend, which has made it busy.
func (c *Client) renewNow(ctx context.Context, h *hold, cl backend.Claim) error {
	b := &batch{c: c, try: c.opts.Timeout, holds: []*hold{h}, claims: []backend.Claim{cl}}
	b.send(ctx)
	return b.err
}
