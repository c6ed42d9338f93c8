package fairlock

import (
	"context"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

// These constants limit how often a group polls, and how much it asks.
const (
	// how often to poll a key of another strategy, whose release sends no message: after an eighth
	// of the time since its holder was found, and within these bounds
	foreignLeast  = 2 * time.Millisecond
	foreignMost   = time.Second
	partOfForeign = 8

	unsubscribedEvery = 250 * time.Millisecond // how often to poll without a subscription
	freeEvery         = 25 * time.Millisecond  // how often to poll for a key that is free
	pollTokens        = 500                    // the largest number of tokens in one poll
)

// group holds the waiters of this driver for one key. It exists as long as it has waiters, and
// polls the key for all its waiters.
type group struct {
	ws   *waiters
	key  string
	keys [5]string // the names of the lock's keys in Redis
	sub  *subscription

	// The mu of waiters guards these.
	waiters      map[string]*waiter // by token
	timer        *time.Timer        // starts the next poll; nil before the first poll
	next         time.Time          // when the next poll is due; zero if none is scheduled
	extended     time.Time          // when the last call that kept this client's places was sent
	foreignSince time.Time          // when the present holder of another strategy was found, or zero
	kept         int64              // the server's time in ms until which that call keeps the places
	pending      int                // polls in flight; several only if there are many waiters
	// when the polls in flight were sent; zero if no poll is in flight
	sent  time.Time
	again bool  // another poll became due while polls were pending
	err   error // an error of the pending polls
	// when the first failed poll was sent; zero if the last poll was answered
	outageSince time.Time
	outage      error // the error of the last poll, if outageSince is set
}

func (g *group) stopLocked() {
	// If the timer has already fired, poll still runs. This is harmless, because poll finds no
	// places, or life.begin refuses its calls, or Close waits for them.
	if g.timer != nil {
		g.timer.Stop()
	}
	g.next = time.Time{}
}

// pollByLocked schedules a poll for the given time, unless a poll is due earlier.
func (g *group) pollByLocked(at time.Time) {
	switch {
	case len(g.waiters) == 0 || g.ws.life.isOver():
		// Do not start the timer for the reply to a poll that was in flight when the group ended.
	case g.timer == nil:
		g.next = at
		g.timer = time.AfterFunc(time.Until(at), g.poll)
	case g.next.IsZero() || at.Before(g.next):
		g.next = at
		g.timer.Reset(time.Until(at))
	}
}

// nextPollLocked returns the time of the next poll, after a call that was sent at the time sent and
// returned the report r. This time is early enough to keep the places, and not after the end of the
// holder's term. If no message will announce the release, the time is even earlier.
func (g *group) nextPollLocked(r report, sent time.Time) time.Time {
	after := g.ws.window / 3
	if !r.foreign {
		g.foreignSince = time.Time{}
	} else {
		if g.foreignSince.IsZero() {
			g.foreignSince = sent
		}
		age := time.Since(g.foreignSince)
		after = min(after, max(age/partOfForeign, foreignLeast), foreignMost)
	}

	// Poll soon if no message will come. The client has no subscription, or the key is free, so
	// that no release will hand the key over.
	if g.sub.receives() == noCommand {
		after = min(after, unsubscribedEvery)
	}
	if r.pttl == -2 {
		after = min(after, freeEvery)
	}

	at := sent.Add(after)
	if r.pttl >= 0 {
		// Count from now, because the server may have computed the PTTL just before the reply
		// arrived.
		if end := time.Now().Add(redisstore.Term(r.pttl) + time.Millisecond); end.Before(at) {
			return end
		}
	}

	return at
}

// place is a waiter that has a place in the queue, and its round when the poll was sent.
type place struct {
	w     *waiter
	round int
}

// poll is called by the timer. It polls for all waiters of the group that have a place.
func (g *group) poll() {
	ws := g.ws
	ws.mu.Lock()
	defer ws.mu.Unlock()
	g.next = time.Time{}

	if g.pending > 0 {
		// Poll again later, because the script in flight may have run before the event for which
		// this poll was scheduled.
		g.again = true
		return
	}

	var places []place
	var timeout time.Duration // the shortest Timeout of these waiters
	for _, w := range g.waiters {
		// Ask only about confirmed places, because a poll might overtake an enqueue in flight, and
		// find no place. If no place is confirmed yet, the reply to an enqueue schedules the next
		// poll.
		if w.queued && w.handed == nil {
			places = append(places, place{w, w.round})
			if timeout == 0 || w.c.Timeout < timeout {
				timeout = w.c.Timeout
			}
		}
	}

	command := g.sub.receives()
	for some := range slices.Chunk(places, pollTokens) {
		if !ws.life.begin() {
			return
		}
		g.pending++
		g.sent = time.Now()
		// Use half of the timeout. Then, if a connection is lost, a second poll is sent before the
		// loss counts as an outage, and before places end.
		go g.send(command, some, timeout/2)
	}
}

// send sends one poll, which asks about the given places.
func (g *group) send(command string, places []place, timeout time.Duration) {
	ws := g.ws
	defer ws.life.end()
	args := []string{command, g.sub.channel, redisstore.Millis(ws.window)}
	for _, pl := range places {
		args = append(args, pl.w.c.Token)
	}

	ctx, cancel := context.WithTimeout(ws.life.calls, timeout)
	defer cancel()
	sent := time.Now() // read before the call, so that notBefore is before the beginning of a hold
	reply, err := ws.store.Run(ctx, pollScript, ws.scripts.call(g.keys[:], args...))
	g.noteReply(places, reply, err, sent)
}

// noteReply handles the outcome of a poll. The argument sent is the time at which it was sent.
func (g *group) noteReply(places []place, reply any, err error, sent time.Time) {
	ws := g.ws
	r, ok := reportOf(reply)
	switch {
	case err != nil:
	case !ok || len(r.found) != len(places):
		err = ws.store.Unexpected(reply)
	default:
		// Call deliver before updateLocked, because only deliver knows that the hold began after
		// this call was sent.
		ws.deliver(r.handed, sent)
	}

	ws.mu.Lock()
	defer ws.mu.Unlock()
	if err != nil {
		g.err = err
	} else {
		// Here and in subscription.receives, the subscriber's mutex is locked while mu is held.
		// This cannot deadlock, because callbacks, which lock mu, run without that mutex.
		if r.unsubscribed {
			g.sub.listener.Relisten()
		}
		g.noteKeepLocked(r, sent)
		for i, pl := range places {
			g.updateLocked(pl, r, r.found[i] == '1', sent)
		}
	}

	// If several polls were in flight, the last one to end schedules the next poll.
	if g.pending--; g.pending == 0 {
		g.scheduleLocked(r, sent)
	}
}

// noteKeepLocked records how long a call, which was sent at the time sent, keeps the client's
// places.
func (g *group) noteKeepLocked(r report, sent time.Time) {
	if r.kept > 0 && sent.After(g.extended) {
		g.extended = sent
		g.kept = r.kept
	}
}

// updateLocked handles what a poll, which was sent at the time sent, found for one place.
func (g *group) updateLocked(pl place, r report, found bool, sent time.Time) {
	w := pl.w
	isSame := w.round == pl.round && w.queued && g.waiters[w.c.Token] == w
	switch {
	case !isSame || w.handed != nil:
		return // a message or another reply was faster
	case r.token == w.c.Token && (r.fence > 0 || !w.c.Fenced):
		// The message about this hold is late or will never arrive. The term counts from notBefore,
		// because it is not known when the hold began.
		w.handed = &handedOver{fence: r.fence}
	case !found:
		// Queue again, because the window has passed, the queue was lost, or the hold has already
		// ended.
		w.newRoundLocked()
	default:
		w.notePlaceLocked(r, sent)
		return
	}

	w.wakeUpLocked()
}

// scheduleLocked schedules the next poll. All pending polls have ended, and r is the report of the
// poll that ended last.
func (g *group) scheduleLocked(r report, sent time.Time) {
	next := time.Now()
	if g.err != nil {
		// Poll again soon, because places end if no poll keeps them.
		g.noteFailureLocked(g.err, sent)
		next = next.Add(pause(3))
	} else {
		g.outageSince = time.Time{}
		g.outage = nil
		// Poll again at once if a poll became due meanwhile.
		if !g.again {
			next = g.nextPollLocked(r, sent)
		}
	}

	g.sent = time.Time{}
	g.again = false
	g.err = nil
	g.pollByLocked(next)
}

// noteFailureLocked records that a poll, which was sent at the time sent, was not answered. If the
// outage has lasted for the Timeout of a waiter, the wait of that waiter ends.
func (g *group) noteFailureLocked(err error, sent time.Time) {
	if g.outageSince.IsZero() {
		g.outageSince = sent
	}
	g.outage = err

	// Leave out waiters without a confirmed place, which measure the outage by their own calls.
	for _, w := range g.waiters {
		if w.queued && time.Since(g.outageSince) >= w.c.Timeout {
			w.failure = &backend.UnavailableError{Since: g.outageSince, Err: err}
			w.wakeUpLocked()
		}
	}
}

// outageAfterLocked returns the outage since the last answer, or nil if there is none. The argument
// answered is the time at which the call with that answer was sent. There is an outage if a later
// poll has failed, or has had no answer for a third of the duration timeout.
func (g *group) outageAfterLocked(answered time.Time, timeout time.Duration) error {
	switch {
	case g.outageSince.After(answered):
		return &backend.UnavailableError{Since: g.outageSince, Err: g.outage}

	// A poll in flight may still be answered, so it does not count as an outage at once.
	case g.sent.After(answered) && time.Since(g.sent) >= timeout/3:
		took := time.Since(g.sent).Round(time.Millisecond)
		return &backend.UnavailableError{Since: g.sent,
			Err: fmt.Errorf("%s: no answer for %v: %w", g.ws.store.Name(), took,
				os.ErrDeadlineExceeded)}
	}

	return nil
}
