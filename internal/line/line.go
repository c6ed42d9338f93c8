// Package line queues the callers of one Client for each key, and decides when the Client leaves a
// key to other Clients. It does no I/O and has no mutex: the Client's mutex guards all of it.
package line

import (
	"cmp"
	"container/list"
	"errors"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/clock"
)

// Line contains the callers of one Client that want or hold one key. It exists only while there are
// such callers.
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
type Line struct {
	// Broken is when the last Break by this Client returned. It may have broken a hold that was
	// asked for earlier. 0 means that there was no Break.
	Broken clock.Instant

	q       *Queue
	key     string
	waiting list.List // the callers behind the head, as *Turn
	hold    *Hold     // the head's hold, until it is lost or released

	callers int32         // number of callers, including the head
	hasHead bool          // one of the callers is at the head
	alone   bool          // no other caller joins the line, and it is not in Queue.lines
	shared  bool          // its caller is shared
	sought  bool          // the head's hold came after a refusal, so others may want the key
	turns   int32         // number of holds in this row that began while callers waited
	pace    pace          // how the key is shared with other Clients
	gapEnds clock.Instant // end of the last gap, which may have passed

	// The fields below are what the store has answered to the callers of the line.

	// last says why the head, or the previous head, did not get the key: the store's ErrHeld, or an
	// outage. It is ErrHeldHere if the previous head had the key, and nil if nothing is known.
	last error

	// outage is the time of Clock.Awake at which the outage began, or 0 if there is none.
	outage clock.Instant

	// unanswered is the time of Clock.Awake at which the first attempt after the last answer or
	// outage began, or 0 if there was none.
	unanswered clock.Instant
}

// Hold is what a line knows of a hold. The Client's mutex guards the fields that are not atomic.
type Hold struct {
	// Engine is the engine's own pointer to the hold.
	Engine any

	// Granted is when the grant was received.
	Granted clock.Instant

	// Failed counts the renewals in a row that failed or had no answer. A release without an answer
	// counts as well.
	Failed int32

	// MayLinger says that the hold's present or last caller has WithLinger.
	MayLinger bool

	// Lingered says that the hold has lingered, so other Clients may have waited meanwhile.
	Lingered bool

	// Unheard is the field of that name in the hold's backend.Claim.
	Unheard atomic.Bool

	deadline atomic.Int64
}

// Deadline returns the instant until which the hold is trusted.
func (h *Hold) Deadline() clock.Instant { return clock.Instant(h.deadline.Load()) }

// Trust lets the hold be trusted until t. The deadline may be read without the Client's mutex.
func (h *Hold) Trust(t clock.Instant) { h.deadline.Store(int64(t)) }

// Turn is one caller of a line.
type Turn struct {
	Key    string
	Shared bool
	Since  clock.Instant // the time of Clock.Awake at which the caller came
	Caller any           // what a hand-over must know of the caller
	Ready  chan Ticket   // receives the caller's ticket, and has room for it; nil unless it waits

	place *list.Element // its place in the list Line.waiting; nil if it is not there
}

// Ticket tells a caller what to do next.
type Ticket struct {
	Do    Step
	Lease any   // for HaveLease: what Give was called with
	Err   error // for GiveUp

	// The fields below are for MayAsk.
	LastAnswer error         // why the last head did not have the key; see Line.last
	After      time.Duration // how long to leave the key to other Clients first
}

// Step is what a ticket tells a caller to do.
type Step int

// The steps of a caller.
const (
	MayAsk    Step = iota // ask the store
	MustWait              // wait for another ticket
	HaveLease             // use the lease, which was handed over; the line counts its hold
	GiveUp                // return Err; the line does not count the caller any more
)

// ErrHeldHere says that another caller of this Client has the key, had it a moment ago, or asked
// for it first.
var ErrHeldHere error = &backend.HeldError{Here: true}

// Holds reports whether h is the hold of the line.
func (ln *Line) Holds(h *Hold) bool { return ln.hold == h }

// Held reports whether a caller of the line holds the key.
func (ln *Line) Held() bool { return ln.hold != nil }

// Crowded reports whether the line has more than one caller.
func (ln *Line) Crowded() bool { return ln.callers > 1 }

// mayAsk reports whether a caller that has just come, and is counted already, may ask the store. If
// the driver is not Ordered, only the head may, so the caller must find the line without a head. If
// the driver is Ordered, it queues the callers, so each caller may ask. But a TryLock behind
// another caller does not ask, because that caller has the key or waits for it. During an outage
// even such a TryLock asks.
func (ln *Line) mayAsk(once bool) bool {
	if !ln.q.Ordered {
		return !ln.hasHead
	}
	return !once || ln.callers == 1 || ln.InOutage()
}

