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
// A row ends after maxTurns or freshEnough in any case. After rowTurns turns it ends
// once it has lasted rowTime and rowTrips round trips.
const (
	rowTime  = 10 * time.Millisecond
	rowTrips = 10
	rowTurns = 5
	maxTurns = 32

	minPace = minSleep
	maxPace = 50 * time.Millisecond
	faster  = 0.5                  // factor of the pace when an attempt finds another hold than the last
	slower  = 1.25                 // factor when it finds the same hold; so one attempt in four finds another
	sameEnd = 2 * time.Millisecond // two holds whose ends differ by no more count as one

	maxGap  = time.Millisecond // for Clients that the store wakes
	maxLone = 4                // after so many consecutive gaps that no Client used, gaps are shortened
	probe   = 8                // then one gap in so many keeps its length
)

// pace is how the callers of one Client share a key with other Clients. It belongs
// to a line.
type pace struct {
	began  instant       // when the row began
	mean   time.Duration // mean sleep between two attempts; 0 before the first
	end    instant       // of the term that the last attempt found, or 0
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
		ln.turns >= rowTurns && lasted >= max(rowTime, rowTrips*c.roundTrip())
}

// gapLocked returns how long to leave the key to other Clients after a row. If the
// store wakes waiters, a moment is enough. If waiters poll, the gap is as long as one of
// their sleeps. If the last gaps brought no other Client, most gaps are short. One in
// probe keeps its length, so that a new Client can still get the key.
func (c *Client) gapLocked(ln *line, now instant) time.Duration {
	p := &ln.pace
	lasted := now.sub(p.began)
	d := max(2*c.roundTrip(), minSleep)
	if c.waiter != nil {
		return d + min(lasted/12, maxGap)
	}

	p.gapped = true
	if p.mean == 0 {
		p.mean = max(lasted/4, minPace)
	}
	if p.lone < maxLone || p.lone%probe == 0 {
		d = max(d, min(p.sleep(), lasted/2))
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
	p.gapped, p.end = false, 0
}

// refusedLocked notes that another Client holds the key, and returns how long to sleep.
// Two attempts found the same hold if its term ends at the same time. Trip is a
// round trip, by which the two times may differ.
func (p *pace) refusedLocked(now instant, held *backend.HeldError, trip time.Duration) time.Duration {
	last := p.end
	p.end = now.add(held.RetryAfter)
	switch {
	case p.mean == 0:
		p.mean = minPace
	case last == 0:
		// This is the first attempt since the Client had the key.
	case held.RetryAfter > 0 && p.end.sub(last).Abs() > max(sameEnd, trip):
		p.mean = max(time.Duration(float64(p.mean)*faster), minPace)
	default:
		p.mean = min(time.Duration(float64(p.mean)*slower), maxPace)
	}
	return p.sleep()
}

// sleep is how long to sleep once: from half of the mean to one and a half. So
// Clients do not stay in step.
func (p *pace) sleep() time.Duration { return p.mean/2 + rand.N(p.mean) }
