package hasp

import (
	"cmp"
	"container/list"
	"context"
	"maps"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/clock"
)

// freshEnough bounds the time from the store's confirmation of a hold to its hand-over. It also
// bounds how long a row of holds lasts; see rowTime.
const freshEnough = 50 * time.Millisecond

// queue stores, for each key, the callers of one Client that want or hold the key. It is a state
// machine without I/O: each step changes the line of a key, and tells a caller what to do next. If
// that caller waits, the step sends it a ticket. Otherwise the step returns a ticket.
//
//	a caller joins             it may ask the store, must wait, or is refused
//	the store has answered     the line knows an outage, or why the key is not free
//	a caller gets a hold       it is the hold of the line
//	the hold is handed over    the next caller has it; other Clients notice nothing
//	the hold ends              the next caller may ask the store, now or after a gap
//	the head gives up          the next caller may ask the store
//	a caller leaves            the last one ends the line
type queue struct {
	*core
	polls bool // callers that wait must poll, because nothing in the store wakes them

	// All below is guarded by mu.
	lines     map[string]*line    // the line of each key, except the lines of shared callers
	contended contended           // keys that other Clients may want
	lookers   map[string]chan int // for each key, the channel of the caller that looks for a slot; the channel receives slots that may be free
	callers   int                 // number of callers in all lines
	open      int                 // number of holds that are trusted or being released, or that Close ended before their Unlock
}

// line contains the callers of one Client that want or hold one key. It exists only while there are
// such callers. The Client's mu guards all its fields.
//
// At most one caller is at the head: it asks the store for the key, holds it, or releases it. The
// others wait in order of arrival.
//
// If the driver is Ordered, it queues the callers itself: each caller asks the store, and the line
// only counts the callers.
//
// A shared caller has a line of its own, which no other caller joins. It asks the store itself, and
// has a hold of its own. If a Client handed a shared hold from caller to caller, the Client might
// never release the key, and an exclusive caller of another Client would never get it.
type line struct {
	q       *queue
	key     string
	waiting list.List // the callers behind the head, as *turn
	hold    *hold     // the head's hold, until it is lost or released
	answers           // what the store has answered to the head

	callers int32         // number of callers, including the head
	turns   int32         // number of holds in this row that were handed over, or began while other callers waited
	hasHead bool          // one of the callers is at the head
	sought  bool          // the head's hold came after a refusal, so others may want the key
	pace    pace          // how the key is shared with other Clients
	gapEnds clock.Instant // end of the last gap, which may have passed
	broken  clock.Instant // when the last Break by this Client returned: it may have broken a hold that was asked for earlier; or 0
}

// turn is one caller of a line.
type turn struct {
	r     *request
	ctx   context.Context // Lock's context
	since clock.Instant   // the time of Clock.Awake at which the caller came
	ready chan ticket     // receives the caller's ticket, and has room for it; nil unless the caller waits
	place *list.Element   // its place in the list line.waiting; nil if it is not there
}

type ticket struct {
	do    step
	lease *Lease // for haveLease
	err   error  // for giveUp

	// The fields below are for mayAsk.
	lastAnswer error           // the line's last answer; see answers
	freed      <-chan struct{} // closed after the release of the hold that lingered; nil if none did
	after      time.Duration   // how long to leave the key to other Clients first
}

type step int

const (
	mayAsk    step = iota // ask the store
	mustWait              // wait for another ticket
	haveLease             // use the lease, which was handed over; the line counts its hold
	giveUp                // return err; the line does not count the caller any more
)

// errHeldHere says that another caller of this Client has the key, had it a moment ago, or asked
// for it first.
var errHeldHere error = &backend.HeldError{Here: true}

