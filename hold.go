package hasp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/calls"
	"github.com/hasplock/hasp/internal/clock"
	"github.com/hasplock/hasp/internal/line"
)

// hold is one token's hold of a key in the store. It has one lease, or several by re-entry.
//
// A hold begins with a grant (newHold, startLocked). Renewals prolong it (batch.answer). When its
// last lease is unlocked, the next caller in line may get it (handOverLocked). It ends when it is
// released, when the store reports that it is lost (loseLocked), when its deadline or its max hold
// passes (endExpiredLocked), or when the Client is closed (Close).
type hold struct {
	line.Hold               // what the line knows of the hold
	renewer   *renewer      // renews the hold, and has pointers to the other parts of the Client
	claim     backend.Claim // the claim that renewals and the release send; its TTL is guarded by mu
	fence     uint64        // 0 unless a fence was asked for
	asked     clock.Instant // when the call began that got the grant

	// All below is guarded by mu.
	line   *line.Line // the line of its key
	leases []*Lease   // its leases that are neither lost nor unlocked, outer ones first

	// The state in the store, as far as this Client can tell.
	kept      clock.Instant // latest end of all requested terms, answered or not; the store may keep the hold until then
	confirmed clock.Instant // start of the last call that confirmed the hold; see newHold for a Waiter's grant
	raised    clock.Instant // when a re-entry raised the term that renewals ask for; earlier calls asked for less
	limit     clock.Instant // the end of WithMaxHold, or Never; renewals ask for a term that ends just after it
	keep      clock.Instant // the latest end of a min hold that counts, or 0; a release leaves the key taken until then

	// The fields from due to lapsed describe the renewal of the hold.
	due      clock.Instant // when the next renewal is due
	planned  clock.Instant // when the field due was set
	busy     chan struct{} // closed when the renewal or Extend in flight ends; nil if there is none
	failure  error         // error of the last failed renewal; nil after a renewal that succeeded
	orphaned clock.Instant // when a renewal first noticed that the contexts of all Locks have ended; 0 until then
	index    int32         // its index in the renewer's heap; -1 before its start and after its end
	joined   int32         // how many leases it has had so far
	renewal  int8          // renews, paused or unrenewed
	queued   bool          // it waits in a lane for a batch
	unpassed bool          // Extend was called, or a Break may have broken the hold, so no later caller gets the hold
	lapsed   bool          // its deadline or its max hold has ended the hold, so the store may still keep it

	// See "A key lingers" in linger.go.
	lingers clock.Instant // when it stops lingering; 0 if it does not linger
	ghost   *Lease        // nil until it lingers for the first time

	// The first lease and its place in leases are part of the hold, to save two allocations.
	first Lease
	place [1]*Lease
}

// States of the renewal of a hold.
const (
	renews    int8 = iota
	paused         // because the contexts of all Locks have ended, or the term has reached the max hold
	unrenewed      // because of WithoutRenewal
)

// errLate says that a grant came too late. It is an outage.
var errLate = fmt.Errorf("the grant came after its term had ended: %w", os.ErrDeadlineExceeded)

// newHold returns the hold that g grants. The argument start is the time at which the call began,
// and slept is how long the machine had slept at that time. If the grant's term ended before the
// answer came, newHold has the reaper release the token, and returns errLate.
func newHold(r *renewer, cl backend.Claim, g backend.Grant, start, now clock.Instant, slept int64) (*hold, error) {
	cl.Handle = g.Handle
	term := cl.TTL - backend.Drift(cl.TTL)
	until := start.Add(term)
	if !g.Until.IsZero() {
		until = r.clock.At(g.Until, slept)
	}
	if now >= until {
		r.reaper.add(cl, reapOnce)
		return nil, errLate
	}

	h := &hold{
		renewer: r,
		claim:   cl,
		fence:   g.Fence,
		asked:   start,
		kept:    now.Add(cl.TTL),
		limit:   clock.Never,
		index:   -1,
	}
	h.Engine = h
	h.Granted = now
	h.claim.Unheard = &h.Unheard

	// The hold was confirmed when its term began, which may be long after a Waiter's call began. If
	// a Waiter has granted less than a whole term, the start of the term is not known. In that
	// case, the time until the renewal counts from now. If the driver is also Ordered, it handed
	// the key over by a message, so the hold was confirmed now.
	began := until.Add(-term)
	since := min(max(start, began), now)
	h.confirmed = since
	if began < start {
		since = now
		if r.traits.Ordered {
			h.confirmed = now
		}
	}
	h.due, h.planned = renewalTime(since, time.Duration(until-since)), now
	h.Trust(until)
	return h, nil
}

