package hasp

import (
	"container/heap"
	"context"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
)

// hold is one token's hold of a key in the store. It has one lease, or several by
// re-entry.
//
// A hold begins with a grant (newHold, Client.startHoldLocked). Answers of the store
// renew it (answer). When its last lease is unlocked, the next caller in line may
// get it (handOverLocked). It ends when it is released, when the store reports that
// it is lost (loseLocked), when its deadline or its max hold passes (endExpiredLocked),
// or when the Client is closed (Close).
type hold struct {
	claim    backend.Claim // what renewals ask for; its TTL is guarded by c.mu
	fence    uint64        // 0 unless a fence was asked for
	granted  instant       // when the grant was received
	deadline atomic.Int64  // instant until which the lease is trusted; written under c.mu

	// All below is guarded by c.mu.
	line   *line    // the line of its key
	leases []*Lease // the leases that are neither lost nor unlocked; an inner lease comes after those around it
	joined int      // how many leases it has had so far

	// What the store knows, as far as this Client can tell.
	kept      instant // until when the store may keep it: the latest end of a requested term, answered or not
	confirmed instant // when the last call that confirmed it began; see newHold for a Waiter's grant
	raised    instant // when a re-entry raised the term that renewals ask for: a call that began earlier asked for less
	limit     instant // the end of WithMaxHold: renewals ask for little more
	keep      instant // the latest end of WithMinHold that counts: a release before leaves the key taken until then; 0 if there is none

	// Its renewal.
	renew     bool          // renewals go on
	unrenewed bool          // WithoutRenewal: renew was never true
	due       instant       // when the next renewal begins
	early     time.Duration // how much earlier it may begin, to travel with others
	queued    bool          // it waits in a lane for a batch
	busy      chan struct{} // closed when the renewal or Extend in flight ends; nil if there is none
	failed    int           // consecutive renewals that failed or were not answered; a release counts as well
	failure   error         // why the last of these renewals failed; nil if there is none
	orphaned  instant       // when a renewal first noticed that the contexts of all Locks have ended; else 0
	extended  bool          // Extend was called, so the hold is not handed over
	index     int           // in c.holds; -1 if it is not there, because it has ended

	// Its end.
	lapsed bool // it ended by its deadline or by WithMaxHold, so the store may still keep it

	// The first lease and its slot in leases are part of the hold, to save two
	// allocations.
	first Lease
	place [1]*Lease
}

// newHold returns a hold for a grant. The call began at start. Slept is how long the
// machine had slept by then, or when the first Wait with the same token began. If the
// grant's term has ended before the answer came, newHold releases the token in the
// background and returns errLate.
func (c *Client) newHold(cl backend.Claim, g backend.Grant, start, now instant, slept int64) (*hold, error) {
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

	h := &hold{claim: cl, fence: g.Fence, granted: now, kept: now.add(cl.TTL), limit: never, index: -1}

	// The hold was confirmed when its term began. A Waiter's call may have begun long
	// before that.
	h.confirmed = min(max(start, until.add(-term)), now)
	since := h.confirmed
	if until.add(-term) < start {
		// A Waiter has granted less than a whole term. The term's beginning is not known.
		since = now
		if c.traits.Ordered {
			h.confirmed = now // the message that handed the key over confirms the hold
		}
	}
	h.renewAt(now, renewalTime(since, until.sub(since)))
	h.deadline.Store(int64(until))
	return h, nil
}

// startHoldLocked makes h the hold of ln, and returns its first lease.
func (c *Client) startHoldLocked(ctx context.Context, r *request, ln *line, h *hold) *Lease {
	h.line, h.renew, h.unrenewed = ln, !r.noRenew, r.noRenew
	ln.hold, ln.lastAnswer, ln.outage, ln.unanswered = h, nil, 0, 0
	// A caller may come during the hold and get it by a hand-over. So the row begins
	// here even if no caller waits yet.
	if ln.pace.began == 0 || ln.turns == 0 && ln.sought {
		ln.pace.began = h.granted
	}
	if ln.first() != nil {
		ln.turns++
	}
	c.open++

	// With a max hold, the first claim may have asked for less than the whole term.
	// Renewals ask for the whole term, or until a little after the limit if that is less.
	l := c.addLeaseLocked(ctx, r, h, h.granted)
	if r.maxHold > 0 {
		h.claim.TTL = r.ttl
		h.limit = l.maxHold
	}
	c.scheduleLocked(h)
	return l
}

// addLeaseLocked adds a lease to h.
func (c *Client) addLeaseLocked(ctx context.Context, r *request, h *hold, now instant) *Lease {
	// The hold has room for its first lease. Later ones are allocated.
	l := &h.first
	if l.c != nil {
		l = new(Lease)
	}
	l.c, l.hold, l.key, l.slot, l.parent, l.around = c, h, r.name, r.slot, ctx, r.around
	l.id, l.op, l.shared = r.id, r.op, r.shared
	l.since, l.maxHold = now, never
	if r.maxHold > 0 {
		l.maxHold = l.since.add(r.maxHold)
	}
	if r.minHold > 0 {
		l.keep = l.since.add(r.minHold) // it counts once the call has returned; see countMinHold
	}

	if h.leases == nil {
		h.leases = h.place[:0]
	}
	h.leases = append(h.leases, l)
	h.joined++
	return l
}

// renewalTime returns when to renew a term that began at since: after a third, less a
// random part of up to a tenth of that. So the renewals of holds that were taken together
// become due at different times.
func renewalTime(since instant, term time.Duration) instant {
	third := term / renewalsPerT
	return since.add(third - rand.N(third/10+1))
}

