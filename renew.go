package hasp

import (
	"container/heap"
	"context"
	"math/bits"
	"slices"
	"time"

	"github.com/hasplock/hasp/backend"
)

// Bounds of renewals in bulk.
const (
	batchSize    = 256                  // claims in one call of the driver
	maxBatches   = 24                   // calls in flight for tries of one class
	maxSuspect   = 8                    // the same, for holds whose last renewal was not answered
	batchWindow  = 5 * time.Millisecond // renewals that are due within it travel together
	checkEvery   = time.Second          // how often the clock is read while leases are held
	renewalsPerT = 3                    // a renewal starts at TTL/3
	triesPerT    = 10                   // a try lasts at most TTL/10
)

// renewer keeps the leases of a Client alive, and ends those whose deadline has
// passed. It is one goroutine, which runs while there are holds and a moment longer.
// It never calls the driver, so a store that hangs does not delay the end of a
// context. Each batch of renewals has a goroutine of its own.
type renewer struct {
	wake chan struct{} // signals an earlier wakesAt; has room for one

	// All below is guarded by Client.mu.
	running bool    // its goroutine exists
	wakesAt instant // when it serves the holds next
	well    lane    // holds whose last renewal was answered
	suspect lane    // the other holds: their calls may take long, and must not delay the well ones
}

// poke wakes the renewer's goroutine.
func (r *renewer) poke() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// holdHeap orders holds by when the renewer must serve them.
type holdHeap []*hold

func (q holdHeap) Len() int { return len(q) }

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
	if cap(old) > minShrink && len(old) < cap(old)/16 {
		// Give the memory of a burst back.
		*q = slices.Clone(*q)
	}
	h.index = -1
	return h
}

// scheduleLocked puts h at its place in the heap, and wakes the renewer if need be.
func (c *Client) scheduleLocked(h *hold) {
	h.next = min(instant(h.deadline.Load()), h.limit)
	for _, l := range h.leases {
		h.next = min(h.next, l.maxHold)
	}
	if h.idlesLocked() {
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
		now, _ := c.readClock()
		c.mu.Lock()
		gone := c.serveLocked(now)
		c.dispatchLocked()
		wakes := now.add(checkEvery)
		if len(c.holds) > 0 {
			wakes = min(wakes, c.holds[0].next)
		} else if idle || c.closing.Err() != nil {
			c.renewer.running = false
			c.mu.Unlock()
			c.endContexts(gone, ErrLost)
			return
		}
		idle = len(c.holds) == 0
		c.renewer.wakesAt = wakes
		c.mu.Unlock()
		c.endContexts(gone, ErrLost) // not under mu, because it runs code of users

		timer.Reset(wakes.sub(now))
		select {
		case <-timer.C:
		case <-c.renewer.wake:
			idle = false
		}
	}
}

// serveLocked ends the leases whose time is over, and queues the holds whose renewal
// is due. It returns the leases that it has ended.
func (c *Client) serveLocked(now instant) (gone []*Lease) {
	for len(c.holds) > 0 {
		h := c.holds[0]
		isDue := h.idlesLocked() && h.due <= now.add(h.early)
		if h.next > now && !isDue {
			return gone
		}
		if ended := c.endExpiredLocked(h, now); len(ended) > 0 {
			gone = append(gone, ended...)
			continue
		}

		if isDue {
			h.queued = true
			r := &c.renewer
			if h.failed > 0 {
				r.suspect.addLocked(h, c.try(h))
			} else {
				r.well.addLocked(h, c.try(h))
			}
		}
		c.scheduleLocked(h)
	}
	return gone
}

// lane has queues of holds that are due, and counts the calls in flight that renew
// such holds. There is a queue for each class of tries. In a class, the time that a
// try may last varies by at most a factor of two. A batch ends with its shortest try,
// so a batch has holds of one class. Each class has calls of its own, because
// unanswered calls for long terms outlast a short term.
type lane struct {
	queues  [tryClasses][]*hold // each in the order in which the holds became due
	flights [tryClasses]int     // calls in flight
}

// tryClasses is enough for tries from MinTTL/triesPerT to some minutes.
const tryClasses = 16

// try returns how long one try to renew h may last.
func (c *Client) try(h *hold) time.Duration {
	return min(c.opts.Timeout, h.claim.TTL/triesPerT)
}

// addLocked queues h.
func (ln *lane) addLocked(h *hold, try time.Duration) {
	class := min(bits.Len64(uint64(try/(backend.MinTTL/triesPerT))), tryClasses-1)
	ln.queues[class] = append(ln.queues[class], h)
}

