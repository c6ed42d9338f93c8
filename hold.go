package hasp

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
)

// hold is one token's hold of a key in the store. It has one lease, or several by re-entry.
//
// A hold begins with a grant (newHold, startLocked). Answers of the store renew it (answer). When
// its last lease is unlocked, the next caller in line may get it (handOverLocked). It ends when it
// is released, when the store reports that it is lost (loseLocked), when its deadline or its max
// hold passes (endExpiredLocked), or when the Client is closed (Close).
type hold struct {
	renewer  *renewer      // keeps the hold, and leads to the other parts of the Client
	claim    backend.Claim // the claim of renewals and of the release; its TTL is guarded by mu
	fence    uint64        // 0 unless a fence was asked for
	granted  instant       // when the grant was received
	deadline atomic.Int64  // instant until which the lease is trusted; written under mu

	// All below is guarded by mu.
	line   *line    // the line of its key
	leases []*Lease // its leases that are neither lost nor unlocked, outer ones first

	// The state in the store, as far as this Client can tell.
	kept      instant // latest end of all requested terms, answered or not; the store may keep the hold until then
	confirmed instant // start of the last call that confirmed it; see newHold for a Waiter's grant
	raised    instant // when a re-entry raised the term that renewals ask for; earlier calls asked for less
	limit     instant // the end of WithMaxHold, or never; renewals ask for a term that ends just after it
	keep      instant // the latest end of a min hold that counts, or 0; a release leaves the key taken until then

	// Its renewal.
	due      instant       // when the next renewal is due
	planned  instant       // when due was set
	busy     chan struct{} // closed when the renewal or Extend in flight ends; nil if there is none
	failure  error         // error of the last failed renewal; nil after a renewal that succeeded
	orphaned instant       // when a renewal first noticed that the contexts of all Locks have ended; 0 until then
	failed   int32         // renewals in a row that failed or had no answer; a release without an answer counts as well
	index    int32         // its index in the renewer's heap; -1 before its start and after its end
	joined   int32         // how many leases it has had so far
	renewal  int8          // renews, paused or unrenewed
	queued   bool          // it waits in a lane for a batch
	extended bool          // Extend was called, so the hold is not handed over
	lapsed   bool          // its deadline or its max hold has ended it, so the store may still keep it

	// See "A key lingers" below.
	linger  time.Duration // how long it may linger after its grant, by the option of the caller that has it or had it last
	lingers instant       // when it stops lingering; 0 if it does not linger
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

// errLate is an outage: the grant came too late.
var errLate = fmt.Errorf("the grant came after its term had ended: %w", os.ErrDeadlineExceeded)

// newHold returns the hold that g grants. The call began at start; slept is how long the machine
// had slept by then. If the grant's term ended before the answer came, newHold has the reaper
// release the token, and returns errLate.
func newHold(r *renewer, cl backend.Claim, g backend.Grant, start, now instant, slept int64) (*hold, error) {
	cl.Handle = g.Handle
	term := cl.TTL - backend.Drift(cl.TTL)
	until := start.add(term)
	if !g.Until.IsZero() {
		until = r.clock.at(g.Until, slept)
	}
	if now >= until {
		r.reaper.add(cl, reapOnce)
		return nil, errLate
	}

	h := &hold{renewer: r, claim: cl, fence: g.Fence, granted: now, kept: now.add(cl.TTL), limit: never, index: -1}

	// The hold was confirmed when its term began, which may be long after a Waiter's call began. If
	// a Waiter has granted less than a whole term, the start of the term is not known, so the time
	// until the renewal counts from now. If the driver is Ordered, it handed the key over by a
	// message, which also confirms the hold now.
	began := until.add(-term)
	since := min(max(start, began), now)
	h.confirmed = since
	if began < start {
		since = now
		if r.traits.Ordered {
			h.confirmed = now
		}
	}
	h.due, h.planned = renewalTime(since, time.Duration(until-since)), now
	h.deadline.Store(int64(until))
	return h, nil
}

// startLocked makes h the hold of ln, and returns its first lease. waited is how long the Client
// waited for h. If sought is true, the first attempt did not get h.
func (h *hold) startLocked(ctx context.Context, r *request, ln *line, waited time.Duration, sought bool) *Lease {
	h.line = ln
	if r.noRenew {
		h.renewal = unrenewed
	}
	ln.startedLocked(h, waited, sought)

	// With a max hold, the first claim may have asked for less than the whole term. Renewals ask
	// for the whole term, or for a term that ends just after the limit.
	l := h.addLeaseLocked(ctx, r, h.granted)
	if r.maxHold > 0 {
		h.claim.TTL = r.ttl
		h.limit = l.maxHold
	}
	h.renewer.scheduleLocked(h)
	return l
}

func (h *hold) addLeaseLocked(ctx context.Context, r *request, now instant) *Lease {
	// The hold has room for its first lease. Later ones are allocated.
	l := &h.first
	if l.hold != nil {
		l = new(Lease)
	}
	l.hold, l.key, l.slot, l.parent, l.around = h, r.name, r.slot, ctx, r.around
	if r.parent != nil {
		l.parent = r.parent
	}
	l.id, l.op, l.shared = r.id, r.op, r.shared
	l.since, l.maxHold = now, never
	if r.maxHold > 0 {
		l.maxHold = l.since.add(r.maxHold)
	}
	if r.minHold > 0 {
		l.keep = l.since.add(r.minHold) // the min hold counts after the call has returned; see countMinHold
	}

	if h.leases == nil {
		h.leases = h.place[:0]
	}
	if len(h.leases) == 0 { // the outermost lease decides how long h lingers
		h.linger = 0
		if r.linger > 0 {
			h.linger = h.lingerFor(r)
		}
	}
	h.leases = append(h.leases, l)
	h.joined++
	return l
}

// renewalsPerT is 3: a renewal starts at TTL/3.
const renewalsPerT = 3

// renewalTime returns when to renew a term that began at since: after a third of the term, less up
// to a tenth of that third, at random. So the renewals of holds that were taken together become due
// at different times.
func renewalTime(since instant, term time.Duration) instant {
	third := term / renewalsPerT
	return since.add(third - rand.N(third/10+1))
}

// resumeRenewalLocked makes renewals of h go on if they have stopped, and reports whether they had.
// If it returns true, the caller must schedule h.
func (h *hold) resumeRenewalLocked(now instant) bool {
	if h.renewal != paused {
		return false
	}
	h.renewal, h.orphaned = renews, 0
	h.due, h.planned = now, now
	return true
}

// callEndedLocked records that the renewal or Extend in flight has ended.
func (h *hold) callEndedLocked() {
	if h.busy != nil {
		close(h.busy)
		h.busy = nil
	}
}

// holdHeap is a binary heap of holds, by when the renewer must serve them. Its entries contain
// these times, because a comparison that reads the holds waits for memory. With 30,000 leases, that
// was a quarter of the cost of a renewal.
type holdHeap []scheduled

type scheduled struct {
	next instant
	hold *hold
}

// place overwrites the entry at i with s, and moves s to where it belongs in the heap.
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
	next := min(instant(h.deadline.Load()), h.limit, cmp.Or(h.lingers, never))
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

	// Wake a renewer that sleeps past the new time.
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

// handOverLocked gives h, whose last lease was unlocked, to the next caller in line. It returns
// false, and h must be released, if that caller cannot use h, if other Clients should get a turn,
// or if h has left the line. A hand-over needs no call to the store, because the store knows only
// the token of the hold, and has confirmed the hold a moment ago.
func (h *hold) handOverLocked() bool {
	ln, now := h.line, h.renewer.clock.now()
	t := ln.first()
	if ln.hold != h || ln.rowOverLocked(now) || !h.suitsLocked(t.r, now) {
		return false
	}
	ln.giveLeaseLocked(t, h.addLeaseLocked(t.ctx, t.r, now))
	return true
}

// suitsLocked reports whether a caller with r may get h: h is what r asks for, and the store has
// confirmed h a moment ago.
func (h *hold) suitsLocked(r *request, now instant) bool {
	switch {
	case !h.passableLocked():
		return false
	case r.ttl != h.claim.TTL || r.noRenew || r.fenced || r.shared || r.maxHold > 0:
		return false
	case h.renewer.closing.Err() != nil:
		return false
	}
	return time.Duration(now-h.confirmed) < max(freshEnough, h.linger) && now < instant(h.deadline.Load())
}

// passableLocked reports whether a later caller may get h: h is renewed and was not extended, and
// no caller has asked for a fence, a max hold or a min hold.
func (h *hold) passableLocked() bool {
	return !h.extended && h.renewal == renews && !h.claim.Fenced && h.limit == never && h.keep == 0
}

// A key lingers if its last lease had WithLinger and was unlocked, and the Client keeps the hold
// for its own next caller. Then the hold has one lease that belongs to no caller: the ghost. The
// line counts the ghost as a caller. The ghost is renewed and lost as any lease, but no event names
// it. The next caller takes its place (reuseLocked). If no caller comes in time, or the hold does
// not suit the next caller, the hold ends, and the reaper releases its token (endLingerLocked).
//
// The time of WithLinger counts from the grant of the hold, not from the last Unlock. So other
// Clients wait for that time at most, however busy this Client is, and the gap after the row lets
// them in (endedLocked).

// unrecalled is the longest linger of a key that other Clients cannot recall.
const unrecalled = 50 * time.Millisecond

// lingerFor returns how long the hold may linger after its grant for a caller with r.
func (h *hold) lingerFor(r *request) time.Duration {
	c := h.renewer
	switch _, recalls := c.driver.(backend.Recaller); {
	case c.traits.Reach == backend.Process, r.shared, r.slots > 0:
		return 0
	case !recalls:
		return min(r.linger, unrecalled)
	case h.line.recalled, h.line.sought, !strings.HasPrefix(h.claim.Token, backend.RecallMark):
		return min(r.linger, rowTime)
	}
	return r.linger
}

// recallLocked handles a message, if one has come: the row of its key ends sooner. The message may
// come before the reply to the attempt that took the key.
func (q *queue) recallLocked() {
	var ln *line
	select {
	case key := <-q.recalled:
		ln = q.lines[strings.TrimPrefix(key, q.opts.Prefix)]
	default:
	}
	if ln == nil {
		return // no message has come, or it came after the end of the hold
	}
	ln.recalled = true
	if h := ln.hold; h != nil {
		h.linger = min(h.linger, rowTime)
		if h.lingers != 0 {
			h.lingers = min(h.lingers, h.granted.add(rowTime))
			h.renewer.scheduleLocked(h)
		}
	}
}

// lingerLocked makes the ghost keep the hold, whose last lease was unlocked. It returns false if
// the key must be released.
func (h *hold) lingerLocked(key string) bool {
	c, end := h.renewer, h.granted.add(h.linger)
	if h.line.hold != h || h.line.callers > 1 || c.closing.Err() != nil || !h.passableLocked() || c.clock.now() >= end {
		return false
	}
	if h.ghost == nil {
		h.ghost = &Lease{hold: h, key: key, parent: context.Background(), since: h.granted, maxHold: never}
	}
	h.lingers = end
	h.leases = append(h.leases, h.ghost)
	h.joined++
	c.scheduleLocked(h)
	return true
}

// reuseLocked gives the hold, which lingers, to a caller. If the hold does not suit the caller, it
// ends. Then the ticket says to wait for the release, and to join again.
func (h *hold) reuseLocked(t *turn) ticket {
	now, _ := h.renewer.clock.read() // the machine may have slept since the last lease was unlocked
	if h.line.rowOverLocked(now) || !h.suitsLocked(t.r, now) {
		freed := make(chan struct{})
		h.endLingerLocked(freed)
		return ticket{do: joinAgain, freed: freed}
	}
	h.lingers = 0
	h.leases = h.leases[:0]
	return ticket{do: haveLease, lease: h.addLeaseLocked(t.ctx, t.r, now)}
}

// endLingerLocked ends a hold that lingers. The reaper releases the token, so that many keys need
// few goroutines, and then closes freed, if that is not nil.
func (h *hold) endLingerLocked(freed chan struct{}) {
	h.ghost.state.Store(released)
	h.lingers, h.leases = 0, nil
	h.renewer.unscheduleLocked(h)
	h.line.endedLocked(h)
	h.reapLocked(&reap{freed: freed})
}

// The rest of this file ends holds that are lost: by the clock (endExpiredLocked), or by an answer
// of the store (batch.answer in renew.go). The context of the lease and an event report the loss to
// the program.

// reapLocked has the reaper release the token of h, which has ended. The fields of x say how; keep is
// 0 if the store has reported the loss of h.
func (h *hold) reapLocked(x *reap) {
	x.claim, x.times = h.claim, reapOnce
	h.renewer.reaper.addLocked(x, max(time.Duration(h.kept-h.renewer.clock.now()), 0))
}

// endExpiredLocked ends the leases of h whose time is over by the clock, and returns them. The
// caller calls endContext of each, after it has released mu.
func (h *hold) endExpiredLocked(now instant) []*Lease {
	if now >= min(instant(h.deadline.Load()), h.limit) {
		h.lapsed = true
		return h.loseLocked(h.lapseLocked())
	}

	if now >= cmp.Or(h.lingers, never) {
		h.endLingerLocked(nil)
		return nil
	}

	// The hold goes on. End only the leases whose WithMaxHold is over.
	var ended []*Lease
	for i := len(h.leases) - 1; i >= 0; i-- {
		if l := h.leases[i]; now >= l.maxHold {
			h.leases = append(h.leases[:i], h.leases[i+1:]...)
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

// lapseLocked returns why h has ended by the clock.
func (h *hold) lapseLocked() *LostError {
	switch {
	case h.limit <= instant(h.deadline.Load()):
		return &LostError{Reason: LostMaxHold}
	case h.failure != nil:
		return &LostError{LostUnanswered, h.failure}
	case h.renewal != renews:
		return &LostError{Reason: LostNotRenewed}
	}
	// All renewals have succeeded, so the process did not make the next one in time.
	return &LostError{Reason: LostStopped}
}

// loseLocked ends h as lost because of why, and returns its leases. The caller calls endContext of
// each, after it has released mu.
func (h *hold) loseLocked(why *LostError) []*Lease {
	ended := h.leases
	h.leases = nil
	for _, l := range ended {
		l.loseLocked(why)
	}
	h.renewer.unscheduleLocked(h)

	// Let the next caller ask the store before the contexts have ended. That is safe, because
	// Lease.Err, and Err and Done of the leases' contexts, already report the loss. Only contexts
	// derived from them end a moment later.
	h.line.endedLocked(h)
	return ended
}

// loseLocked ends l as lost because of why, and returns why.
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