// leave takes a caller out of the count. When the last caller leaves, the line ends.
func (ln *Line) leave() {
	q := ln.q
	q.Callers--
	q.Changed()
	ln.callers--
	if ln.callers == 0 && !ln.alone {
		delete(q.lines, ln.key) // no caller refers to the line any more
	}
}

// Quit takes t, which waits, out of the line. If a ticket has reached t at the same moment, t does
// not use the ticket. If the ticket has a lease, Quit returns the lease, and the caller must unlock
// it. If the ticket made t the head, the next caller becomes the head.
func (ln *Line) Quit(t *Turn) (lease any) {
	if t.place != nil {
		ln.remove(t)
		ln.leave()
		return nil
	}

	// This does not block: the ticket was sent under the mutex, when t was taken out of the line.
	tk := <-t.Ready
	if tk.Do == MayAsk {
		ln.promote()
		ln.leave()
	}
	return tk.Lease
}

// LeaveWithoutHold removes a caller that has asked the store and got no hold. Unless the driver is
// Ordered, that caller is the head, and the first caller in line that has not waited for Timeout
// during the outage becomes the head. The callers before it get the error of the outage.
func (ln *Line) LeaveWithoutHold() {
	if !ln.q.Ordered {
		for {
			t := ln.First()
			if t == nil || ln.Outage(t.Since) < ln.q.Timeout {
				break // without an outage, Outage returns 0
			}
			ln.remove(t)
			t.Ready <- Ticket{Do: GiveUp, Err: ln.last}
			ln.leave()
		}
		ln.promote()
	}
	ln.leave()
}

// Started makes h the hold of the line. The head got h from the store. The argument waited is how
// long the Client waited for h. If sought is true, the first attempt did not get h.
func (ln *Line) Started(h *Hold, waited time.Duration, sought bool) {
	ln.q.Open++
	ln.hold = h
	ln.last = nil
	ln.outage = 0
	ln.unanswered = 0

	p := &ln.pace
	p.note(waited)
	p.found = 0

	// If the caller was refused before it got h, others may want the key, so a gap follows the
	// release of h, however long h lasts.
	ln.sought = sought

	// The row begins here even if no caller waits yet, because a caller may come during the hold
	// and get the hold by a hand-over. Without turns, a row begins anew with a hold that came after
	// a refusal, because another Client has had the key before that hold.
	if p.began == 0 || ln.turns == 0 && ln.sought {
		p.began = h.Granted
	}
	if ln.waiting.Len() > 0 {
		ln.turns++
	}
}

// Give sends t the lease l of the line's hold. As the head, t replaces the caller that unlocks.
func (ln *Line) Give(t *Turn, l any) {
	ln.remove(t)
	ln.turns++
	ln.leave() // removes the caller that unlocks; the line already counts t
	t.Ready <- Ticket{Do: HaveLease, Lease: l}
}

// Ended removes the caller whose hold h has ended. The next caller may ask the store.
func (ln *Line) Ended(h *Hold) {
	ln.q.Open--
	switch {
	case ln.shared: // the line has no other caller, and leaves no gap
	case ln.callers == 1: // the line ends
		ln.lastLeaves()
	case !ln.q.Ordered: // the next caller in line becomes the head
		ln.promote()
	case ln.hold == h:
		// The other callers wait in the driver, and need no ticket. If one of them has a newer hold
		// already, ln.hold is that hold, and stays.
		ln.hold = nil
	}
	ln.leave()
}

// promote makes the first caller that waits the head, or leaves the line without a head. The last
// head has had a hold that ends, or has given up, and then ln.hold is nil.
func (ln *Line) promote() {
	now := ln.q.Clock.Now()
	over := ln.RowOver(now)
	if ln.hold != nil {
		// Tell the next head that the key was held here. But if the last call for the hold was not
		// answered, the store may hang, so keep the error of the outage.
		if ln.hold.Failed == 0 {
			ln.last = ErrHeldHere
		}
		ln.pace.ended = now
	}

	next := ln.First()
	ln.hasHead = next != nil
	switch {
	case next == nil: // the row has ended
		ln.turns = 0
		ln.pace.began = 0
	case over:
		// Begin a gap. Otherwise other Clients would rarely find the key free.
		ln.gapEnds = ln.endRow(now, true)
	}
	ln.hold = nil
	if next == nil {
		return
	}

	// The ticket tells the caller that it is the head. If the caller leaves at the same moment,
	// Quit finds the ticket. The gap may have begun earlier, because the last head may have left
	// during a gap. Then the next head waits for the rest of that gap.
	ln.remove(next)
	after := max(time.Duration(ln.gapEnds-now), 0)
	next.Ready <- Ticket{Do: MayAsk, LastAnswer: ln.last, After: after}
}