// startLocked makes h the hold of ln, and returns its first lease. The argument waited is how long
// the Client waited for h. If sought is true, the first attempt did not get h.
func (h *hold) startLocked(ctx context.Context, r *request, ln *line.Line, waited time.Duration, sought bool) *Lease {
	h.line = ln
	if r.noRenew {
		h.renewal = unrenewed
	}
	ln.Started(&h.Hold, waited, sought)

	// With a max hold, the first claim may have asked for less than the whole term. Renewals ask
	// for the whole term, or for a term that ends just after the limit.
	l := h.addLeaseLocked(ctx, r, h.Granted)
	if r.maxHold > 0 {
		h.claim.TTL = r.ttl
		h.limit = l.maxHold
	}
	if h.asked <= ln.Broken {
		h.suspectLocked(h.Granted)
	}
	h.renewer.scheduleLocked(h)
	return l
}

// dropLocked takes the lease with index i out of h. Renewals ask for the longest term of the leases
// that are left.
func (h *hold) dropLocked(i int) {
	h.leases = slices.Delete(h.leases, i, i+1)
	if len(h.leases) == 0 {
		return // the release, or the next caller, keeps the term
	}
	ttl := h.leases[0].ttl
	for _, l := range h.leases {
		ttl = max(ttl, l.ttl)
	}
	h.claim.TTL = ttl
}

func (h *hold) addLeaseLocked(ctx context.Context, r *request, now clock.Instant) *Lease {
	// The hold has room for its first lease. Later ones are allocated.
	l := &h.first
	if l.hold != nil {
		l = new(Lease)
	}
	l.hold, l.key, l.slot, l.parent, l.around = h, r.name, int32(r.slot), ctx, r.around
	if r.parent != nil {
		l.parent = r.parent
	}
	l.id, l.op, l.ttl = r.id, r.op, r.ttl
	l.since, l.maxHold = now, clock.Never
	if r.maxHold > 0 {
		l.maxHold = l.since.Add(r.maxHold)
	}
	if r.minHold > 0 {
		l.keep = l.since.Add(r.minHold) // the min hold counts after the call has returned; see countMinHold
	}

	if h.leases == nil {
		h.leases = h.place[:0]
	}
	if len(h.leases) == 0 { // the outermost lease decides whether h lingers
		h.MayLinger = r.linger
	}
	h.leases = append(h.leases, l)
	h.joined++
	return l
}

// renewalsPerT says that a renewal starts after a third of the TTL.
const renewalsPerT = 3

// renewalTime returns the time at which to renew a term that began at the time since. That is a
// third of the term later, less a random part of up to a tenth of that third. So the renewals of
// holds that were taken together become due at different times.
func renewalTime(since clock.Instant, term time.Duration) clock.Instant {
	third := term / renewalsPerT
	return since.Add(third - rand.N(third/10+1))
}

// callEndedLocked records that the renewal or Extend in flight has ended.
func (h *hold) callEndedLocked() {
	if h.busy != nil {
		close(h.busy)
		h.busy = nil
	}
}

// holdHeap is a binary heap of holds, ordered by the times at which the renewer must serve them.
// Its entries contain these times, because a comparison that read a time from a hold would wait for
// memory. With 30,000 leases, this wait was a quarter of the cost of a renewal.
type holdHeap []scheduled

type scheduled struct {
	next clock.Instant
	hold *hold
}

// place stores s in the entry with index i, and moves s to its proper place in the heap.
func (q holdHeap) place(i int, s scheduled) {
	for up := (i - 1) / 2; i > 0 && s.next < q[up].next; up = (i - 1) / 2 {
		q[i] = q[up]
		q[i].hold.index = int32(i)
		i = up
	}
	for down := 2*i + 1; down < len(q); down = 2*i + 1 {
		if down+1 < len(q) && q[down+1].next < q[down].next {
			down++
		}
		if s.next <= q[down].next {
			break
		}
		q[i] = q[down]
		q[i].hold.index = int32(i)
		i = down
	}
	q[i], s.hold.index = s, int32(i)
}

