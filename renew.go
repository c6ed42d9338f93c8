package hasp

import (
	"context"
	"errors"
	"math/bits"
	"slices"
	"time"

	"github.com/hasplock/hasp/backend"
)

// Bounds of renewals in bulk.
const (
	batchSize    = 256                   // claims in one call of the driver
	maxBatches   = 24                    // calls in flight of a lane
	maxSuspect   = 8                     // the same, for holds whose last renewal failed or was not answered
	minWindow    = 5 * time.Millisecond  // the shortest window; see windowsPerT
	maxWindow    = 50 * time.Millisecond // the longest window
	windowsPerT  = 100                   // renewals that are due within TTL/100, the window, travel together
	checkEvery   = time.Second           // how often the clock is read while leases are held
	renewalsPerT = 3                     // a renewal starts at TTL/3
	overdueTerms = 10                    // a lease that is held for longer is reported: EventStillHeld
	triesPerT    = 10                    // a try lasts at most TTL/10, the second of a renewal TTL/5
)

// lane is the holds of one class that are due, and the calls in flight that renew such
// holds. In a class, the time that a try may last varies by at most a factor of two. A
// batch ends with its shortest try, so a batch has holds of one lane. Each lane has calls
// of its own, because unanswered calls for long terms outlast a short term. And holds
// whose last renewal failed have lanes of their own, because their calls may take long,
// and must not delay the other holds.
type lane struct {
	queue   []*hold // in the order in which the holds became due
	flights int     // calls in flight
}

// tryClasses is enough for tries from MinTTL/triesPerT to some minutes.
const tryClasses = 16

// tryLocked returns how long one try to renew h may last.
func (c *Client) tryLocked(h *hold) time.Duration {
	try := h.termLocked() / triesPerT
	if h.failed == 1 {
		// A short try soon shows that its connection is dead. But a distant store may need
		// longer to answer on a new connection, so the second try lasts longer. Later ones are
		// short again: one of them must begin soon before the term ends.
		try *= 2
	}
	return min(c.opts.Timeout, try)
}

// termLocked returns the term that h has now. It may be much shorter than the term that
// renewals ask for: after a re-entry that wants a longer one, or a hand-over by the store.
// Renewals must be tried several times before it ends.
func (h *hold) termLocked() time.Duration {
	left := instant(h.deadline.Load()).sub(max(h.confirmed, h.granted))
	return min(h.claim.TTL, termFor(left))
}

// queueRenewalLocked queues h, whose renewal is due.
func (c *Client) queueRenewalLocked(h *hold) {
	lanes := &c.renewer.well
	if h.failed > 0 {
		lanes = &c.renewer.suspect
	}
	// The tries of each class last up to twice as long as those of the class before.
	class := min(bits.Len64(uint64(c.tryLocked(h)/(backend.MinTTL/triesPerT))), tryClasses-1)
	lanes[class].queue = append(lanes[class].queue, h)
}

// dispatchLocked sends the renewals that are due, up to the bounds on calls in
// flight. The others wait, and later travel in larger batches.
func (c *Client) dispatchLocked() {
	for class := range tryClasses {
		c.dispatchLaneLocked(&c.renewer.well[class], maxBatches)
		c.dispatchLaneLocked(&c.renewer.suspect[class], maxSuspect)
	}
}

func (c *Client) dispatchLaneLocked(ln *lane, most int) {
	for ln.flights < most && len(ln.queue) > 0 {
		c.dispatchBatchLocked(ln)
	}
}

// dispatchBatchLocked sends a batch from the queue of a lane.
func (c *Client) dispatchBatchLocked(ln *lane) {
	b := &batch{c: c, lane: ln}
	n := min(len(ln.queue), batchSize)
	holds := slices.Clone(ln.queue[:n])
	ln.queue = slices.Delete(ln.queue, 0, n)
	for _, h := range holds {
		h.queued = false
		if h.busy != nil || h.index < 0 {
			continue // an Extend is in flight, or the hold has ended
		}

		// The batch may last as long as the shortest of its tries.
		if try := c.tryLocked(h); len(b.holds) == 0 || try < b.try {
			b.try = try
		}
		h.busy = make(chan struct{})
		b.holds = append(b.holds, h)
	}
	if len(b.holds) > 0 && c.spawnLocked(b.run) {
		ln.flights++
	}
}