// join adds a caller to the line of its key. If once is true, the caller does not wait for others.
// join returns the line, or nil if the line does not count the caller.
func (q *queue) join(t *turn, once bool) (*line, ticket) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closing.Err() != nil {
		return nil, ticket{do: giveUp, err: ErrClosed}
	}

	key, now := t.r.key, q.clock.Now()
	ln := q.lines[key]
	var freed chan struct{}
	if ln != nil && ln.hold != nil && ln.hold.lingers != 0 {
		if l := ln.hold.reuseLocked(t); l != nil {
			return nil, ticket{do: haveLease, lease: l}
		}
		freed = make(chan struct{})
		ln.hold.endLingerLocked(freed)
		ln = nil // only the ghost was in it
	}
	switch {
	case t.r.shared:
		ln = &line{q: q, key: key}
	case ln == nil:
		ln = &line{q: q, key: key}
		q.lines[key] = ln
		if k := q.contended.keys[key]; now < k.until {
			ln.pace = k.pace
		}
	}
	q.callers++
	ln.callers++

	// The first caller asks the store. If the driver is Ordered, the others ask as well, except a
	// TryLock, because another caller has the key or waits for it. But during an outage, a TryLock
	// behind another caller asks too.
	asks := !ln.hasHead
	if q.traits.Ordered {
		asks = !once || ln.callers == 1 || ln.outage != 0
	}
	switch {
	case t.r.shared:
		return ln, ticket{do: mayAsk, freed: freed}
	case asks:
		// If the key's last line has begun a gap (lastLeavesLocked), this caller waits for the end
		// of the gap. promoteLocked does the same for callers that wait in a line. An Ordered
		// driver needs gaps only for programs that do not use its queue, after a key has lingered.
		ln.hasHead = true
		tk := ticket{do: mayAsk, freed: freed, after: max(time.Duration(q.contended.keys[key].gapEnds-now), 0)}
		if tk.after > 0 {
			// The wait of a caller may end before the gap, and so before the store is asked.
			ln.last, tk.lastAnswer = errHeldHere, errHeldHere
		}
		return ln, tk
	case once:
		err := cmp.Or(ln.refusalLocked(), errHeldHere)
		ln.leaveLocked()
		return nil, ticket{do: giveUp, err: err}
	}
	t.ready = make(chan ticket, 1)
	t.place = ln.waiting.PushBack(t)
	return ln, ticket{do: mustWait}
}

// unused returns the keys before the first one that is in use. A key is in use if a caller of this
// Client wants or holds it, or if the Client leaves it to other Clients for a gap.
func (q *queue) unused(keys []string) []string {
	q.mu.Lock()
	defer q.mu.Unlock()
	now := q.clock.Now()
	for i, key := range keys {
		if q.lines[key] != nil || now < min(q.contended.keys[key].gapEnds, q.contended.keys[key].until) {
			return keys[:i]
		}
	}
	return keys
}

// leaveLocked takes a caller out of the count. When the last caller leaves, the line ends.
func (ln *line) leaveLocked() {
	q := ln.q
	q.callers--
	q.changed.Broadcast()
	if ln.callers--; ln.callers == 0 && q.lines[ln.key] == ln {
		delete(q.lines, ln.key) // no caller refers to the line any more
	}
}

// quitLocked takes t, which waits, out of the line. If a ticket has reached t at the same moment, t
// does not use the ticket. If the ticket has a lease, quitLocked returns the lease, and the caller
// must unlock it. If the ticket made t the head, the next caller becomes the head.
func (ln *line) quitLocked(t *turn) *Lease {
	if t.place != nil {
		ln.remove(t)
		ln.leaveLocked()
		return nil
	}
	tk := <-t.ready // does not block: the ticket was sent under mu, when t was taken out of the line
	if tk.do == mayAsk {
		ln.promoteLocked()
		ln.leaveLocked()
	}
	return tk.lease
}

// leaveWithoutHoldLocked removes a caller that has asked the store and got no hold. During an
// outage it first ends the wait of each caller that has waited for Timeout during the outage.
func (ln *line) leaveWithoutHoldLocked() {
	if !ln.q.traits.Ordered {
		for t := ln.first(); t != nil && ln.outageLocked(t.since) >= ln.q.opts.Timeout; t = ln.first() {
			ln.remove(t).ready <- ticket{do: giveUp, err: ln.last}
			ln.leaveLocked()
		}
		ln.promoteLocked()
	}
	ln.leaveLocked()
}

