package hasp

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"time"

	"github.com/hasplock/hasp/backend"
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
	line.Hold          // what the line knows of the hold
	renewer   *renewer // renews the hold, and has pointers to the other parts of the Client

	claim backend.Claim // what renewals and the release send; its TTL is guarded by mu
	fence uint64        // 0 unless a fence was asked for
	asked clock.Instant // when the call began that got the grant

	// All below is guarded by mu.

	line   *line.Line // the line of its key
	leases []*Lease   // its leases that are neither lost nor unlocked, outer ones first
	joined int32      // how many leases it has had so far
	index  int32      // its index in the renewer's heap; -1 before its start and after its end

	// The state in the store, as far as this Client can tell:

	// kept is the latest end of all requested terms, answered or not. The store may keep the hold
	// until then.
	kept clock.Instant

	// confirmed is the start of the last call that confirmed the hold; see newHold for a Waiter's
	// grant.
	confirmed clock.Instant

	// raised is when a re-entry raised the term that renewals ask for. Earlier calls asked for
	// less.
	raised clock.Instant

	// limit is the end of WithMaxHold, or Never. Renewals ask for a term that ends just after it.
	limit clock.Instant

	// keep is the latest end of a min hold that counts, or 0. A release leaves the key taken until
	// then.
	keep clock.Instant

	// The renewal of the hold; Hold.Failed counts its failures:

	due     clock.Instant // when the next renewal is due
	planned clock.Instant // when the field due was set
	busy    chan struct{} // closed when the renewal or Extend in flight ends; nil if there is none
	failure error         // error of the last failed renewal; nil after a renewal that succeeded
	renewal int8          // renews, paused or unrenewed
	queued  bool          // it waits in a lane for a batch

	// unpassed says that no later caller gets the hold, because Extend was called, or a Break may
	// have broken the hold.
	unpassed bool

	// lapsed says that the deadline or the max hold has ended the hold, so the store may still keep
	// it.
	lapsed bool

	// orphaned is when a renewal first noticed that the contexts of all Locks have ended; 0 until
	// then.
	orphaned clock.Instant

	// See "A key lingers" in linger.go:

	lingers clock.Instant // when it stops lingering; 0 if it does not linger
	ghost   *Lease        // nil until it lingers for the first time

	// The first lease and its place in leases are part of the hold, to save two allocations:

	first Lease
	place [1]*Lease
}

// States of the renewal of a hold.
const (
	renews    int8 = iota
	paused         // because all Locks' contexts have ended, or the term reaches the max hold
	unrenewed      // because of WithoutRenewal
)

// errLate says that a grant came too late. It is an outage.
var errLate = fmt.Errorf("the grant came after its term had ended: %w", os.ErrDeadlineExceeded)

// newHold returns the hold that g grants. The argument start is the time at which the call began,
// slept is how long the machine had slept at that time, and now is when the answer came. If the
// grant's term ended before that, newHold has the reaper release the token, and returns errLate.
func newHold(r *renewer, cl backend.Claim, g backend.Grant, start, now clock.Instant,
	slept int64) (*hold, error) {
	cl.Handle = g.Handle
	term := cl.TTL - backend.Drift(cl.TTL) // how long a whole term is trusted
	until := r.grantEnds(cl, g, start, slept)
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

	// If the whole term was granted, it began at the instant began, and the store confirmed the
	// hold then. That may be long after the call began, because a Waiter waits.
	began := until.Add(-term)
	since := min(max(start, began), now)
	h.confirmed = since
	if began < start {
		// The term is shorter, so its start is not known. Count the time until the renewal from
		// now. If the driver is Ordered, it has just handed the key over by a message, so the hold
		// was confirmed now.
		since = now
		if r.traits.Ordered {
			h.confirmed = now
		}
	}

	// This needs no mu, because no other goroutine knows h yet.
	h.planLocked(renewalTime(since, time.Duration(until-since)), now)
	h.Trust(until)
	return h, nil
}

// mayRenewLocked reports whether the next renewal of h may begin when it is due. It may not if h is
// not renewed, or if a renewal or an Extend is in flight or waits in a lane.
func (h *hold) mayRenewLocked() bool {
	return h.renewal == renews && h.busy == nil && !h.queued
}

// planLocked sets the time of the next renewal.
func (h *hold) planLocked(due, now clock.Instant) {
	h.due = due
	h.planned = now
}