// batch is renewals that travel together, of holds from one lane.
type batch struct {
	c      *Client
	lane   *lane           // nil for an Extend
	try    time.Duration   // the shortest try of its holds
	holds  []*hold         // an answered one is replaced by nil, under c.mu
	claims []backend.Claim // of the holds, by the same index
	sent   instant         // when the call began
	slept  int64           // how long the machine had slept by then
	over   bool            // the call has ended, and later answers do not count; guarded by c.mu
	err    error           // the last outcome, for Extend, which is a batch of one; guarded by c.mu
}

// run sends the batch and takes the answers.
func (b *batch) run() {
	c := b.c
	b.prepare()
	if len(b.claims) > 0 {
		b.send(context.Background(), b.try)
	}

	// The call has ended or was left behind, so another batch of the lane may be sent.
	c.mu.Lock()
	defer c.mu.Unlock()
	b.lane.flights--
	c.dispatchLocked()
}

// send makes the call, which lasts for bound at most if bound is above 0. A claim fails if it
// has no answer when the call ends, or a moment after ctx or the bound has ended.
func (b *batch) send(ctx context.Context, bound time.Duration) {
	c := b.c
	b.sent, b.slept = c.clock.read()

	// If the driver's call outlasts its context, send does not wait for it: the holds must be
	// tried again before their terms end.
	_, _ = run(&c.store, ctx, bound, nil, nil, func(ctx context.Context) (struct{}, error) {
		c.store.driver.Renew(ctx, b.claims, b.done)
		return struct{}{}, nil
	}, nil)

	// Answers that come from now on do not count.
	c.mu.Lock()
	b.over = true
	c.mu.Unlock()

	for i, h := range b.holds {
		if h != nil {
			b.answer(i, h, backend.Grant{}, noAnswer(b.try))
		}
	}
}

// prepare makes the claims. It drops holds that have ended, and holds that must not
// be renewed any more.
func (b *batch) prepare() {
	c, all := b.c, b.holds
	leases, joined := make([][]*Lease, len(all)), make([]int, len(all))
	c.mu.Lock()
	for i, h := range all {
		leases[i], joined[i] = slices.Clone(h.leases), h.joined
	}
	c.mu.Unlock()

	// Is at least one lease of each hold locked with a context that has not ended? This is
	// not under mu: a context may belong to a lease, and then it locks mu.
	wanted := make([]bool, len(all))
	for i := range all {
		wanted[i] = slices.ContainsFunc(leases[i], func(l *Lease) bool { return !l.abandoned() })
	}
	now, _ := c.clock.read()

	c.mu.Lock()
	defer c.mu.Unlock()
	b.holds = all[:0]
	for i, h := range all {
		// A lease that has joined since the leases were read counts as wanted.
		if cl, ok := h.renewalLocked(now, wanted[i] || h.joined != joined[i]); ok {
			h.kept = max(h.kept, now.add(cl.TTL))
			b.holds = append(b.holds, h)
			b.claims = append(b.claims, cl)
			continue
		}

		h.callEndedLocked()
		if h.index >= 0 {
			c.scheduleLocked(h)
		}
	}
}

// abandoned reports whether Lock's context has ended. Only the batch that renews the
// hold calls it, so no two calls for a lease run at once. The caller must not hold mu.
//
// The context may be of any type. If its methods are slow, they must not delay the
// other renewals of the batch. So Done is called once, and Err never.
func (l *Lease) abandoned() bool {
	if !l.parentDoneRead {
		l.parentDoneRead, l.parentDone = true, l.parent.Done()
	}
	return isClosed(l.parentDone)
}

// done takes the driver's answer to the claim with index i.
func (b *batch) done(i int, g backend.Grant, err error) {
	// The driver may answer on any goroutine, twice, or after send has given up. The
	// first to set holds[i] to nil decides.
	b.c.mu.Lock()
	if b.over || i < 0 || i >= len(b.holds) || b.holds[i] == nil {
		b.c.mu.Unlock()
		return // too late, or not the first answer
	}

	h := b.holds[i]
	b.holds[i] = nil
	b.c.mu.Unlock()
	if err != nil && !backend.Definite(err) {
		err = plain(err, b.try) // the context that has ended is the engine's own
	}
	b.answer(i, h, g, err)
}

