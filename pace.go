package hasp

import (
	"math/rand/v2"
	"time"
)

// A row is the holds of one key that callers of one Client have one after another.
// After a row the Client leaves the key to other Clients for a gap.
//
// A row ends after rowTurns holds, once it has lasted rowTime and rowTrips round trips, or when
// it has lasted freshEnough. A caller that locks again at once, when no other waited, may go on
// with its row for briefRow: a sleep often lasts for a millisecond, however short it was to be.
const (
	rowTime  = 10 * time.Millisecond
	rowTrips = 10
	rowTurns = 5
	briefRow = 2 * time.Millisecond

	// A part of the row, up to rowTime, belongs to the gap, so that a Client that has just come
	// finds the key free.
	partOfRow = 24
	maxGap    = 100 * time.Millisecond // one slow answer must not leave a free key alone for seconds
)

// Clients that poll sleep for a ninth of the time for which Clients wait for the key. So
// they make about eight attempts for each hold, however many Clients there are. It is as
// many for each Client, because a hold tells how long its Client waited: all Clients know
// the same mean. If each knew only its own waits, one that was lucky would poll more often,
// and so be lucky again.
const (
	sleepsInWait = 9
	meanOver     = 4                      // of so many waits the mean is made
	longestWait  = 2 * time.Second        // what a longer wait counts for, because it says nothing about waits for brief holds
	maxSleep     = 250 * time.Millisecond // before it varies at random

	// A Client sleeps for an eighth of the age of a hold at least, up to longSleep, so that a
	// long hold costs few attempts.
	partOfHold = 8
	longSleep  = 50 * time.Millisecond
)

// pace is how the callers of one Client share a key with other Clients. It belongs
// to a line. If the key is contended, the next line of the key goes on with it.
type pace struct {
	began instant       // when the row began; 0 between two rows
	ended instant       // when the last row ended: waits count from here
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
	return lasted >= freshEnough || ln.turns >= rowTurns && lasted >= max(rowTime, rowTrips*c.roundTrip())
}

// endRowLocked ends the row of ln, and returns when the gap after it ends. If the key is
// contended, other Clients have at least two round trips. If they poll, they have as long as
// this Client would sleep first.
func (c *Client) endRowLocked(ln *line, now instant, contended bool) instant {
	p := &ln.pace
	d := jitter(min(now.sub(p.began)/partOfRow, rowTime)) // others take two equal waits for one hold
	p.began, ln.turns = 0, 0
	if contended {
		d += max(2*c.roundTrip(), minSleep)
	}
	d = min(d, maxGap)
	if contended && c.store.polls {
		d = max(d, p.sleep(0, 0))
	}
	return now.add(d)
}

// waitedLocked returns how long the Client has waited for the key. It is 0 if no attempt was
// refused, and there was no gap.
func (w *wait) waitedLocked(now instant) time.Duration {
	if w.tries > 1 || w.stood {
		return min(max(now.sub(max(w.line.pace.ended, w.start)), 1), longestWait)
	}
	return 0
}

// note adds a wait to the mean.
func (p *pace) note(waited time.Duration) { p.mean += (waited - p.mean) / meanOver }

// acquiredLocked notes that the Client has the key, for which it waited. Its wait counts
// only if the waits of others are known: a Client that knows just its own is not to poll
// by them.
func (p *pace) acquiredLocked(waited time.Duration) {
	if p.mean > 0 && waited > 0 {
		p.note(waited)
	}
	p.found = 0
}

// refusedLocked notes that an attempt found the key held, and returns how long to sleep.
// The Client has waited for the key, and held is how long the Client of the hold waited.
func (p *pace) refusedLocked(now instant, waited, held time.Duration) time.Duration {
	if p.found == 0 || held != p.held {
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
	d := minSleep
	if p.mean > 0 {
		d = max(d, time.Duration(2*float64(p.mean)/sleepsInWait/(1+float64(waited)/float64(p.mean))))
	}
	d = max(min(d, maxSleep), min(age/partOfHold, longSleep))
	// From half of that to one and a half, so that Clients do not stay in step.
	return d/2 + rand.N(d)
}

// contended has the keys that the store has refused lately.
//
// A caller that wants such a key joins the queue of an Ordered driver at once. An
// attempt before that would cost a round trip, in which callers of other Clients could
// join the queue first. With another driver, a caller that comes back right after its
// Unlock leaves the key to other Clients for a gap. Otherwise it would take the key
// before the Clients that the release has woken, or that poll.
type contended map[string]contention

type contention struct {
	until   instant // the key counts as contended until then
	gapEnds instant // when a gap after the last release ends or has ended
	pace    pace
}

const (
	contendedFor = time.Second
	maxContended = 256 // keys; for one that is forgotten, a caller makes an attempt too many or leaves no gap
)

func (k *contended) note(key string, now instant) {
	at := (*k)[key]
	at.until = now.add(contendedFor)
	k.set(key, at)
}

func (k *contended) set(key string, at contention) {
	if *k == nil || len(*k) >= maxContended {
		*k = contended{}
	}
	(*k)[key] = at
}

func (k contended) lately(key string, now instant) bool { return now < k[key].until }

// lineEndsLocked begins a gap after a release of the last caller in line, if others may want
// the key: this hold came after a refusal. A Client that polls leaves a gap without that,
// because others would rarely find a key free that it takes again at once.
func (c *Client) lineEndsLocked(ln *line) {
	if c.traits.Ordered {
		return
	}
	now, polls := c.clock.now(), c.store.polls
	if ln.sought {
		c.contended.note(ln.key, now)
	}
	k, known := c.contended[ln.key], c.contended.lately(ln.key, now)
	brief := now.sub(ln.pace.began) < briefRow
	if !known && (brief || !polls) {
		return
	}
	if !brief || !polls { // otherwise the row goes on
		k.gapEnds = c.endRowLocked(ln, now, known)
	}
	k.pace = ln.pace
	c.contended.set(ln.key, k)
}

// restOfGapLocked returns how long a new head must leave key to other Clients.
func (c *Client) restOfGapLocked(key string) time.Duration {
	return max(c.contended[key].gapEnds.sub(c.clock.now()), 0)
}
