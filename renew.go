package hasp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/bits"
	"slices"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/calls"
	"github.com/hasplock/hasp/internal/clock"
	"github.com/hasplock/hasp/internal/line"
)

// Bounds of renewals in batches.
const (
	batchSize  = 256                   // the largest number of claims in one call of Renew
	maxBatches = 24                    // the most calls that a lane in renewer.well has in flight
	maxSuspect = 8                     // the same for a lane in renewer.suspect
	minWindow  = 5 * time.Millisecond  // the shortest window; see windowsPerT
	maxWindow  = 50 * time.Millisecond // the longest window
	checkEvery = time.Second           // how often the clock is read while leases are held

	// The window is TTL/windowsPerT: renewals that are due within it are sent together.
	windowsPerT = 100

	// A try lasts at most TTL/triesPerT, and the second try of a renewal at most twice as long.
	triesPerT = 10
)

// renewer keeps the leases of a Client alive, and ends those whose deadline has passed. It has one
// goroutine, which runs while there are holds and a moment longer. It never calls the driver, so a
// store that hangs does not delay the end of a context. Each batch has a goroutine of its own.
type renewer struct {
	*store
	reaper   *reaper
	observer *observer
	wake     chan struct{} // signals that wakesAt is earlier now; has room for one signal

	// All below is guarded by mu.
	holds   holdHeap      // holds that are trusted
	running bool          // its goroutine exists
	wakesAt clock.Instant // when the goroutine serves the holds next

	// resumed contains the tokens of handles that the Client has resumed, or resumes now. The value
	// is the time of Clock.Awake from which on the store cannot have the token, or Never while that
	// is not known. A Detach, and an Unlock that has freed the key, remove the token.
	resumed map[string]clock.Instant

	well    [tryClasses]lane // lanes of holds whose last renewal did not fail
	suspect [tryClasses]lane // lanes of holds whose last renewal failed or was not answered
}

// lane contains the holds of one class that are due for renewal. In a class, the time that a try
// may last varies by at most a factor of two. All holds of a batch come from one lane, because a
// batch lasts only as long as its shortest try. Each lane has its own bound on calls in flight,
// because a call for long terms that gets no answer outlasts a short term. Holds whose last renewal
// failed wait in lanes of their own, because their calls may take long.
type lane struct {
	queue   []*hold // in the order in which the holds became due
	flights int     // number of calls in flight
}

// tryClasses is the number of classes: enough for tries from MinTTL/triesPerT to some minutes.
const tryClasses = 16

// closeLocked ends the leases of all holds because of Close, and returns them. A hold that lingers
// has no caller that could unlock it, so the reaper releases its token.
func (r *renewer) closeLocked() (ended []*Lease) {
	for len(r.holds) > 0 {
		h := r.holds[0].hold
		if h.lingers != 0 {
			h.endLingerLocked(nil)
			continue
		}
		for _, l := range h.leases {
			l.state.Store(closed)
		}
		ended = append(ended, h.leases...)
		r.unscheduleLocked(h)
	}
	return ended
}

// run serves the holds in the heap. When the heap is empty, run goes on for a moment, so that a
// program that locks and unlocks in a loop does not start a goroutine each time.
func (r *renewer) run() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	idle := false // the heap was empty in the last round
	for {
		now, _ := r.clock.Read()
		r.mu.Lock()
		ended := r.serveLocked(now)
		wakes := now.Add(checkEvery) // at the latest, because only Read notices a suspend
		if len(r.holds) > 0 {
			wakes = min(wakes, r.holds[0].next)
		}
		over := len(r.holds) == 0 && (idle || r.closing.Err() != nil)
		idle = len(r.holds) == 0
		r.running = !over
		r.wakesAt = wakes
		r.mu.Unlock()

		for _, l := range ended {
			l.endContext(l.loss) // without mu, because this runs users' code
		}
		if over {
			return
		}

		timer.Reset(time.Duration(wakes - now))
		select {
		case <-timer.C:
		case <-r.wake:
		}
	}
}

