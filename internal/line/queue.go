package line

import (
	"cmp"
	"maps"
	"time"

	"github.com/hasplock/hasp/internal/clock"
)

// Fresh bounds the time from the store's confirmation of a hold to its hand-over. It also bounds
// how long a row of holds lasts; see rowTime.
const Fresh = 50 * time.Millisecond

// Queue stores, for each key, the callers of one Client that want or hold the key. It is a state
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
type Queue struct {
	Clock     *clock.Clock
	Ordered   bool                 // the driver queues the callers
	Polls     bool                 // nothing in the store wakes callers, so they must poll
	Timeout   time.Duration        // how long a caller waits during an outage
	Owner     string               // the holder, in a refusal by this Client's own hold
	RoundTrip func() time.Duration // the approximate time of one call to the store, or 0
	Changed   func()               // is called when a caller has left

	Callers int // number of callers in all lines

	// Open is the number of holds that are trusted or being released, or that Close ended before
	// their Unlock.
	Open int

	lines     map[string]*Line // the line of each key, except the lines of callers that are alone
	contended contended        // keys that other Clients may want
}

// Join adds a caller to the line of its key. If once is true, the caller does not wait for others.
// Join returns the line, or nil if the line does not count the caller.
func (q *Queue) Join(t *Turn, once bool) (*Line, Ticket) {
	if t.Shared {
		return q.Alone(t.Key, true), Ticket{Do: MayAsk}
	}

	now := q.Clock.Now()
	k := q.contended.keys[t.Key] // the zero value if other Clients do not want the key
	ln := q.lines[t.Key]
	if ln == nil {
		ln = q.open(t.Key)
		if now < k.until { // the key is contended, so go on with the pace of its last line
			ln.pace = k.pace
		}
	}
	q.Callers++
	ln.callers++

	switch {
	case ln.mayAsk(once):
		// If the key's last line has begun a gap (lastLeaves), this caller waits for the end of the
		// gap. The method promote does the same for callers that wait in a line. An Ordered driver
		// needs gaps only for programs that do not use its queue, after a key has lingered.
		ln.hasHead = true
		tk := Ticket{Do: MayAsk, After: max(time.Duration(k.gapEnds-now), 0)}
		if tk.After > 0 {
			// The wait of the caller may end before the gap, so before the store is asked. For that
			// case, say why the caller does not have the key.
			ln.last = ErrHeldHere
			tk.LastAnswer = ErrHeldHere
		}
		return ln, tk
	case once:
		err := cmp.Or(ln.Refusal(), ErrHeldHere)
		ln.leave()
		return nil, Ticket{Do: GiveUp, Err: err}
	}

	// Wait in line. The channel has room for the ticket, so the sender never blocks.
	t.Ready = make(chan Ticket, 1)
	t.place = ln.waiting.PushBack(t)
	return ln, Ticket{Do: MustWait}
}

// open returns a new line of key, which other callers may join.
func (q *Queue) open(key string) *Line {
	ln := &Line{q: q, key: key}
	if q.lines == nil {
		q.lines = map[string]*Line{}
	}
	q.lines[key] = ln
	return ln
}

// Alone returns a line with one caller, which no other caller joins. The argument shared says
// whether the caller is shared.
func (q *Queue) Alone(key string, shared bool) *Line {
	q.Callers++
	return &Line{q: q, key: key, callers: 1, hasHead: true, alone: true, shared: shared}
}

// Line returns the line of key, or nil. It does not know the lines of callers that are alone.
func (q *Queue) Line(key string) *Line { return q.lines[key] }

// Lines returns the number of lines that other callers may join.
func (q *Queue) Lines() int { return len(q.lines) }

// Hold returns the hold of the line of key, or nil.
func (q *Queue) Hold(key string) *Hold {
	if ln := q.lines[key]; ln != nil {
		return ln.hold
	}
	return nil
}

// Unused returns the keys before the first one that is in use. A key is in use if a caller of this
// Client wants or holds it, or if it is contended and the Client leaves it to other Clients for a
// gap.
func (q *Queue) Unused(keys []string) []string {
	now := q.Clock.Now()
	for i, key := range keys {
		k := q.contended.keys[key]
		if q.lines[key] != nil || now < min(k.gapEnds, k.until) {
			return keys[:i]
		}
	}
	return keys
}

// Contended reports whether other Clients may have wanted key at the instant at.
func (q *Queue) Contended(key string, at clock.Instant) bool {
	return at < q.contended.keys[key].until
}

// ContendedKeys returns the size of the table of contended keys.
func (q *Queue) ContendedKeys() int { return len(q.contended.keys) }

// contended contains the keys that the store has refused lately.
//
// With an Ordered driver, a caller that wants such a key joins the driver's queue without an
// attempt, because during an attempt, callers of other Clients could join the queue first. With
// another driver, a caller that returns right after its Unlock leaves the key to other Clients for
// a gap. Otherwise it would take the key before Clients that the release has woken, or that poll.
//
// Keys whose times have passed are removed when the table has doubled since the last removal. So
// its size is in proportion to the keys that are in use, and a removal costs little for each key.
type contended struct {
	keys     map[string]contention
	sweepsAt int // the number of keys at which those whose times have passed are removed
}

type contention struct {
	until   clock.Instant // the end of the time for which the key counts as contended
	gapEnds clock.Instant // end of the gap after the last release, which may have passed
	mixed   clock.Instant // until when the key counts as mixed
	pace    pace
}

const (
	contendedFor = time.Second // how long after its last refusal a key counts as contended
	leastSwept   = 256         // the least number of keys at which a removal begins
)

// note records that the store has refused key. The argument foreign says whether the record was of
// another program.
func (k *contended) note(key string, now clock.Instant, foreign bool) {
	at := k.keys[key]
	at.until = now.Add(contendedFor)
	if foreign {
		at.mixed = now.Add(mixedFor)
		at.until = max(at.until, at.mixed)
	}
	k.set(key, at, now)
}

// set stores what is known of key. If the table has doubled since the last removal, it first
// removes the keys whose times have passed.
func (k *contended) set(key string, at contention, now clock.Instant) {
	if len(k.keys) >= k.sweepsAt {
		passed := func(_ string, at contention) bool { return max(at.until, at.gapEnds) <= now }
		maps.DeleteFunc(k.keys, passed)
		k.sweepsAt = max(2*len(k.keys), leastSwept)
	}
	if k.keys == nil {
		k.keys = map[string]contention{}
	}
	k.keys[key] = at
}