// scheduleLocked puts h into the heap, or moves it if its time has changed.
func (r *renewer) scheduleLocked(h *hold) {
	// The renewer serves h when a renewal is due, or when h or one of its leases ends.
	next := min(h.Deadline(), h.limit, cmp.Or(h.lingers, clock.Never))
	for _, l := range h.leases {
		next = min(next, l.maxHold)
	}
	if h.renewal == renews && h.busy == nil && !h.queued {
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
	i, n := int(h.index), len(r.holds)-1
	if i < 0 {
		return
	}
	last := r.holds[n]
	r.holds[n] = scheduled{}
	if r.holds = r.holds[:n]; i < n {
		r.holds.place(i, last)
	}
	h.index = -1
}

// A hold is lost because its time has passed (endExpiredLocked), or because the store says so
// (batch.answer in renew.go). The context of the lease and an event report the loss to the program.
// If the store said so, the reaper releases the token immediately, and otherwise when the holder
// calls Unlock (beginUnlock).

// reapLocked has the reaper release the token of h, which has ended. It sets the fields claim and
// times of x; the caller may have set the others.
func (h *hold) reapLocked(x *reap) {
	x.claim, x.times = h.claim, reapOnce
	h.renewer.reaper.addLocked(x, max(time.Duration(h.kept-h.renewer.clock.Now()), 0))
}

// revokedLocked ends h, which the store does not have any more, and returns its leases as
// loseLocked does.
func (h *hold) revokedLocked() []*Lease {
	ended := h.loseLocked(&LostError{Reason: LostRevoked})
	// Release the token as well. A minority of a quorum's nodes may still have the hold, and would
	// refuse the key to the next caller.
	h.reapLocked(&reap{})
	return ended
}

// suspectLocked handles a Break that may have broken h: no later caller gets h, and a renewal asks
// the store now.
func (h *hold) suspectLocked(now clock.Instant) {
	h.unpassed = true
	h.due, h.planned = now, now
	h.renewer.scheduleLocked(h)
}

// endExpiredLocked ends the leases of h whose time has passed, and returns them. The caller must
// call endContext on each of them after it has released mu.
func (h *hold) endExpiredLocked(now clock.Instant) []*Lease {
	end := min(h.Deadline(), h.limit)
	switch {
	case h.lingers != 0 && now >= min(h.lingers, end):
		h.endLingerLocked(nil) // releases the token, which nobody would unlock
		return nil
	case now >= end:
		h.lapsed = true
		return h.loseLocked(h.lapseLocked())
	}

	// The hold goes on. End only the leases whose max hold has passed.
	var ended []*Lease
	for i := len(h.leases) - 1; i >= 0; i-- {
		if l := h.leases[i]; now >= l.maxHold {
			h.dropLocked(i)
			l.loseLocked(&LostError{Reason: LostMaxHold})
			ended = append(ended, l)
		}
	}
	switch {
	case len(ended) == 0:
	case len(h.leases) == 0:
		h.lapsed = true
		h.loseLocked(nil) // no lease is left that needs the reason
	default:
		h.renewer.scheduleLocked(h)
	}
	return ended
}

// lapseLocked returns why h, whose time has passed, is lost.
func (h *hold) lapseLocked() *LostError {
	switch {
	case h.limit <= h.Deadline():
		return &LostError{Reason: LostMaxHold}
	case h.failure != nil:
		return &LostError{LostUnanswered, h.failure}
	case h.renewal != renews:
		return &LostError{Reason: LostNotRenewed}
	}
	// All renewals have succeeded, so the process did not make the next one in time.
	return &LostError{Reason: LostStopped}
}

// loseLocked marks h and its leases as lost, with the error why as the reason, and returns the
// leases. The caller must call endContext on each of them after it has released mu.
func (h *hold) loseLocked(why *LostError) []*Lease {
	ended := h.leases
	h.leases = nil
	for _, l := range ended {
		l.loseLocked(why)
	}
	h.renewer.unscheduleLocked(h)
	h.renewer.unreserveLocked(h)

	// Let the next caller ask the store before the contexts have ended. That is safe, because
	// Lease.Err, and Err and Done of the leases' contexts, already report the loss. Only the
	// contexts derived from those contexts end a moment later.
	h.endedLocked()
	return ended
}

// endedLocked records that h has ended. The next caller in line may ask the store.
func (h *hold) endedLocked() {
	if h.first.slot > 0 {
		h.renewer.lookers.freed(h.first.key, int(h.first.slot)-1)
	}
	h.line.Ended(&h.Hold)
}

// loseLocked marks l as lost, with the error why as the reason, and returns that error.
func (l *Lease) loseLocked(why *LostError) error {
	l.loss = why // set before state, because cause reads both without mu
	l.state.Store(lost)
	return why
}

// endContext ends the context of a lease that has ended, and queues its event for the observer. The
// caller must not hold mu, because the end of a context runs code of its users.
func (l *Lease) endContext(cause error) {
	if x := l.ctx.Load(); x != nil {
		x.cancel(cause)
	}
	if r := l.hold.renewer; r.opts.Observe != nil {
		r.observer.lost(l, cause)
	}
}

// Bounds of the reaper. If its queue is full, a further token is not released, but expires.
const (
	maxReaps   = 1 << 16 // tokens in the queue
	maxReaping = 512     // calls in flight; the bound is high, so that releases go on while a part of the store hangs
	maxRepeats = 64      // while this many calls are in flight, a token whose last release failed waits

	firstRetry = 50 * time.Millisecond
)

// These constants are how many times the reaper releases a token. If the store has answered the
// Acquire or the Wait, one release is enough. If the outcome is unknown, the store may carry out
// the command after the first release. So the reaper makes a second release a Timeout later. At
// that time the command has arrived, or its connection is dead. See also reapSoon.
const (
	reapOnce  = 1
	reapTwice = 2
)

// reapSoon is how soon a release follows one that has found its token gone, although a call may still
// write it.
const reapSoon = 100 * time.Millisecond

// reaper releases tokens that may be in the store although no caller uses them. Such tokens come
// from calls of unknown outcome, late grants, lost holds, and places in a queue that were given up.
// It has one goroutine, which runs while there is work, and one more for each release in flight.
//
// Its times come from Clock.Awake, because a command may reach the store only after a suspend, and
// its token must still be released then.
type reaper struct {
	*store
	wake chan struct{} // signals a change of the queue; has room for one signal

	// All below is guarded by mu.
	running bool    // the goroutine exists
	queue   []*reap // ordered by the time of the next try
	active  int     // calls in flight
}

type reap struct {
	claim  backend.Claim
	keep   clock.Instant // end of the min hold, until which the release leaves the key taken; or 0
	at     clock.Instant // the time of Clock.Awake at which the next try is due
	until  clock.Instant // the time of Clock.Awake at which the token has expired in the store
	times  int           // how many more releases must free the token or find it gone
	soon   bool          // a release has found the token gone, and another one followed soon
	failed int           // number of releases in a row that failed in another way
	freed  chan struct{} // closed when the token is not in the store any more; nil if no caller waits for that
}

// over closes the channel freed of x, if a caller waits for that.
func (x *reap) over() {
	if x.freed != nil {
		close(x.freed)
		x.freed = nil
	}
}

// settle counts a release that freed the token or found it gone, and returns the time until the next
// one. Usually that is a Timeout. But a store that stood still may execute the commands of several
// connections in any order, so if the first release finds the token gone, another one follows soon.
// Otherwise the token could keep the key for a Timeout.
func (x *reap) settle(gone bool, timeout time.Duration) time.Duration {
	soon := min(reapSoon, timeout)
	switch {
	case x.soon:
		timeout -= soon // so that the last release comes a Timeout after the first
	case gone && x.times == reapTwice:
		x.soon = true
		return soon
	}
	x.times--
	return timeout
}

func (x *reap) backoff(most time.Duration) time.Duration {
	return line.Jitter(min(firstRetry<<min(x.failed, 10), most))
}

func (r *reaper) insert(x *reap) {
	i, _ := slices.BinarySearchFunc(r.queue, x, func(a, x *reap) int {
		if a.at <= x.at {
			return -1
		}
		return 1
	})
	r.queue = slices.Insert(r.queue, i, x)
}

// add has the reaper release the token of cl. The parameter times is reapOnce or reapTwice. No
// caller may use the token again.
func (r *reaper) add(cl backend.Claim, times int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.addLocked(&reap{claim: cl, times: times}, cl.TTL)
}

// addLocked queues x. The parameter kept is how long the store may still keep the token.
func (r *reaper) addLocked(x *reap, kept time.Duration) {
	if len(r.queue) >= maxReaps {
		x.over()
		return
	}

	x.at = r.clock.Awake()
	x.until = x.at.Add(kept + r.opts.Timeout)
	if x.failed > 0 {
		x.at = x.at.Add(line.Jitter(firstRetry))
	}
	r.insert(x)
	if !r.running {
		r.running = r.spawnLocked(r.run)
	} else {
		poke(r.wake)
	}
}

// run serves the queue until it is empty. After Close has begun, it releases each token once,
// without delay, and drops tokens whose last release failed.
func (r *reaper) run() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		now := r.clock.Awake()
		closing := r.closing.Err() != nil
		r.mu.Lock()
		wait := r.startReleasesLocked(now, closing)
		if len(r.queue) == 0 && r.active == 0 {
			r.running = false
			r.mu.Unlock()
			return
		}
		r.mu.Unlock()

		done := r.closing.Done()
		if closing {
			done = nil // the loop has noticed Close already, and must be able to block again
		}
		timer.Reset(wait)
		select {
		case <-timer.C:
		case <-r.wake:
		case <-done:
		}
	}
}