// startLocked makes h the hold of ln, and returns its first lease. The argument waited is how long
// the Client waited for h. If sought is true, the first attempt did not get h.
func (h *hold) startLocked(ctx context.Context, r *request, ln *line.Line, waited time.Duration,
	sought bool) *Lease {
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

	if h.asked <= ln.Broken { // a Break that returned after the call began may have broken h
		h.suspectLocked(h.Granted)
	}
	h.renewer.scheduleLocked(h)
	return l
}

// addLeaseLocked adds a lease to h, for the request r with the context ctx, and returns the lease.
func (h *hold) addLeaseLocked(ctx context.Context, r *request, now clock.Instant) *Lease {
	// The hold has room for its first lease. Later ones are allocated.
	l := &h.first
	if l.hold != nil { // the first lease exists already
		l = new(Lease)
	}
	l.hold = h
	l.key = r.name
	l.slot = int32(r.slot)
	l.id = r.id
	l.op = r.op
	l.ttl = r.ttl
	l.around = r.around
	l.parent = ctx
	if r.parent != nil {
		// LockAll waits with a ctx that ends with its other leases, and this lease must not.
		l.parent = r.parent
	}

	l.since = now
	l.maxHold = clock.Never
	if r.maxHold > 0 {
		l.maxHold = l.since.Add(r.maxHold)
	}
	if r.minHold > 0 {
		// The min hold counts after the call has returned; see countMinHold.
		l.keep = l.since.Add(r.minHold)
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

// renewalsPerT says that a renewal starts after a third of the TTL.
const renewalsPerT = 3

// renewalTime returns the time at which to renew a term that began at the time since. That is a
// third of the term later, less a random part of up to a tenth of that third. So the renewals of
// holds that were taken together become due at different times.
func renewalTime(since clock.Instant, term time.Duration) clock.Instant {
	third := term / renewalsPerT
	return since.Add(third - rand.N(third/10+1))
}

// renewalLocked returns the claim of the next renewal, or false if h must not be renewed now. If h
// has not ended, false also means that its renewals are paused. The argument wanted is true if at
// least one context of its Locks has not ended.
func (h *hold) renewalLocked(now clock.Instant, wanted bool) (backend.Claim, bool) {
	cl := h.claim
	if h.index < 0 {
		return cl, false // it has ended
	}

	// Leases of Do and Lead are always wanted. Read untilUnlock only here, so that a renewal in
	// preparation notices a call of renewUntilUnlock.
	switch {
	case wanted, slices.ContainsFunc(h.leases, func(l *Lease) bool { return l.untilUnlock }):
		h.orphaned = 0
	case h.orphaned == 0: // the first renewal after the end of the contexts still takes place
		h.orphaned = now
	case time.Duration(now-h.orphaned) > cl.TTL*(renewalsPerT-1)/renewalsPerT:
		// Lock promises at most one more term of renewals. A renewal notices the end of the
		// contexts after TTL/3 at most, and renewals go on for two thirds of TTL more.
		h.renewal = paused
		return cl, false
	}

	// WithMaxHold bounds the term.
	if h.Deadline() >= h.limit {
		h.renewal = paused // the present term is long enough
		return cl, false
	}
	if left := time.Duration(h.limit - now); left < cl.TTL {
		cl.TTL = min(cl.TTL, termFor(left)) // a term that ends just after the limit
	}
	return cl, true
}

// soonDueLocked reports whether the next renewal may begin. To share a batch with others, it may
// begin before it is due, but at most a window earlier, and at most a quarter of the time from
// h.planned to h.due earlier. Without the second bound, renewals of a short term would run in a
// tight loop against a store that immediately refuses connections.
func (h *hold) soonDueLocked(now clock.Instant) bool {
	window := min(max(h.claim.TTL/windowsPerT, minWindow), maxWindow)
	pause := max(time.Duration(h.due-h.planned), 0)
	return h.due <= now.Add(min(window, pause/4))
}

// tryLocked returns how long one try to renew h may last. The parameter timeout is Options.Timeout,
// which bounds the result.
func (h *hold) tryLocked(timeout time.Duration) time.Duration {
	try := h.termLocked() / triesPerT
	if h.Failed == 1 {
		// A short try soon shows that its connection is dead. But a distant store may need longer
		// to answer on a new connection, so the second try lasts longer. Later ones are short
		// again, so that one of them begins shortly before the term ends.
		try *= 2
	}
	return min(timeout, try)
}

// termLocked returns the term that h has now: from the last call that confirmed h, or from the
// grant if that is later, to the deadline. Renewals may ask for a much longer term, after a
// re-entry with a longer term or after a hand-over by the store. The length of a try depends on the
// term that h has now, because several tries must fit into it.
func (h *hold) termLocked() time.Duration {
	left := time.Duration(h.Deadline() - max(h.confirmed, h.Granted))
	return min(h.claim.TTL, termFor(left))
}

// termFor returns a term that is still at least d long after the drift is subtracted: see
// backend.Drift. The term is never shorter than the shortest one that a driver must grant.
func termFor(d time.Duration) time.Duration {
	return max(d+d/99+3*time.Millisecond, backend.MinTTL)
}

// renewedLocked records that the store has renewed h. The argument start is when the call was sent,
// and until is the end of the renewed term for the holder.
func (h *hold) renewedLocked(now, start, until clock.Instant) {
	// Answers may arrive in any order, and the store never shortens a term. So an older answer must
	// not move the deadline back.
	h.Trust(max(h.Deadline(), until))
	h.confirmed = max(h.confirmed, start)
	h.Failed = 0
	h.failure = nil

	// A third of the term may have passed before the answer came. Even then leave a short pause, so
	// that renewals do not run in a tight loop.
	term := min(h.claim.TTL, time.Duration(until-start))
	h.planLocked(max(renewalTime(start, term), now.Add(line.MinSleep)), now)
	if start <= h.raised {
		// The call was sent before the term was raised, so ask for the longer term immediately.
		h.due = now + 1
	}
}

// resumeRenewalLocked resumes the renewals of h if they were paused. The caller must schedule h.
func (h *hold) resumeRenewalLocked(now clock.Instant) {
	if h.renewal == paused {
		h.renewal = renews
		h.orphaned = 0
		h.planLocked(now, now)
	}
}

// callEndedLocked records that the renewal or Extend in flight has ended.
func (h *hold) callEndedLocked() {
	if h.busy != nil {
		close(h.busy)
		h.busy = nil
	}
}

// A hold is lost because its time has passed (endExpiredLocked), or because the store says so
// (batch.answer in renew.go). The context of the lease and an event report the loss to the program.
// If the store said so, the reaper releases the token immediately, and otherwise when the holder
// calls Unlock (beginUnlock).

// reapLocked has the reaper release the token of h, which has ended. It sets the fields claim and
// times of x; the caller may have set the others.
func (h *hold) reapLocked(x *reap) {
	x.claim = h.claim
	x.times = reapOnce
	kept := max(time.Duration(h.kept-h.renewer.clock.Now()), 0)
	h.renewer.reaper.addLocked(x, kept)
}

// revokedLocked ends h, which the store does not have any more, and returns its leases. The caller
// must call endContext on each of them after it has released mu.
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
	h.planLocked(now, now)
	h.renewer.scheduleLocked(h)
}

// endExpiredLocked ends the leases of h whose time has passed, and returns them. If no lease is
// left, h has ended. The caller must call endContext on each of them after it has released mu.
func (h *hold) endExpiredLocked(now clock.Instant) []*Lease {
	end := min(h.Deadline(), h.limit)
	switch {
	case h.lingers != 0 && now >= min(h.lingers, end):
		// The only lease is the ghost, which nobody unlocks. So release the token here.
		h.endLingerLocked(nil)
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
	case len(ended) == 0: // nothing has changed
	case len(h.leases) == 0:
		h.lapsed = true
		h.loseLocked(nil) // no lease is left that needs the reason
	default:
		h.renewer.scheduleLocked(h) // the next max hold ends later
	}
	return ended
}

// lapseLocked returns why h, whose time has passed, is lost.
func (h *hold) lapseLocked() *LostError {
	switch {
	case h.limit <= h.Deadline():
		return &LostError{Reason: LostMaxHold}
	case h.failure != nil: // the last renewal failed
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

	// Let the next caller ask the store before endContext runs. That is safe, because Lease.Err, and
	// Err and Done of the leases' contexts, report the loss already. Only contexts derived from them
	// wait for endContext.
	h.endedLocked()
	return ended
}

// endedLocked records that h has ended. The next caller in line may ask the store.
func (h *hold) endedLocked() {
	if h.first.slot > 0 { // with slots; all leases of a hold have the same slot
		h.renewer.lookers.freed(h.first.key, int(h.first.slot)-1)
	}
	h.line.Ended(&h.Hold)
}