// serveLocked ends the leases whose time has passed, and begins the renewals that are due. It
// returns the leases that it has ended.
func (r *renewer) serveLocked(now clock.Instant) (ended []*Lease) {
	anyDue := false
	for len(r.holds) > 0 {
		h := r.holds[0].hold
		isDue := h.mayRenewLocked() && h.soonDueLocked(now)
		if r.holds[0].next > now && !isDue {
			break // nothing is due yet
		}
		ended = append(ended, h.endExpiredLocked(now)...)
		if h.index < 0 {
			continue // the hold has ended, and is not in the heap any more
		}

		if isDue {
			anyDue = true
			h.queued = true
			r.queueLocked(h)
		}
		r.scheduleLocked(h) // moves h behind the holds that are due
	}
	if anyDue {
		r.dispatchLocked()
	}
	return ended
}

// scheduleLocked puts h into the heap, or moves it if its time has changed.
func (r *renewer) scheduleLocked(h *hold) {
	// The renewer serves h when a renewal is due, or when h or one of its leases ends.
	next := min(h.Deadline(), h.limit, cmp.Or(h.lingers, clock.Never))
	for _, l := range h.leases {
		next = min(next, l.maxHold)
	}
	if h.mayRenewLocked() {
		next = min(next, h.due)
	}

	if h.index < 0 {
		h.index = int32(len(r.holds))
		r.holds = append(r.holds, scheduled{})
	}
	r.holds.place(int(h.index), scheduled{next, h})

	// Wake the renewer if it would sleep past the new time.
	switch {
	case !r.running:
		r.running = r.spawnLocked(r.run)
	case next < r.wakesAt:
		r.wakesAt = next
		poke(r.wake)
	}
}

// unscheduleLocked takes h out of the heap.
func (r *renewer) unscheduleLocked(h *hold) {
	i := int(h.index)
	if i < 0 {
		return
	}

	// Move the last entry of the heap to the place of h.
	n := len(r.holds) - 1
	last := r.holds[n]
	r.holds[n] = scheduled{}
	r.holds = r.holds[:n]
	if i < n { // otherwise h was the last entry
		r.holds.place(i, last)
	}
	h.index = -1
}

// holdHeap is a binary heap of holds, ordered by the times at which the renewer must serve them.
// Its entries contain these times, because a comparison that read a time from a hold would wait for
// memory. With 30,000 leases, this wait was a quarter of the cost of a renewal.
type holdHeap []scheduled

// scheduled is an entry of the heap.
type scheduled struct {
	next clock.Instant // when the renewer must serve the hold
	hold *hold
}

// place stores s in the entry with index i, and moves s to its proper place in the heap.
func (q holdHeap) place(i int, s scheduled) {
	// Move parents that are later down, until the free entry i is below an earlier one.
	for up := (i - 1) / 2; i > 0 && s.next < q[up].next; up = (i - 1) / 2 {
		q[i] = q[up]
		q[i].hold.index = int32(i)
		i = up
	}

	// Move children that are earlier up, until the free entry i is above later ones.
	for down := 2*i + 1; down < len(q); down = 2*i + 1 {
		if down+1 < len(q) && q[down+1].next < q[down].next {
			down++ // the earlier one of the two children
		}
		if s.next <= q[down].next {
			break
		}
		q[i] = q[down]
		q[i].hold.index = int32(i)
		i = down
	}

	q[i] = s
	s.hold.index = int32(i)
}

// queueLocked queues h, whose renewal is due.
func (r *renewer) queueLocked(h *hold) {
	lanes := &r.well
	if h.Failed > 0 {
		lanes = &r.suspect
	}

	// Class 0 has the tries below the shortest usual one. Class n has those from 2^(n-1) times the
	// shortest one to twice that, and the last class has all longer ones.
	const shortest = backend.MinTTL / triesPerT
	try := h.tryLocked(r.opts.Timeout)
	class := min(bits.Len64(uint64(try/shortest)), tryClasses-1)
	lanes[class].queue = append(lanes[class].queue, h)
}

// dispatchLocked sends the renewals that are due, up to the bounds on calls in flight. The others
// wait, and are sent in larger batches later.
func (r *renewer) dispatchLocked() {
	for class := range tryClasses {
		well := &r.well[class]
		for well.flights < maxBatches && len(well.queue) > 0 {
			r.dispatchBatchLocked(well)
		}
		suspect := &r.suspect[class]
		for suspect.flights < maxSuspect && len(suspect.queue) > 0 {
			r.dispatchBatchLocked(suspect)
		}
	}
}