// startReleasesLocked starts the releases that are due, within the bounds. It returns how long to
// wait for the next one.
func (r *reaper) startReleasesLocked(now clock.Instant, closing bool) time.Duration {
	for len(r.queue) > 0 && r.active < maxReaping {
		// Drop a token that has expired. If Close has begun, also drop one whose last release
		// failed.
		x := r.queue[0]
		drop := closing && x.failed > 0 || now >= x.until
		if x.at > now && !closing && !drop {
			return time.Duration(x.at - now)
		}
		r.queue[0], r.queue = nil, r.queue[1:]
		if drop {
			x.over()
			continue
		}
		if x.failed > 0 && r.active >= maxRepeats {
			// Delay repeats while many calls are in flight, so that repeats do not delay releases
			// that were not tried yet.
			x.at = now.Add(x.backoff(r.opts.Timeout))
			r.insert(x)
			continue
		}

		if r.spawnLocked(func() { r.try(x) }) {
			r.active++
		}
	}
	return time.Hour // a release that ends, or a new token, wakes the reaper
}

// try makes one call that releases the token of x.
func (r *reaper) try(x *reap) {
	ctx, cancel := context.WithTimeout(context.Background(), r.opts.Timeout)
	err := r.driver.Release(ctx, r.keeping(x.claim, x.keep))
	cancel()
	settled := err == nil || errors.Is(err, ErrLost)

	r.mu.Lock()
	defer r.mu.Unlock()
	defer poke(r.wake)
	r.active--

	now := r.clock.Awake()
	if settled {
		x.over()
		x.failed = 0
		x.at = now.Add(x.settle(err != nil, r.opts.Timeout))
	} else {
		x.at = now.Add(x.backoff(r.opts.Timeout))
		x.failed++
	}
	if x.times > 0 && r.closing.Err() == nil {
		r.insert(x)
	}
}