// startedLocked makes h the hold of the line. The head got h from the store. The argument waited is
// how long the Client waited for h. If sought is true, the first attempt did not get h.
func (ln *line) startedLocked(h *hold, waited time.Duration, sought bool) {
	ln.q.open++
	ln.hold, ln.answers = h, answers{}
	if p := &ln.pace; p.mean > 0 && waited > 0 {
		// A wait of this Client counts only if the waits of others are known, because a Client must
		// not set its pace by its own waits alone.
		p.mean += (waited - p.mean) / meanOver
	}
	ln.pace.found = 0
	ln.sought = sought // if the hold was refused before, a gap follows its release, however long the hold lasts
	// The row begins here even if no caller waits yet, because a caller may come during the hold
	// and get the hold by a hand-over.
	if ln.pace.began == 0 || ln.turns == 0 && ln.sought {
		ln.pace.began = h.granted
	}
	if ln.waiting.Len() > 0 {
		ln.turns++
	}
}

// giveLeaseLocked sends t the lease l of the line's hold. As the head, t replaces the caller that
// unlocks.
func (ln *line) giveLeaseLocked(t *turn, l *Lease) {
	ln.remove(t)
	ln.turns++
	ln.leaveLocked() // removes the caller that unlocks; the line already counts t
	t.ready <- ticket{do: haveLease, lease: l}
}

// endedLocked removes the caller whose hold h has ended. The next caller may ask the store.
func (ln *line) endedLocked(h *hold) {
	ln.q.open--
	if h.first.slot > 0 {
		select {
		case ln.q.lookers[h.first.key] <- h.first.slot - 1:
		default: // no caller looks for a slot, or a slot is in the channel already
		}
	}
	switch {
	case h.claim.Shared: // the line has no other caller
	case ln.callers == 1: // the line ends
		ln.lastLeavesLocked()
	case !ln.q.traits.Ordered: // the next caller in line becomes the head
		ln.promoteLocked()
	case ln.hold == h: // the others wait in the driver; if one of them has a newer hold already, ln.hold is that hold
		ln.hold = nil
	}
	ln.leaveLocked()
}

func (ln *line) promoteLocked() {
	now := ln.q.clock.Now()
	over := ln.rowOverLocked(now)
	if ln.hold != nil {
		if ln.hold.failed == 0 { // otherwise the store did not answer the last call for the hold, and may hang
			ln.last = errHeldHere
		}
		ln.pace.ended = now
	}
	next := ln.first()
	ln.hasHead = next != nil
	switch {
	case next == nil:
		ln.turns, ln.pace.began = 0, 0
	case over:
		// Begin a gap. Otherwise other Clients would rarely find the key free.
		ln.gapEnds = ln.endRowLocked(now, true)
	}
	ln.hold = nil
	if next == nil {
		return
	}

	// The ticket tells the caller that it is the head. If the caller leaves at the same moment,
	// quitLocked finds the ticket.
	ln.remove(next)
	// If the last head has left during a gap, the next head waits for the rest of the gap.
	next.ready <- ticket{do: mayAsk, lastAnswer: ln.last, after: max(time.Duration(ln.gapEnds-now), 0)}
}

func (ln *line) first() *turn {
	if e := ln.waiting.Front(); e != nil {
		return e.Value.(*turn)
	}
	return nil
}

// remove takes t out of the line, and returns it.
func (ln *line) remove(t *turn) *turn {
	ln.waiting.Remove(t.place)
	t.place = nil
	return t
}

// A row is a sequence of holds that callers of one Client have of one key, one after another. After
// a row, the Client leaves the key to other Clients for a time, the gap.
//
// A row ends when it has lasted for freshEnough. It ends earlier if it has had rowTurns holds and
// has lasted for max(rowTime, rowTrips round trips). If no caller waits when a hold ends, the row
// goes on with the next caller, unless the row has lasted for briefRow. The reason is a caller that
// locks in a loop and sleeps between two holds: even a short sleep often lasts for a millisecond.
const (
	rowTime  = 10 * time.Millisecond
	rowTrips = 10
	rowTurns = 5
	briefRow = 2 * time.Millisecond

	// The gap includes min((length of the row)/partOfRow, rowTime), so that a Client that has just
	// begun to ask finds the key free.
	partOfRow = 24
	maxGap    = 100 * time.Millisecond // bounds the gap, so that slow answers do not leave a free key unused for seconds
)

