package hasp

import (
	"math/rand/v2"
	"time"

	"github.com/hasplock/hasp/internal/clock"
)

// A polling Client sleeps for a ninth of the mean wait for the key. Therefore all Clients together
// make about eight attempts for each hold, however many Clients there are. The record of a hold
// says how long its Client waited, so all Clients know the same mean. If each Client knew only its
// own waits, a lucky Client would poll more often, and therefore get the key more often.
const (
	sleepsInWait = 9
	meanOver     = 4                      // the weight of a new wait in the mean is 1/meanOver
	longestWait  = 2 * time.Second        // a longer wait counts as two seconds, because long holds have caused it
	maxSleep     = 250 * time.Millisecond // the longest sleep, before the random variation

	// A Client sleeps for at least min(age of the hold/partOfHold, longSleep), so that a long hold
	// costs few attempts.
	partOfHold = 8
	longSleep  = 50 * time.Millisecond
)

// pace decides how the callers of one Client share a key with other Clients. It belongs to a line.
// If the key is contended, the next line of the key takes over the pace.
type pace struct {
	began clock.Instant // when the row of holds began (see queue.go); 0 between two rows
	ended clock.Instant // when the last head's hold ended; waits count from that time
	mean  time.Duration // the mean wait for the key; 0 if it is not known
	found clock.Instant // when an attempt first found the present hold; 0 if no attempt was refused since the Client had the key
	held  time.Duration // how long the Client of the present hold had waited
}

// refused records that the key was held, and returns how long to sleep. The argument waited is how
// long this Client has waited, and held is how long the holder's Client had waited.
func (p *pace) refused(now clock.Instant, waited, held time.Duration) time.Duration {
	if p.found == 0 || held != p.held {
		p.found, p.held = now, held
		switch {
		case p.mean == 0:
			p.mean = held
		case held > 0:
			p.mean += (held - p.mean) / meanOver
		}
	}
	return p.sleep(waited, time.Duration(now-p.found))
}

// sleep returns how long to sleep. The argument waited is how long the Client has waited for the
// key, and age is how long it has known the present hold. If waited is the mean wait, the sleep is
// a ninth of the mean. The longer the wait, the shorter the sleep, so that no wait is much longer
// than others.
func (p *pace) sleep(waited, age time.Duration) time.Duration {
	d := minSleep
	if p.mean > 0 {
		d = max(d, time.Duration(2*float64(p.mean)/sleepsInWait/(1+float64(waited)/float64(p.mean))))
	}
	d = max(min(d, maxSleep), min(age/partOfHold, longSleep))
	// Return between half of d and one and a half of d, so that Clients do not stay in step.
	return d/2 + rand.N(d)
}
