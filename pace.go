package hasp

import (
	"math/rand/v2"
	"time"

	"github.com/hasplock/hasp/backend"
)

// A row is the holds of one key that callers of one Client have one after another.
// After a row the Client leaves the key to other Clients for a gap. A Client that
// polls sleeps by its pace, which follows how often the key changes hands.
//
// A row ends after maxTurns holds, or when it has lasted freshEnough, at the latest. After
// rowTurns holds it ends once it has lasted rowTime and rowTrips round trips.
const (
	rowTime  = 10 * time.Millisecond
	rowTrips = 10
	rowTurns = 5
	maxTurns = 32

	minPace = minSleep
	maxPace = 50 * time.Millisecond
	faster  = 0.5                  // factor of the pace when an attempt finds another hold than the last
	slower  = 1.25                 // factor when it finds the same hold; with both, about one attempt in four finds another
	rounded = 2 * time.Millisecond // stores round the rest of a term by less than this

	maxGap   = time.Millisecond       // if the store wakes waiters, a gap is at most this and two round trips
	maxTrips = 100 * time.Millisecond // of these: one slow answer must not leave a free key alone for seconds
	maxLone  = 4                      // after so many consecutive gaps that no other Client used, gaps are shortened
	probe    = 8                      // then one gap in so many keeps its length
)

// pace is how the callers of one Client share a key with other Clients. It belongs
// to a line.
type pace struct {
	began  instant       // when the row began
	mean   time.Duration // mean sleep between two attempts; 0 before the first
	sooner instant       // the earliest end of the term that the last attempt found; 0 if none was refused since the Client had the key
	later  instant       // the latest end of that term
	gapped bool          // the Client has left the key to others, and has not had it since
	lone   int           // consecutive gaps after which the key was still free
}

// rowOverLocked reports whether other Clients should get a turn now.
func (c *Client) rowOverLocked(ln *line, now instant) bool {
	if c.traits.Ordered || ln.turns == 0 {
		return ln.turns >= c.turns
	}
	lasted := now.sub(ln.pace.began)
	return ln.turns >= c.turns || lasted >= freshEnough ||
		ln.turns >= rowTurns && lasted >= max(rowTime, rowTrips*time.Duration(c.trip.Load()))
}

// gapLocked returns how long to leave the key to other Clients after a row. If the
// store wakes waiters, a moment is enough. If waiters poll, the gap is as long as a sleep
// by this Client's own pace, but at most a third as long as the row. If the last gaps
// brought no other Client, most gaps are short. One in probe keeps its length, so that a
// new Client can still get the key. Every gap lasts at least two round trips.
func (c *Client) gapLocked(ln *line, now instant) time.Duration {
	p := &ln.pace
	lasted := now.sub(p.began)
	d := min(max(2*time.Duration(c.trip.Load()), minSleep), maxTrips)
	if c.waiter != nil {
		return d + min(lasted/12, maxGap)
	}

	p.gapped = true
	if p.mean == 0 {
		p.mean = min(max(lasted/4, minPace), maxPace)
	}
	if p.lone < maxLone || p.lone%probe == 0 {
		d = max(d, min(p.sleep(), lasted/3))
	}
	return d
}

// acquiredLocked notes that the Client has the key. First says that its first attempt
// took it.
func (p *pace) acquiredLocked(first bool) {
	switch {
	case !first:
		p.lone = 0
	case p.gapped:
		p.lone++
	}
	p.gapped, p.sooner = false, 0
}

// refusedLocked notes that an attempt found the key held, and returns how long to sleep.
// The attempt began at asked and was answered by now.
func (p *pace) refusedLocked(asked, now instant, held *backend.HeldError) time.Duration {
	// The store read the rest of the term at some time between asked and now. A late
	// answer thus makes the bounds wider, and does not look like another hold.
	hadTerm, sooner, later := p.sooner != 0, p.sooner, p.later
	p.sooner, p.later = asked.add(held.RetryAfter-rounded), now.add(held.RetryAfter)

	switch {
	case p.mean == 0:
		p.mean = minPace
	case !hadTerm:
		// This is the first attempt since the Client had the key.
	case held.RetryAfter > 0 && (p.sooner > later || p.later < sooner):
		// No end of a term fits both answers: the key has changed hands.
		p.mean = max(time.Duration(float64(p.mean)*faster), minPace)
	default:
		p.mean = min(time.Duration(float64(p.mean)*slower), maxPace)
	}
	return p.sleep()
}

// sleep is how long to sleep once: from half of the mean to one and a half. So
// Clients do not stay in step.
func (p *pace) sleep() time.Duration { return p.mean/2 + rand.N(p.mean) }