// rowOverLocked reports whether other Clients should get a turn now. If a hold may linger, its row
// lasts for freshEnough, however many callers use it.
func (ln *line) rowOverLocked(now clock.Instant) bool {
	lasted := time.Duration(now - ln.pace.began)
	mayLinger := ln.hold != nil && ln.hold.mayLinger
	switch {
	case lasted >= freshEnough:
		return ln.turns > 0 || mayLinger
	case mayLinger:
		return false
	}
	return ln.turns >= rowTurns && lasted >= max(rowTime, rowTrips*ln.q.roundTrip())
}

// endRowLocked ends the row of the line, and returns the end of the gap after it. If the key is
// contended, the gap is two round trips longer, up to maxGap. If Clients also poll for the key, the
// gap is at least as long as this Client's first sleep. After a hold that lingered, the gap is as
// long as the longest sleep of a caller that has waited since the grant, so that the next caller of
// another Client need not wait for a second row.
//
// If the driver knows that nobody waits, there is no gap. But programs that do not listen may have
// waited while the key lingered.
func (ln *line) endRowLocked(now clock.Instant, contended bool) clock.Instant {
	p := &ln.pace
	lasted := time.Duration(now - p.began)
	d := jitter(min(lasted/partOfRow, rowTime)) // at random, because pace.refused recognises a new hold by how long its Client waited
	p.began, ln.turns = 0, 0
	lingered := ln.lingeredLocked()
	if ln.hold != nil && ln.hold.unheard.Load() && !lingered {
		return now
	}
	if contended {
		d += max(2*ln.q.roundTrip(), minSleep)
	}
	d = min(d, maxGap)
	if contended && ln.q.polls {
		d = max(d, p.sleep(0, 0))
	}
	if lingered {
		d = max(d, min(lasted, freshEnough)*3/2/partOfHold)
	}
	return now.Add(d)
}

// lingeredLocked reports whether the hold of the line has lingered. Other Clients may have waited
// meanwhile.
func (ln *line) lingeredLocked() bool { return ln.hold != nil && ln.hold.ghost != nil }

// lastLeavesLocked is called when the hold of the last caller in line has ended. It begins a gap
// even if the store has not refused this Client lately, because other Clients may have asked only
// during holds. If this Client took the key again immediately, the others would never find the key
// free. But after a brief row there is no gap, and if the key is contended, the next caller goes on
// with the row.
func (ln *line) lastLeavesLocked() {
	q := ln.q
	if q.traits.Ordered && !ln.lingeredLocked() {
		return // the driver's queue lets others in
	}
	now := q.clock.Now()
	if ln.sought {
		q.contended.note(ln.key, now)
	}
	k := q.contended.keys[ln.key]
	known := now < k.until
	brief := time.Duration(now-ln.pace.began) < briefRow
	if !brief { // otherwise the row goes on
		k.gapEnds = ln.endRowLocked(now, known)
	}
	if !known && k.gapEnds <= now {
		return
	}
	k.pace = ln.pace
	q.contended.set(ln.key, k, now)
}

// contended contains the keys that the store has refused lately.
//
// With an Ordered driver, a caller that wants such a key joins the driver's queue without an
// attempt, because during an attempt, callers of other Clients could join the queue first. With
// another driver, a caller that returns right after its Unlock leaves the key to other Clients for
// a gap. Otherwise it would take the key before Clients that the release has woken, or that poll.
//
// Keys whose times have passed are removed when the table has doubled since the last removal. So its
// size is in proportion to the keys that are in use, and a removal costs little for each key.
type contended struct {
	keys     map[string]contention
	sweepsAt int // the number of keys at which those whose times have passed are removed
}

type contention struct {
	until   clock.Instant // the end of the time for which the key counts as contended
	gapEnds clock.Instant // end of the gap after the last release, which may have passed
	pace    pace
}

const (
	contendedFor = time.Second // how long after its last refusal a key counts as contended
	leastSwept   = 256         // the least number of keys at which a removal begins
)

func (k *contended) note(key string, now clock.Instant) {
	at := k.keys[key]
	at.until = now.Add(contendedFor)
	k.set(key, at, now)
}