// dispatchBatchLocked takes up to batchSize holds from the queue of a lane, and sends those of them
// that can be renewed in one batch.
func (r *renewer) dispatchBatchLocked(ln *lane) {
	// b.holds has the memory of holds, and gets those of them that can be renewed.
	n := min(len(ln.queue), batchSize)
	holds := slices.Clone(ln.queue[:n])
	b := &batch{r: r, lane: ln, holds: holds[:0]}
	ln.queue = slices.Delete(ln.queue, 0, n)
	for _, h := range holds {
		h.queued = false
		if h.busy != nil || h.index < 0 {
			continue // an Extend is in flight, or the hold has ended
		}

		// The batch may take only as long as the shortest of its tries.
		if try := h.tryLocked(r.opts.Timeout); len(b.holds) == 0 || try < b.try {
			b.try = try
		}
		h.busy = make(chan struct{})
		b.holds = append(b.holds, h)
	}
	if len(b.holds) > 0 && r.spawnLocked(b.run) { // false if Close has stopped waiting
		ln.flights++
	}
}

// batch is one call of Renew, for holds from one lane or for an Extend.
type batch struct {
	r      *renewer
	lane   *lane           // nil for an Extend
	try    time.Duration   // the shortest try of its holds
	holds  []*hold         // an entry becomes nil, under mu, when the hold is answered
	claims []backend.Claim // claims[i] is the claim of holds[i]
	sent   clock.Instant   // when the call began
	slept  int64           // how long the machine had slept when the call began
	over   bool            // the call has ended, and later answers do not count; guarded by mu

	// err is the last outcome. Extend returns it, because its batch has one hold. It is guarded by
	// mu.
	err error
}

// run sends the batch, and then dispatches renewals that have waited for its end.
func (b *batch) run() {
	r := b.r
	b.prepare()
	if len(b.claims) > 0 {
		b.send(context.Background(), b.try)
	}

	// Another batch of the lane may be sent now.
	r.mu.Lock()
	defer r.mu.Unlock()
	b.lane.flights--
	r.dispatchLocked()
}

// prepare creates the claims. It drops holds that have ended or must not be renewed any more.
func (b *batch) prepare() {
	// Between the two times at which mu is held, leases may join the holds, or end.
	r := b.r
	holds := b.holds
	leases := make([][]*Lease, len(holds))
	joined := make([]int32, len(holds))
	r.mu.Lock()
	for i, h := range holds {
		leases[i] = slices.Clone(h.leases)
		joined[i] = h.joined
	}
	r.mu.Unlock()

	// A hold is wanted if a context of its Locks has not ended. Ask the contexts without mu,
	// because the context of a lease locks mu.
	wanted := make([]bool, len(holds))
	for i := range holds {
		wanted[i] = slices.ContainsFunc(leases[i], func(l *Lease) bool { return !l.abandoned() })
	}
	now, _ := r.clock.Read()

	r.mu.Lock()
	defer r.mu.Unlock()
	b.holds = holds[:0] // keeps the holds that are renewed, in the same memory
	b.claims = make([]backend.Claim, 0, len(holds))
	for i, h := range holds {
		// If a lease has joined since the leases were read, the hold counts as wanted.
		cl, ok := h.renewalLocked(now, wanted[i] || h.joined != joined[i])
		if ok {
			h.kept = max(h.kept, now.Add(cl.TTL))
			b.holds = append(b.holds, h)
			b.claims = append(b.claims, cl)
			continue
		}

		// The hold has ended, or its renewals are paused.
		h.callEndedLocked()
		if h.index >= 0 {
			r.scheduleLocked(h)
		}
	}
}

// send makes the call. If bound is above 0, the call may take at most this duration. A claim fails
// if it has no answer when the call ends, or a moment after ctx has ended or bound has passed.
func (b *batch) send(ctx context.Context, bound time.Duration) {
	r := b.r
	b.sent, b.slept = r.clock.Read()
	defer b.end() // also if the driver panics on the goroutine of an Extend

	// If the driver's call outlasts its context, do not wait for the call, because the renewer must
	// try again before the terms end. Run returns nothing of use, because b.done gets the answers.
	_, _ = calls.Run(&r.caller, ctx, bound, nil, nil, func(ctx context.Context) (struct{}, error) {
		r.driver.Renew(ctx, b.claims, b.done)
		return struct{}{}, nil
	}, nil)
}