// renewAt sets the time of the next renewal to due. If other holds are renewed up to a
// window earlier, the renewal travels with them, but not earlier by more than a
// quarter of the time until due. Without that bound, renewals of a short term would
// run in a tight loop against a store that refuses connections at once.
func (h *hold) renewAt(now, due instant) {
	h.due = due
	window := min(max(h.claim.TTL/windowsPerT, minWindow), maxWindow)
	h.early = min(window, max(due.sub(now), 0)/4)
}

// leaveHeadLocked takes h, which has ended, from the head of its line, and promotes the
// next caller.
func (c *Client) leaveHeadLocked(h *hold) {
	c.open--
	c.slotFreedLocked(h)
	ln := h.line
	switch {
	case h.claim.Shared:
	case ln.callers == 1: // the line ends
		c.lineEndsLocked(ln)
	case !c.traits.Ordered:
		c.promoteNextLocked(ln)
	case ln.hold == h:
		ln.hold = nil
	}
	c.leaveLocked(ln)
}

// renewer keeps the leases of a Client alive, and ends those whose deadline has
// passed. It is one goroutine, which runs while there are holds and a moment longer.
// It never calls the driver, so a store that hangs does not delay the end of a
// context. Each batch of renewals has a goroutine of its own.
type renewer struct {
	wake chan struct{} // signals an earlier wakesAt; has room for one

	// All below is guarded by Client.mu.
	running bool             // its goroutine exists
	wakesAt instant          // when it serves the holds next
	well    [tryClasses]lane // of holds whose last renewal succeeded, or that were not renewed yet
	suspect [tryClasses]lane // of the other holds
}

// holdHeap orders holds by when the renewer must serve them. These times are not in the
// holds, because a comparison that reads the holds waits for memory: with 30,000 leases that
// was a quarter of the cost of a renewal.
type holdHeap []scheduled

type scheduled struct {
	next instant
	hold *hold
}

func (q holdHeap) Len() int { return len(q) }

func (q holdHeap) Less(i, j int) bool { return q[i].next < q[j].next }

func (q holdHeap) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].hold.index, q[j].hold.index = i, j
}

// Push is for container/heap.
func (q *holdHeap) Push(x any) {
	h := x.(*hold)
	h.index = len(*q)
	*q = append(*q, scheduled{never, h})
}

// Pop is for container/heap.
func (q *holdHeap) Pop() any {
	old := *q
	h := old[len(old)-1].hold
	old[len(old)-1].hold = nil
	*q = old[:len(old)-1]
	h.index = -1
	return h
}

// scheduleLocked puts h into the heap or moves it there, and wakes the renewer if need be.
func (c *Client) scheduleLocked(h *hold) {
	// The renewer serves h when the hold ends, when one of its leases ends, or when a
	// renewal is due, whichever is first.
	next := min(instant(h.deadline.Load()), h.limit)
	for _, l := range h.leases {
		next = min(next, l.maxHold)
	}
	if h.renew && h.busy == nil && !h.queued {
		next = min(next, h.due)
	}
	if h.index < 0 {
		heap.Push(&c.holds, h)
	}
	c.holds[h.index].next = next
	heap.Fix(&c.holds, h.index)

	// A renewer that sleeps past the new time is woken.
	switch r := &c.renewer; {
	case !r.running:
		r.running = c.spawnLocked(c.runRenewer)
	case next < r.wakesAt:
		r.wakesAt = next
		poke(r.wake)
	}
}

// unscheduleLocked takes h out of the heap.
func (c *Client) unscheduleLocked(h *hold) {
	if h.index >= 0 {
		heap.Remove(&c.holds, h.index)
	}
}

// runRenewer serves the holds in the heap. When the heap is empty, it stays for a
// moment. Otherwise a program that locks and unlocks in a loop would start a
// goroutine each time.
func (c *Client) runRenewer() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	idle := false // the heap was empty in the last round
	for {
		now, _ := c.clock.read()
		c.mu.Lock()
		gone := c.serveLocked(now)
		wakes := now.add(checkEvery)
		if len(c.holds) > 0 {
			wakes = min(wakes, c.holds[0].next)
		}
		over := len(c.holds) == 0 && (idle || c.closing.Err() != nil)
		idle = len(c.holds) == 0
		c.renewer.running, c.renewer.wakesAt = !over, wakes
		c.mu.Unlock()

		for _, l := range gone {
			l.endContext(l.loss) // not under mu
		}
		if over {
			return
		}

		timer.Reset(wakes.sub(now))
		select {
		case <-timer.C:
		case <-c.renewer.wake:
			idle = false
		}
	}
}

// serveLocked ends the leases whose time is over, and begins the renewals that are due.
// It returns the leases that it has ended.
func (c *Client) serveLocked(now instant) (gone []*Lease) {
	due := 0
	for len(c.holds) > 0 {
		h := c.holds[0].hold
		isDue := h.renew && h.busy == nil && !h.queued && h.due <= now.add(h.early)
		if c.holds[0].next > now && !isDue {
			break
		}
		if ended := c.endExpiredLocked(h, now); len(ended) > 0 {
			gone = append(gone, ended...)
			continue
		}

		if isDue {
			due++
			h.queued = true
			c.queueRenewalLocked(h)
		}
		c.scheduleLocked(h)
	}
	if due > 0 {
		c.dispatchLocked()
	}
	return gone
}