// First returns the first caller that waits, or nil.
func (ln *Line) First() *Turn {
	e := ln.waiting.Front()
	if e == nil {
		return nil
	}
	return e.Value.(*Turn)
}

// remove takes t out of the list of the callers that wait.
func (ln *Line) remove(t *Turn) {
	ln.waiting.Remove(t.place)
	t.place = nil
}

// Asked records that the head makes an attempt, which it sends at the time sent of Clock.Awake.
func (ln *Line) Asked(sent clock.Instant) { ln.unanswered = cmp.Or(ln.unanswered, sent) }

// Answered records that a call failed with err: ErrHeld, or an outage, such as a broken connection
// or a timeout. The argument sent is the time of Clock.Awake at which the call began.
func (ln *Line) Answered(err error, sent clock.Instant) {
	ln.last = err
	ln.unanswered = 0
	if !errors.Is(err, backend.ErrHeld) {
		ln.outage = cmp.Or(ln.outage, sent)
		return
	}
	ln.outage = 0
	var held *backend.HeldError
	foreign := errors.As(err, &held) && held.Foreign
	ln.q.contended.note(ln.key, ln.q.Clock.Now(), foreign)
}

// Unanswered records that a call got no answer, because its caller's context ended first. The
// argument sent is the time of Clock.Awake at which the call began.
func (ln *Line) Unanswered(sent clock.Instant) {
	ln.Asked(sent)
	if ln.Stale(ln.last) {
		ln.last = nil
	}
}

// Yields returns how much longer the Client leaves the key to other programs now, or 0 if it does
// not; see mixed.go.
func (ln *Line) Yields() time.Duration {
	until := ln.q.contended.keys[ln.key].mixed
	if until == 0 {
		return 0 // the usual case, without a look at the clock
	}

	now := ln.q.Clock.Now()
	if now >= until {
		return 0
	}
	return yieldAt(ln.q.Clock.Time(now))
}

// InOutage reports whether there is an outage.
func (ln *Line) InOutage() bool { return ln.outage != 0 }

// Outage returns how long the line's outage has lasted, or 0 if there is no outage. The time counts
// from the start of the outage, or from the caller's arrival if that is later. The argument since
// is the time of Clock.Awake at which the caller arrived.
func (ln *Line) Outage(since clock.Instant) time.Duration {
	if ln.outage == 0 {
		return 0
	}
	return time.Duration(ln.q.Clock.Awake() - max(ln.outage, since))
}

// Stale reports whether the error answer is an ErrHeld that is too old to report. An ErrHeld is too
// old if attempts have had no answer for a third of Timeout, because the store may hang.
func (ln *Line) Stale(answer error) bool {
	if ln.unanswered == 0 || !errors.Is(answer, backend.ErrHeld) {
		return false
	}
	return time.Duration(ln.q.Clock.Awake()-ln.unanswered) >= ln.q.Timeout/3
}

// Refusal returns why a caller in line does not have the key. If this Client holds the key, the
// reason is a HeldError. Otherwise it is the store's last answer to the head, or nil if there is no
// answer or the answer is too old.
func (ln *Line) Refusal() error {
	switch {
	case ln.hold != nil:
		left := time.Duration(ln.hold.Deadline() - ln.q.Clock.Now())
		return &backend.HeldError{Owner: ln.q.Owner, RetryAfter: max(left, 0), Here: true}
	case ln.Stale(ln.last):
		return nil
	}
	return ln.last
}

// A row is a sequence of holds that callers of one Client have of one key, one after another. After
// a row, the Client leaves the key to other Clients for a time, the gap.
//
// A row ends when it has lasted for Fresh. It ends earlier if it has had rowTurns holds and has
// lasted for max(rowTime, rowTrips round trips). If no caller waits when a hold ends, the row goes
// on with the next caller, unless the row has lasted for briefRow. The reason is a caller that
// locks in a loop and sleeps between two holds: even a short sleep often lasts for a millisecond.
const (
	rowTime  = 10 * time.Millisecond
	rowTrips = 10
	rowTurns = 5
	briefRow = 2 * time.Millisecond

	// The gap includes min((length of the row)/partOfRow, rowTime), so that a Client that has just
	// begun to ask finds the key free.
	partOfRow = 24

	// maxGap bounds the gap, so that slow answers do not leave a free key unused for seconds.
	maxGap = 100 * time.Millisecond
)