// end ends the call. Claims without an answer have failed, and answers that come later are ignored.
func (b *batch) end() {
	b.r.mu.Lock()
	b.over = true
	b.r.mu.Unlock()

	for i, h := range b.holds {
		if h != nil {
			b.answer(i, h, backend.Grant{}, calls.NoAnswer(b.try))
		}
	}
}

// done receives the driver's answer to the claim with index i.
func (b *batch) done(i int, g backend.Grant, err error) {
	// The driver may answer on any goroutine, twice, or after send has given up. The first answer
	// sets holds[i] to nil.
	b.r.mu.Lock()
	inRange := i >= 0 && i < len(b.holds)
	if b.over || !inRange || b.holds[i] == nil {
		b.r.mu.Unlock()
		return // too late, or not the first answer
	}

	h := b.holds[i]
	b.holds[i] = nil
	b.r.mu.Unlock()
	if err != nil && !backend.Definite(err) {
		err = calls.Plain(err, b.try) // because the context that has ended is the engine's own
	}
	b.answer(i, h, g, err)
}

// answer records the outcome of the renewal or the Extend of h, whose claim has index i.
func (b *batch) answer(i int, h *hold, g backend.Grant, err error) {
	r := b.r
	now, _ := r.clock.Read()
	r.mu.Lock()
	h.callEndedLocked()

	var ended []*Lease // lost leases, whose contexts must end without mu
	until := r.grantEnds(b.claims[i], g, b.sent, b.slept)
	if err == nil && until <= now {
		err = errLate // the renewed term has ended already, so the renewal has failed
	}
	b.err = err

	switch {
	case h.index < 0:
		// Ignore the answer: the hold was unlocked or lost meanwhile.
	case err == nil:
		if g.Handle != nil {
			h.claim.Handle = g.Handle
		}
		if h.Failed > 0 {
			r.observer.renewalLocked(h, EventRenewed, nil)
		}
		h.renewedLocked(now, b.sent, until)
		r.scheduleLocked(h)
		r.observer.reportStillHeldLocked(h.leases[0], now)
	case errors.Is(err, ErrLost):
		h.Failed = 0
		ended = h.revokedLocked()
	default:
		h.Failed++
		h.failure = err

		// Try again after a pause of up to a third of the length of a try.
		h.planLocked(now.Add(line.Jitter(h.termLocked()/(3*triesPerT))), now)
		r.scheduleLocked(h)
		r.observer.renewalLocked(h, EventRenewFailed, err)
	}
	r.mu.Unlock()

	for _, l := range ended {
		l.endContext(l.loss) // without mu, because this runs users' code
	}
}

// extend renews h alone, for an Extend that has made h busy. The duration bound limits the call.
func (r *renewer) extend(ctx context.Context, h *hold, cl backend.Claim,
	bound time.Duration) error {
	b := &batch{r: r, try: bound, holds: []*hold{h}, claims: []backend.Claim{cl}}

	// This error remains if send leaves the driver's call behind, and done has not recorded its
	// answer yet.
	b.err = calls.NoAnswer(bound)
	b.send(ctx, 0) // calls.Call has bounded ctx already

	r.mu.Lock()
	defer r.mu.Unlock()
	return b.err
}

// reserve records that the Client resumes a token. If the Client has resumed it before, and the
// store may still have it, the error is ErrInvalid. Resume calls reserve before it calls the store,
// so that a second Resume cannot renew a hold whose first lease is being unlocked.
func (r *renewer) reserve(token string) error {
	r.mu.Lock()
	defer r.mu.Unlock()

	// Forget the tokens that the store cannot have any more.
	now := r.clock.Awake()
	maps.DeleteFunc(r.resumed, func(_ string, until clock.Instant) bool { return until < now })
	if r.resumed[token] != 0 {
		return fmt.Errorf("%w: this Client has resumed the handle already", ErrInvalid)
	}
	r.resumed[token] = clock.Never
	return nil
}

// unreserveLocked lets the token of h, which has ended, leave the map when the store cannot have it
// any more. Until then a release of the token may be in flight, and would end the hold of another
// Resume.
func (r *renewer) unreserveLocked(h *hold) {
	if r.resumed[h.claim.Token] != 0 { // h was resumed from a handle
		left := max(time.Duration(h.kept-r.clock.Now()), 0)
		r.resumed[h.claim.Token] = r.clock.Awake().Add(left + r.opts.Timeout)
	}
}