// acquire calls the driver's Acquire, which may take at most the duration bound.
func (r *reaper) acquire(ctx context.Context, cl backend.Claim, bound time.Duration) (g backend.Grant, err error) {
	if r.caller.Prompt(ctx) { // the same choice as calls.Call makes, without closures on the heap
		err = errNoReturn
		defer func() { // also if the driver or a method of ctx panics
			if err == errNoReturn || err != nil && r.traits.Reach != backend.Process {
				r.failed(cl, err)
			}
		}()
		g, err = calls.Direct(&r.caller, ctx, r.closing, bound, func(ctx context.Context) (backend.Grant, error) {
			return r.driver.Acquire(ctx, cl)
		})
		return g, err
	}
	f, late := r.guard(cl, r.driver.Acquire)
	return calls.Call(&r.caller, ctx, bound, f, late)
}

// failed handles the error err of an Acquire or a Wait for cl. If the outcome is unknown and the
// driver does not clean up, the reaper releases the token. The outcome is also unknown if err joins
// a definite error and the error of a context.
func (r *reaper) failed(cl backend.Claim, err error) {
	if err == errNoReturn || !r.traits.Cleans && (!backend.Definite(err) || calls.IsContextError(err)) {
		r.add(cl, reapTwice)
	}
}

// guard returns the arguments f and late of calls.Call or calls.Run. The function f calls ask,
// which is the driver's Acquire or Wait, and has the reaper clean up after a failure. The function
// late has the reaper release a grant that comes after the caller has left.
func (r *reaper) guard(cl backend.Claim, ask func(context.Context, backend.Claim) (backend.Grant, error)) (f func(context.Context) (backend.Grant, error), late func(backend.Grant, error)) {
	f = func(ctx context.Context) (g backend.Grant, err error) {
		err = errNoReturn
		defer func() { // also if the driver panics
			if err != nil {
				r.failed(cl, err)
			}
		}()
		g, err = ask(ctx, cl)
		return g, err
	}
	late = func(g backend.Grant, err error) {
		if err == nil {
			granted := cl // a change of cl itself would move cl to the heap
			granted.Handle = g.Handle
			r.add(granted, reapOnce)
		}
	}
	return f, late
}
