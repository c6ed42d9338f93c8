package hasp

import (
	"container/heap"
	"time"
)

// Bounds of renewals in bulk.
const (
	batchSize    = 256                  // claims in one call of the driver
	maxBatches   = 24                   // calls in flight
	maxSuspect   = 8                    // besides, with claims whose last renewal was not answered
	batchWindow  = 5 * time.Millisecond // what is due within it travels together
	lookEvery    = time.Second          // how often the clock is looked at while leases are held
	renewalsPerT = 3                    // a renewal starts at TTL/3
	triesPerT    = 10                   // a try lasts TTL/10 at most
)

// renewer keeps leases alive and ends those that are lost: one goroutine for
// all holds of a Client, which exists while there are any and a moment longer, and one for each
// batch in flight. It never calls the driver itself, so that no store can
// keep it from ending a context in time.
type renewer struct {
	// Guarded by Client.mu, but for wake.
	running bool
	wakesAt instant
	well    lane
	suspect lane // holds whose last renewal was not answered, so that they hold up no others
	wake    chan struct{}
}

func (r *renewer) poke() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// holdHeap orders holds by when the renewer must look at them.
type holdHeap []*hold

func (q holdHeap) Len() int           { return len(q) }
func (q holdHeap) Less(i, j int) bool { return q[i].next < q[j].next }
func (q holdHeap) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].index, q[j].index = i, j
}

// Push is for container/heap.
func (q *holdHeap) Push(x any) {
	h := x.(*hold)
	h.index = len(*q)
	*q = append(*q, h)
}

// Pop is for container/heap.
func (q *holdHeap) Pop() any {
	old := *q
	h := old[len(old)-1]
	old[len(old)-1] = nil
	*q = old[:len(old)-1]
	h.index = -1
	return h
}

// schedule puts h where it belongs in the heap. The caller holds mu.
func (c *Client) schedule(h *hold) {
	h.next = min(instant(h.deadline.Load()), h.limit)
	for _, l := range h.leases {
		h.next = min(h.next, l.maxHold)
	}
	if h.idles() {
		h.next = min(h.next, h.due)
	}
	if h.index < 0 {
		heap.Push(&c.holds, h)
	} else {
		heap.Fix(&c.holds, h.index)
	}
	switch r := &c.renewer; {
	case !r.running:
		r.running = c.spawnLocked(c.runRenewer)
	case h.next < r.wakesAt:
		r.wakesAt = h.next
		r.poke()
	}
}

// unschedule takes h out of the heap. The caller holds mu.
func (c *Client) unschedule(h *hold) {
	if h.index >= 0 {
		heap.Remove(&c.holds, h.index)
	}
}

// runRenewer serves the heap. When that is empty it stays for a moment: a
// caller that locks and unlocks in turns would start a goroutine each time.
func (c *Client) runRenewer() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	idle := false
	for {
		now, _ := c.look()
		c.mu.Lock()
		gone := c.serve(now)
		c.dispatch()
		wakes := now.add(lookEvery)
		if len(c.holds) > 0 {
			wakes = min(wakes, c.holds[0].next)
		} else if idle || c.closing.Err() != nil {
			c.renewer.running = false
			c.mu.Unlock()
			c.tell(gone, ErrLost)
			return
		}
		idle = len(c.holds) == 0
		c.renewer.wakesAt = wakes
		c.mu.Unlock()
		c.tell(gone, ErrLost)
		timer.Reset(wakes.sub(now))
		select {
		case <-timer.C:
		case <-c.renewer.wake:
			idle = false
		}
	}
}

// serve ends what has ended, and queues what is to be renewed. The caller
// holds mu.
func (c *Client) serve(now instant) (gone []*Lease) {
	for len(c.holds) > 0 {
		h := c.holds[0]
		isDue := h.idles() && h.due <= now.add(batchWindow)
		if h.next > now && !isDue {
			return gone
		}
		if ended := c.end(h, now); len(ended) > 0 {
			gone = append(gone, ended...)
			continue
		}
		if isDue {
			h.queued = true
			r := &c.renewer
			if h.failed > 0 {
				r.suspect.holds = append(r.suspect.holds, h)
			} else {
				r.well.holds = append(r.well.holds, h)
			}
		}
		c.schedule(h)
	}
	return gone
}

// idles reports that a renewal of h is to come and is not yet under way or
// about to be.
func (h *hold) idles() bool { return h.renew && h.busy == nil && !h.queued }

// end ends the leases of h whose time is over by the clock, and returns them.
// The caller holds mu and calls tell without it.
func (c *Client) end(h *hold, now instant) []*Lease {
	if now >= min(instant(h.deadline.Load()), h.limit) {
		h.lapsed = true
		return c.lose(h)
	}
	var ended []*Lease
	for i := len(h.leases) - 1; i >= 0; i-- {
		if l := h.leases[i]; now >= l.maxHold {
			h.leases = append(h.leases[:i], h.leases[i+1:]...)
			l.state.Store(lost)
			ended = append(ended, l)
		}
	}
	if len(ended) > 0 && len(h.leases) == 0 {
		h.lapsed = true
		c.lose(h)
	} else if len(ended) > 0 {
		c.schedule(h)
	}
	return ended
}

// lose ends h, and returns its leases, whose state it has changed. The caller
// holds mu and calls tell without it.
func (c *Client) lose(h *hold) []*Lease {
	ended := h.leases
	h.leases = nil
	for _, l := range ended {
		l.state.Store(lost)
	}
	c.unschedule(h)
	c.forget(h)
	return ended
}

// closeHold ends the leases of h for Close. They can still be unlocked. The
// caller holds mu and calls tell without it.
func (c *Client) closeHold(h *hold) []*Lease {
	for _, l := range h.leases {
		l.state.Store(closed)
	}
	c.unschedule(h)
	return append([]*Lease(nil), h.leases...)
}

// tell tells of leases that have ended.
func (c *Client) tell(ended []*Lease, cause error) {
	for _, l := range ended {
		l.cancel(cause)
		c.ended(l, EventLost, cause)
	}
}

// expire ends what has ended of h by the clock, now.
func (c *Client) expire(h *hold) {
	now := c.clock.now()
	c.mu.Lock()
	var gone []*Lease
	if h.index >= 0 {
		gone = c.end(h, now)
	}
	c.mu.Unlock()
	c.tell(gone, ErrLost)
}
