package line

import (
	"math/rand/v2"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/clock"
)

// A polling Client sleeps for a ninth of the mean wait for the key. Therefore all Clients together
// make about eight attempts for each hold, however many Clients there are. The record of a hold
// says how long its Client waited, so all Clients know the same mean. If each Client knew only its
// own waits, a lucky Client would poll more often, and therefore get the key more often.
const (
	sleepsInWait = 9
	meanOver     = 4                      // the weight of a new wait in the mean is 1/meanOver
	maxSleep     = 250 * time.Millisecond // the longest sleep, before the random variation

	// longestWait is what a longer wait counts as, because long holds have caused it.
	longestWait = 2 * time.Second

	// A Client sleeps for at least min(age of the hold/partOfHold, longSleep), so that a long hold
	// costs few attempts.
	partOfHold = 8

	// The record of another program does not say how long it has waited. During its hold, a Client
	// that has waited for d sleeps for at least d/partOfWait, within these bounds.
	partOfWait  = 32
	leastAsleep = time.Millisecond
	mostAsleep  = 5 * time.Millisecond
	longSleep   = 50 * time.Millisecond
)

// MinSleep is the shortest sleep between two attempts, before the random variation.
const MinSleep = 100 * time.Microsecond

// Jitter returns a random duration between d/2 and d.
func Jitter(d time.Duration) time.Duration {
	return d - rand.N(d/2+1)
}

// pace decides how the callers of one Client share a key with other Clients. It belongs to a line.
// If the key is contended, the next line of the key takes over the pace.
type pace struct {
	began clock.Instant // when the row of holds began (see line.go); 0 between two rows
	ended clock.Instant // when the last head's hold ended; waits count from that time
	mean  time.Duration // the mean wait for the key; 0 if it is not known
	held  time.Duration // how long the Client of the present hold had waited
	ends  clock.Instant // the end of the term of the present hold of another program

	// found is when an attempt first found the present hold. It is 0 if no attempt was refused
	// since the Client had the key.
	found clock.Instant
}

// note records that this Client has waited for a hold. Such a wait counts only if the waits of
// others are known, because a Client must not set its pace by its own waits alone.
func (p *pace) note(waited time.Duration) {
	if p.mean > 0 && waited > 0 {
		p.mean += (waited - p.mean) / meanOver
	}
}

// refused records that the key was held, as held says, and returns how long to sleep. The argument
// waited is how long this Client has waited.
func (p *pace) refused(now clock.Instant, waited time.Duration,
	held *backend.HeldError) time.Duration {
	// The record of a hold says how long its Client waited. If that differs from the last record,
	// the hold is a new one. The record of another program does not say it. Such a hold is new if
	// its term ends later. Allow for leastAsleep, because now and RetryAfter are not exact.
	ends := now.Add(held.RetryAfter)
	newForeign := held.Foreign && ends > p.ends.Add(leastAsleep)

	if p.found == 0 || held.Waited != p.held || newForeign {
		p.found = now
		p.held = held.Waited
		p.ends = ends
		switch {
		case p.mean == 0:
			p.mean = p.held // 0 if the record does not say it
		case p.held > 0:
			p.mean += (p.held - p.mean) / meanOver
		}
	}

	age := time.Duration(now - p.found)
	if held.Foreign { // see partOfWait
		d := min(max(waited/partOfWait, leastAsleep), mostAsleep)
		return around(max(d, min(age/partOfHold, longSleep)))
	}
	return p.sleep(waited, age)
}

// sleep returns how long to sleep. The argument waited is how long the Client has waited for the
// key, and age is how long it has known the present hold. If waited is the mean wait, the sleep is
// a ninth of the mean. The longer the wait, the shorter the sleep, so that no wait is much longer
// than others.
func (p *pace) sleep(waited, age time.Duration) time.Duration {
	d := MinSleep // if no mean is known
	if p.mean > 0 {
		mean := float64(p.mean)
		share := 2 / (1 + float64(waited)/mean) // 2 at first, and 1 when waited is the mean
		d = max(d, time.Duration(share*mean/sleepsInWait))
	}
	d = max(min(d, maxSleep), min(age/partOfHold, longSleep))
	return around(d)
}

// around returns between half of d and one and a half of d, so that Clients do not stay in step.
func around(d time.Duration) time.Duration { return d/2 + rand.N(d) }