// RowOver reports whether other Clients should get a turn now. If the hold may linger, the row
// lasts for Fresh, however many callers use the hold. Any other row is not over before it has had a
// turn, because until then the Client has not preferred its own callers to those of others.
func (ln *Line) RowOver(now clock.Instant) bool {
	lasted := time.Duration(now - ln.pace.began)
	mayLinger := ln.hold != nil && ln.hold.MayLinger
	switch {
	case lasted >= Fresh:
		return ln.turns > 0 || mayLinger
	case mayLinger:
		return false
	}
	return ln.turns >= rowTurns && lasted >= max(rowTime, rowTrips*ln.q.RoundTrip())
}

// endRow ends the row of the line, and returns the end of the gap after it. The argument contended
// is true if the store has refused the key lately, or if callers of this Client wait for it.
func (ln *Line) endRow(now clock.Instant, contended bool) clock.Instant {
	p := &ln.pace
	lasted := time.Duration(now - p.began)

	// The gap has a random length, because pace.refused recognises a new hold by how long its
	// Client waited.
	d := Jitter(min(lasted/partOfRow, rowTime))
	p.began = 0
	ln.turns = 0

	// If the driver knows that nobody waits, there is no gap. But programs that do not listen may
	// have waited while the key lingered, and the driver does not know of them.
	lingered := ln.lingered()
	if ln.hold != nil && ln.hold.Unheard.Load() && !lingered {
		return now
	}

	// Two round trips are enough for another Client to learn of the release and to ask.
	if contended {
		d += max(2*ln.q.RoundTrip(), MinSleep)
	}
	d = min(d, maxGap)

	// If other Clients poll, they find the key free only in a gap as long as their sleeps. Take
	// this Client's own first sleep as the measure.
	if contended && ln.q.Polls {
		d = max(d, p.sleep(0, 0))
	}

	// A caller that polls during a hold sleeps for age/partOfHold, and the function around makes
	// that up to 3/2 of it. After a hold that lingered, let the gap be as long as the last such
	// sleep, so that the caller need not wait for a second row.
	if lingered {
		d = max(d, min(lasted, Fresh)*3/2/partOfHold)
	}
	return now.Add(d)
}

// lingered reports whether the hold of the line has lingered.
func (ln *Line) lingered() bool { return ln.hold != nil && ln.hold.Lingered }

// lastLeaves is called when the hold of the last caller in line has ended. It stores the gap and
// the pace of the line for the next line of the key.
//
// It begins a gap even if the store has not refused this Client lately, because other Clients may
// have asked only during holds. If this Client took the key again immediately, the others would
// never find the key free. But after a brief row there is no gap, and if the key is contended, the
// next caller goes on with the row.
func (ln *Line) lastLeaves() {
	q := ln.q
	if q.Ordered && !ln.lingered() {
		return // the driver's queue lets others in
	}
	now := q.Clock.Now()
	if ln.sought {
		q.contended.note(ln.key, now, false)
	}

	k := q.contended.keys[ln.key]
	contended := now < k.until
	brief := time.Duration(now-ln.pace.began) < briefRow
	if !brief { // otherwise the row goes on
		k.gapEnds = ln.endRow(now, contended)
	}
	if !contended && k.gapEnds <= now {
		return // the next line needs nothing of this one
	}

	k.pace = ln.pace
	q.contended.set(ln.key, k, now)
}

// Waited returns how long the Client has waited for the key until now, for a caller that came at
// the instant since and has waited. Times of more than longestWait count as longestWait. The result
// is never 0, which would mean that the caller has not waited.
func (ln *Line) Waited(now, since clock.Instant) time.Duration {
	return min(max(time.Duration(now-max(ln.pace.ended, since)), 1), longestWait)
}

// Refused records that the store has refused a caller that came at the instant since, and returns
// how long to sleep before the next attempt. The argument held is the refusal.
func (ln *Line) Refused(since clock.Instant, held *backend.HeldError) time.Duration {
	now := ln.q.Clock.Now()
	waited := time.Duration(now - max(ln.pace.ended, since))
	return ln.pace.refused(now, waited, held)
}