// renewNow renews h alone, for Extend, which has made it busy. The call lasts for bound
// at most.
func (c *Client) renewNow(ctx context.Context, h *hold, cl backend.Claim, bound time.Duration) error {
	b := &batch{c: c, try: bound, holds: []*hold{h}, claims: []backend.Claim{cl}}
	b.err = noAnswer(bound) // send may return just before done has noted an answer
	b.send(ctx, 0)          // call has bounded ctx

	c.mu.Lock()
	defer c.mu.Unlock()
	return b.err
}

// renewalLocked returns the claim of the next renewal, or false if h must not be
// renewed. Wanted says whether the context of at least one of its Locks goes on.
func (h *hold) renewalLocked(now instant, wanted bool) (backend.Claim, bool) {
	cl := h.claim
	if h.index < 0 {
		return cl, false // it has ended
	}

	// Leases of Do and Lead are wanted whatever their contexts say. This is read here and
	// not before, so that a renewal in preparation does not miss a call of
	// renewUntilUnlock.
	switch {
	case wanted, slices.ContainsFunc(h.leases, func(l *Lease) bool { return l.untilUnlock }):
		h.orphaned = 0
	case h.orphaned == 0:
		h.orphaned = now
	case now.sub(h.orphaned) > cl.TTL*(renewalsPerT-1)/renewalsPerT:
		// A renewal notices the end of the contexts after TTL/3 at most, and renewals go
		// on for two thirds of TTL more. So the last one comes within a term of that end.
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

// answer records the outcome of the renewal or the Extend of h, whose claim has index i.
func (b *batch) answer(i int, h *hold, g backend.Grant, err error) {
	c, ttl := b.c, b.claims[i].TTL
	now, _ := c.clock.read()
	c.mu.Lock()
	h.callEndedLocked()

	var gone []*Lease // their contexts end after mu was unlocked
	until := b.sent.add(ttl - backend.Drift(ttl))
	if !g.Until.IsZero() {
		until = c.clock.at(g.Until, b.slept)
	}
	if err == nil && until <= now {
		err = errLate
	}
	b.err = err

	switch {
	case h.index < 0:
		// The hold was unlocked or lost meanwhile. The answer changes nothing.
	case err == nil:
		if g.Handle != nil {
			h.claim.Handle = g.Handle
		}
		h.renewedLocked(now, b.sent, until)
		c.scheduleLocked(h)
		c.observeStillHeldLocked(h, now)
	case errors.Is(err, ErrLost):
		h.failed = 0
		gone = c.loseLocked(h, &LostError{Reason: LostRevoked})
		// A part of the store may still have the hold, such as a minority of a
		// quorum's nodes. That would block the key for the next holder.
		c.reaper.addHoldLocked(h, 0, 0)
	default:
		h.failed++
		h.failure = err
		h.renewAt(now, now.add(jitter(h.termLocked()/(3*triesPerT))))
		c.scheduleLocked(h)
		c.observeRenewFailedLocked(h, err)
	}
	c.mu.Unlock()

	for _, l := range gone {
		l.endContext(l.loss)
	}
}

// renewedLocked records that the store has renewed h. The call was sent at start. At
// until the holder must stop trusting the renewal.
func (h *hold) renewedLocked(now, start, until instant) {
	// Answers may arrive in any order, and the store never shortens a term. So an
	// older answer must not move the deadline back.
	h.deadline.Store(max(h.deadline.Load(), int64(until)))
	h.confirmed = max(h.confirmed, start)
	h.failed, h.failure = 0, nil
	h.renewAt(now, max(renewalTime(start, min(h.claim.TTL, until.sub(start))), now.add(minSleep)))
	if start <= h.raised {
		h.renewAt(now, now+1) // the call asked for a shorter term: ask again
	}
}

// observeStillHeldLocked queues an event, once, if the outermost lease of h is held for long
// and its caller must unlock it.
func (c *Client) observeStillHeldLocked(h *hold, now instant) {
	l := h.leases[0]
	if c.opts.Observe == nil || !l.observed || l.overdue || l.untilUnlock || now.sub(l.since) < max(overdueTerms*h.claim.TTL, time.Minute) {
		return
	}
	l.overdue = true
	e := l.event(EventStillHeld, nil)
	e.Hold = now.sub(l.since)
	c.observeLaterLocked(l, e)
}

// callEndedLocked records that the renewal or Extend in flight has ended.
func (h *hold) callEndedLocked() {
	if h.busy != nil {
		close(h.busy)
		h.busy = nil
	}
}