// takeLocked removes and returns up to most holds of one queue.
func (ln *lane) takeLocked(class, most int) []*hold {
	q := &ln.queues[class]
	n := min(len(*q), most)
	holds := slices.Clone((*q)[:n])
	*q = slices.Delete(*q, 0, n)
	return holds
}

// dispatchLocked sends the renewals that are due, up to the bounds on calls in
// flight. The others wait, and later travel in larger batches.
func (c *Client) dispatchLocked() {
	c.dispatchLaneLocked(&c.renewer.well, maxBatches)
	c.dispatchLaneLocked(&c.renewer.suspect, maxSuspect)
}

func (c *Client) dispatchLaneLocked(ln *lane, most int) {
	for class := range ln.queues {
		for ln.flights[class] < most && len(ln.queues[class]) > 0 {
			c.dispatchBatchLocked(ln, class)
		}
	}
}

func (c *Client) dispatchBatchLocked(ln *lane, class int) {
	b := &batch{c: c, flights: &ln.flights[class]}
	for _, h := range ln.takeLocked(class, batchSize) {
		h.queued = false
		if h.busy != nil || h.index < 0 {
			continue // an Extend is in flight, or the hold has ended
		}

		if try := c.try(h); len(b.holds) == 0 || try < b.try {
			b.try = try
		}
		h.busy = make(chan struct{})
		b.holds = append(b.holds, h)
	}
	if len(b.holds) > 0 && c.spawnLocked(b.run) {
		*b.flights++
	}
}

// batch is renewals that travel together, of holds from one queue of a lane.
type batch struct {
	c       *Client
	flights *int            // the queue's count of calls; guarded by c.mu
	try     time.Duration   // the shortest try of its holds
	holds   []*hold         // an answered one is replaced by nil, under c.mu
	claims  []backend.Claim // of the holds, by the same index
	sent    instant         // when the call began
	slept   int64           // how long the machine had slept by then
	over    bool            // the call has ended, and later answers do not count; guarded by c.mu
	err     error           // the last answer; guarded by c.mu until the call has ended
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

	// The call has ended, so another batch of the class may be sent.
	c.mu.Lock()
	defer c.mu.Unlock()
	*b.flights--
	c.dispatchLocked()
}

// send makes the call. A claim fails if the driver does not answer it before the call
// ends, or until a moment after ctx has ended.
func (b *batch) send(ctx context.Context) {
	c := b.c
	b.sent, b.slept = c.readClock()

	// If the driver's call outlasts ctx, send does not wait for it: the holds must be
	// tried again before their terms end.
	_, _ = run(c, ctx, nil, nil, func(ctx context.Context) (struct{}, error) {
		c.driver.Renew(ctx, b.claims, b.done)
		return struct{}{}, nil
	}, nil, func() {})

	// Answers that come from now on do not count.
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

// prepare makes the claims. It drops holds that have ended, and holds that must not
// be renewed any more.
func (b *batch) prepare() {
	c := b.c
	wanted, joined := b.wanted() // without mu: it calls contexts
	now, _ := c.readClock()

	c.mu.Lock()
	defer c.mu.Unlock()
	all := b.holds
	b.holds = all[:0]
	for i, h := range all {
		// A lease that joined after wanted had read the leases counts as wanted.
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

// wanted reports for each hold whether at least one of its leases was locked with a
// context that has not ended. It also returns how many leases had joined the hold
// when it read them.
func (b *batch) wanted() (wanted []bool, joined []int) {
	var leases []*Lease
	ends := make([]int, len(b.holds))
	wanted, joined = make([]bool, len(b.holds)), make([]int, len(b.holds))
	b.c.mu.Lock()
	for i, h := range b.holds {
		leases = append(leases, h.leases...)
		ends[i], joined[i] = len(leases), h.joined
	}
	b.c.mu.Unlock()

	// Not under mu: a context may belong to a lease, and then it locks mu.
	from := 0
	for i, to := range ends {
		for _, l := range leases[from:to] {
			wanted[i] = wanted[i] || !l.abandoned()
		}
		from = to
	}
	return wanted, joined
}

// abandoned reports whether Lock's context has ended. Only the batch that renews the
// hold calls it, one at a time. The caller must not hold mu.
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
	b.holds[i], b.err = nil, err
	b.c.mu.Unlock()
	b.c.answer(h, b.claims[i].TTL, b.sent, b.slept, g, err)
}

// renewNow renews h alone, for Extend, which has made it busy.
func (c *Client) renewNow(ctx context.Context, h *hold, cl backend.Claim) error {
	b := &batch{c: c, try: c.opts.Timeout, holds: []*hold{h}, claims: []backend.Claim{cl}}
	b.send(ctx)
	return b.err
}