func (k *contended) set(key string, at contention, now clock.Instant) {
	if len(k.keys) >= k.sweepsAt {
		maps.DeleteFunc(k.keys, func(_ string, at contention) bool { return max(at.until, at.gapEnds) <= now })
		k.sweepsAt = max(2*len(k.keys), leastSwept)
	}
	if k.keys == nil {
		k.keys = map[string]contention{}
	}
	k.keys[key] = at
}

// handOverLocked gives h, whose last lease was unlocked, to the next caller in line. If that caller
// cannot use h, if other Clients should get a turn, or if h has left the line, handOverLocked
// returns false, and h must be released. A hand-over needs no call to the store, because the store
// knows only the token of the hold, and has confirmed the hold a moment ago.
func (h *hold) handOverLocked() bool {
	ln, now := h.line, h.renewer.clock.Now()
	t := ln.first()
	if ln.hold != h || ln.rowOverLocked(now) || !h.suitsLocked(t.r, now) {
		return false
	}
	ln.giveLeaseLocked(t, h.addLeaseLocked(t.ctx, t.r, now))
	return true
}

// suitsLocked reports whether a caller with the request r may get h: h is what r asks for, and the
// store has confirmed h a moment ago.
func (h *hold) suitsLocked(r *request, now clock.Instant) bool {
	switch {
	case !h.passableLocked():
		return false
	case r.ttl != h.claim.TTL || r.noRenew || r.fenced || r.shared || r.maxHold > 0:
		return false
	case h.renewer.closing.Err() != nil:
		return false
	}
	fresh := h.mayLinger || time.Duration(now-h.confirmed) < freshEnough
	return fresh && now < clock.Instant(h.deadline.Load())
}

// passableLocked reports whether a later caller may get h: h is renewed, was not extended or broken,
// and no caller has asked for a fence, a max hold or a min hold.
func (h *hold) passableLocked() bool {
	return !h.unpassed && h.renewal == renews && !h.claim.Fenced && h.limit == clock.Never && h.keep == 0
}

// A key lingers if its last lease had WithLinger and was unlocked, and the Client keeps the hold
// for its own next caller. Then the hold has one lease that belongs to no caller: the ghost. The
// line counts it as a caller. The ghost is renewed and lost like any lease, but no event names it.
// The next caller replaces the ghost (reuseLocked). If no caller comes in time, or the next caller
// cannot use the hold, the hold ends, and the reaper releases its token (endLingerLocked).
//
// A key lingers until freshEnough after the grant of the hold, not after the last Unlock. So other
// Clients wait for at most that time, however busy this Client is, and the gap after the row lets
// them in (endedLocked).

// lingerLocked lets the ghost keep the hold, whose last lease was unlocked. It returns false if the
// key must be released.
func (h *hold) lingerLocked(key string) bool {
	c, end := h.renewer, h.granted.Add(freshEnough)
	if h.line.hold != h || h.line.callers > 1 || c.closing.Err() != nil || !h.passableLocked() || c.clock.Now() >= end {
		return false
	}
	if h.ghost == nil {
		h.ghost = &Lease{hold: h, key: key, parent: context.Background(), since: h.granted, maxHold: clock.Never}
	}
	h.lingers = end
	h.leases = append(h.leases, h.ghost)
	h.joined++
	c.scheduleLocked(h)
	return true
}

// reuseLocked gives the hold, which lingers, to a caller. If the caller cannot use the hold, the
// result is nil.
func (h *hold) reuseLocked(t *turn) *Lease {
	now, _ := h.renewer.clock.Read() // the machine may have slept since the last lease was unlocked
	if h.line.rowOverLocked(now) || !h.suitsLocked(t.r, now) {
		return nil
	}
	h.lingers = 0
	h.leases = h.leases[:0]
	return h.addLeaseLocked(t.ctx, t.r, now)
}

// endLingerLocked ends a hold that lingers. The reaper releases the token, because the reaper needs
// few goroutines for many keys. After the release, the reaper closes freed, unless freed is nil.
func (h *hold) endLingerLocked(freed chan struct{}) {
	h.ghost.state.Store(released)
	h.lingers, h.leases = 0, nil
	h.renewer.unscheduleLocked(h)
	h.line.endedLocked(h)
	h.reapLocked(&reap{freed: freed})
}
