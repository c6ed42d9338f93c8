package hasp

import (
	"math/rand/v2"
	"time"
)

// A row is the holds of one key that callers of one Client have one after another.
// After a row the Client leaves the key to other Clients for a gap.
//
// A row ends after maxTurns holds, or when it has lasted freshEnough, at the latest. After
// rowTurns holds it ends once it has lasted rowTime and rowTrips round trips.
const (
	rowTime  = 10 * time.Millisecond
	rowTrips = 10
	rowTurns = 5
	maxTurns = 32

	maxGap   = time.Millisecond       // if the store wakes waiters, a gap is at most this and two round trips
	maxTrips = 100 * time.Millisecond // what two round trips count for at most: one slow answer must not leave a free key alone for seconds
)

// Clients that poll sleep for a ninth of the time for which Clients wait for the key. So
// they make about eight attempts for each hold, however many Clients there are. It is as
// many for each Client, because a hold tells how long its Client waited: all Clients know
// the same mean. If each knew only its own waits, one that was lucky would poll more often,
// and so be lucky again.
const (
	sleepsInWait = 9
	meanOver     = 4 // of so many waits the mean is made

	// A Client sleeps for an eighth of the age of a hold at least, so that a long one costs
	// few attempts, and no longer than maxSleep. If the key changes hands within briefHold, a
	// Client may sleep for briefSleep, because other Clients ask meanwhile.
	partOfHold = 8
	maxSleep   = 50 * time.Millisecond
	briefHold  = time.Second
	briefSleep = 250 * time.Millisecond

	// A wait for a hold of more than briefHold counts as longWait, because it says nothing
	// about the waits for brief holds that follow.
	longWait = 200 * time.Millisecond

	// A caller that locks again at once may go on with its row for so long: a sleep often
	// lasts for a millisecond, however short it was to be.
	briefRow = 2 * time.Millisecond

	// After one row in probe, a Client that knows of no other leaves the key for a part of
	// the row, so that a Client that has just come finds it free.
	probe     = 8
	partOfRow = 4
)

// pace is how the callers of one Client share a key with other Clients. It belongs
// to a line.
type pace struct {
	began instant       // when the row began
	row   instant       // when the row began that the line before did not finish; 0 if there is none
	ended instant       // when the last row ended, or a long hold that kept the line waiting: waits count from here
	mean  time.Duration // how long Clients wait for the key; 0 if that is not known
	found instant       // when an attempt found the present hold first; 0 if none was refused since the Client had the key
	held  time.Duration // how long the Client of that hold waited
}

// rowOverLocked reports whether other Clients should get a turn now.
func (c *Client) rowOverLocked(ln *line, now instant) bool {
	if ln.turns == 0 {
		return false
	}
	lasted := now.sub(ln.pace.began)
	return ln.turns >= maxTurns || lasted >= freshEnough ||
		ln.turns >= rowTurns && lasted >= max(rowTime, rowTrips*time.Duration(c.trip.Load()))
}

// gapLocked returns how long to leave the key to other Clients after a row. If the store
// wakes waiters, a moment is enough. If waiters poll, the gap is the first sleep of a wait.
// Every gap lasts at least two round trips, or 100 ms if that is shorter.
func (c *Client) gapLocked(ln *line, now instant) time.Duration {
	p := &ln.pace
	lasted := now.sub(p.began)
	d := min(max(2*time.Duration(c.trip.Load()), minSleep), maxTrips)
	if c.waiter != nil {
		return d + min(lasted/12, maxGap)
	}
	if p.mean == 0 && rand.N(probe) == 0 {
		d = max(d, probeGap(lasted))
	}
	return max(d, p.sleep(0, 0))
}

// probeGap returns the gap in which a Client that has just come can find the key free.
func probeGap(lasted time.Duration) time.Duration { return jitter(min(lasted/partOfRow, maxSleep)) }

// waitedLocked returns how long the Client has waited for the key. It is 0 if no attempt was
// refused, and there was no gap.
func (w *wait) waitedLocked(now instant) time.Duration {
	if w.tries > 1 || w.stood {
		p := &w.line.pace
		waited := max(now.sub(max(p.ended, w.start)), 1)
		if p.found != 0 && now.sub(p.found) >= briefHold {
			waited = min(waited, longWait)
		}
		return waited
	}
	return 0
}

// note adds a wait to the mean.
func (p *pace) note(waited time.Duration) { p.mean += (waited - p.mean) / meanOver }

// acquiredLocked notes that the Client has the key, for which it waited. Its wait counts
// only if the waits of others are known: a Client that knows just its own is not to poll
// by them.
func (p *pace) acquiredLocked(waited time.Duration) {
	if p.mean > 0 {
		p.note(waited)
	}
	p.found = 0
}

// refusedLocked notes that an attempt found the key held, and returns how long to sleep.
// The Client has waited for the key, and held is how long the Client of the hold waited.
func (p *pace) refusedLocked(now instant, waited, held time.Duration) time.Duration {
	if p.found == 0 || held != p.held {
		if p.found != 0 && now.sub(p.found) >= briefHold {
			p.ended, waited = now, 0 // a long hold has ended
		}
		p.found, p.held = now, held
		switch {
		case p.mean == 0:
			p.mean = held
		case held > 0:
			p.note(held)
		}
	}
	return p.sleep(waited, now.sub(p.found))
}

// sleep returns how long to sleep, if the Client has waited for the key and knows the
// present hold for an age. A Client that has waited for longer asks sooner, so that no wait
// is much longer than the others. At the mean of all waits it sleeps for a ninth of that.
func (p *pace) sleep(waited, age time.Duration) time.Duration {
	d := time.Duration(0)
	if p.mean > 0 {
		d = time.Duration(2 * float64(p.mean) / sleepsInWait / (1 + float64(waited)/float64(p.mean)))
	}
	if age < briefHold {
		d = min(d, briefSleep)
	} else {
		d = min(d, maxSleep)
	}
	// From half of that to one and a half, so that Clients do not stay in step.
	d = max(d, min(age/partOfHold, maxSleep), minSleep)
	return d/2 + rand.N(d)
}
