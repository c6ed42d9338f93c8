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
	// When to poll again a key of another strategy, whose release sends no message: after an eighth
	// of the time since its holder was found, but within these bounds.
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
	kept         int64              // the server's time in ms until which that call keeps the places
	foreignSince time.Time          // when the present holder of another strategy was found, or zero
	pending      int                // polls in flight; several only if there are many waiters
	// when the polls in flight were sent; zero if no poll is in flight
	sent  time.Time
	again bool  // another poll became due while polls were in flight
	err   error // an error of the polls in flight, if one of them has ended with an error
	// when the first of the polls that have failed in a row was sent; zero if the last was answered
	outageSince time.Time
	outage      error // the error of the last poll, if outageSince is set
}

// stopLocked stops the timer, because the group has ended or Close has begun.
func (g *group) stopLocked() {
	// If the timer has already fired, poll still runs. This is harmless: a group that has ended has
	// no places to poll for. After Close has begun, life.begin refuses to send, or Close waits for
	// the poll.
	if g.timer != nil {
		g.timer.Stop()
	}
}

// pollByLocked schedules a poll for the given time, unless a poll is due earlier.
func (g *group) pollByLocked(at time.Time) {
	switch {
	case len(g.waiters) == 0 || g.ws.life.isOver():
		// Do not start the timer, because the group has ended or Close has begun. The caller may
		// handle the reply to a poll that was in flight at that time.
	case g.timer == nil:
		g.next = at
		g.timer = time.AfterFunc(time.Until(at), g.poll)
	case g.next.IsZero() || at.Before(g.next):
		g.next = at
		g.timer.Reset(time.Until(at))
	}
}

// nextPollLocked returns when the next poll is due, after a call that was sent at the time sent and
// returned the report r. It is early enough to keep the places, and not after the end of the
// holder's term. If no message will announce that the key is free, it is even earlier.
func (g *group) nextPollLocked(r report, sent time.Time) time.Time {
	after := g.ws.window / 3
	if r.foreign {
		if g.foreignSince.IsZero() {
			g.foreignSince = sent
		}
		age := time.Since(g.foreignSince)
		after = min(after, max(age/partOfForeign, foreignLeast), foreignMost)
	} else {
		g.foreignSince = time.Time{}
	}

	if g.sub.receives() == noCommand {
		after = min(after, unsubscribedEvery)
	}
	if r.pttl == -2 {
		// The key is free, so no release will hand it over.
		after = min(after, freeEvery)
	}

	at := sent.Add(after)
	if r.pttl < 0 {
		return at // the key is free, has no end, or the report does not contain the PTTL
	}

	// Count the holder's term from now, not from sent. The server may have read the PTTL just
	// before the reply arrived, and a poll before the end of the term would come too early.
	end := time.Now().Add(redisstore.Term(r.pttl) + time.Millisecond)
	if end.Before(at) {
		return end
	}
	return at
}

// place is a waiter that has a place in the queue, and its round when the poll was sent. If the
// waiter is in a later round when the reply arrives, the reply says nothing about it.
type place struct {
	w     *waiter
	round int
}

// poll is called by the timer. It sends polls for all waiters of the group that have a place. If
// polls are in flight, it only notes that another poll is due.
func (g *group) poll() {
	ws := g.ws
	ws.mu.Lock()
	defer ws.mu.Unlock()
	g.next = time.Time{}

	if g.pending > 0 {
		// The polls in flight are not enough. They may have run before the event for which this
		// poll was scheduled. So scheduleLocked polls again when they have ended.
		g.again = true
		return
	}

	var places []place
	var timeout time.Duration // the shortest Timeout of these waiters
	for _, w := range g.waiters {
		// Ask only about confirmed places, because a poll might overtake an enqueue in flight and
		// find no place. If no place is confirmed yet, this poll sends nothing, and the reply to an
		// enqueue schedules the next one.
		if w.queued && w.handed == nil {
			places = append(places, place{w, w.round})
			if timeout == 0 || w.c.Timeout < timeout {
				timeout = w.c.Timeout
			}
		}
	}

	command := g.sub.receives()
	for chunk := range slices.Chunk(places, pollTokens) {
		if !ws.life.begin() {
			return // Close has begun
		}
		g.pending++
		g.sent = time.Now()
		// Limit the poll to half of the Timeout. Then, if its connection is lost, a second poll is
		// sent before the loss counts as an outage, which is after the whole Timeout.
		go g.send(command, chunk, timeout/2)
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
	sent := time.Now() // read before the call, so that a hold which the call grants begins later
	reply, err := ws.store.Run(ctx, pollScript, ws.scripts.call(g.keys[:], args...))
	g.noteReply(places, reply, err, sent)
}

// noteReply handles the outcome of a poll, which is reply or err. The poll asked about the given
// places, and was sent at the time sent.
func (g *group) noteReply(places []place, reply any, err error, sent time.Time) {
	ws := g.ws
	r, ok := reportOf(reply)
	switch {
	case err != nil: // there is no reply
	case !ok || len(r.found) != len(places):
		err = ws.store.Unexpected(reply)
	default:
		// Call deliver before updateLocked. Both may note a hold that this poll has granted, but
		// only deliver knows that the hold began after the poll was sent.
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
	g.pending--
	if g.pending == 0 {
		g.scheduleLocked(r, sent)
	}
}

// noteKeepLocked records until when a call keeps the client's places, if it keeps them and is the
// last that was sent so far. The call was sent at the time sent, and returned the report r.
func (g *group) noteKeepLocked(r report, sent time.Time) {
	if r.kept > 0 && sent.After(g.extended) {
		g.extended = sent
		g.kept = r.kept
	}
}

// updateLocked handles what a poll found for one place. The poll was sent at the time sent, and
// returned the report r. The argument found says whether the place is still in the queue.
func (g *group) updateLocked(pl place, r report, found bool, sent time.Time) {
	w := pl.w
	stillWaits := w.round == pl.round && w.queued && g.waiters[w.c.Token] == w
	switch {
	case !stillWaits || w.handed != nil:
		return // a message or another reply has changed the waiter since the poll was sent
	case r.token == w.c.Token && (r.fence > 0 || !w.c.Fenced):
		// The waiter holds the key, and the message about this is late or lost. When the hold began
		// is not known, so its term counts from the unchanged w.notBefore.
		w.handed = &handedOver{fence: r.fence}
	case !found:
		// The place is gone: the window has passed, the queue was lost, the key was handed over and
		// that hold has ended, or the record has no fence although the claim wants one. So queue
		// again.
		w.newRoundLocked()
	default:
		w.notePlaceLocked(r, sent)
		return
	}

	w.wakeUpLocked()
}

// scheduleLocked schedules the next poll, when all polls in flight have ended. The one that ended
// last was sent at the time sent, and returned the report r. If any of them failed, they count as
// an outage.
func (g *group) scheduleLocked(r report, sent time.Time) {
	next := time.Now()
	if g.err != nil {
		// Poll again soon, because places end if no poll keeps them.
		g.noteFailureLocked(g.err, sent)
		next = next.Add(pause(3)) // 80 to 160 ms
	} else {
		g.outageSince = time.Time{}
		g.outage = nil
		if !g.again { // otherwise poll at once
			next = g.nextPollLocked(r, sent)
		}
	}

	g.sent = time.Time{}
	g.again = false
	g.err = nil
	g.pollByLocked(next)
}

// noteFailureLocked records that a poll, which was sent at the time sent, has failed with err. If
// the outage has lasted for the Timeout of a waiter, it ends the wait of that waiter.
func (g *group) noteFailureLocked(err error, sent time.Time) {
	if g.outageSince.IsZero() {
		g.outageSince = sent
	}
	g.outage = err

	// Leave out waiters without a confirmed place, which measure the outage by their enqueues.
	for _, w := range g.waiters {
		if w.queued && time.Since(g.outageSince) >= w.c.Timeout {
			w.failure = &backend.UnavailableError{Since: g.outageSince, Err: err}
			w.wakeUpLocked()
		}
	}
}

// outageAfterLocked returns the error of an outage, or nil if there is none. There is an outage if
// a poll that was sent after the time answered has failed, or has had no answer for a third of the
// duration timeout. The argument answered is the time at which the last answered call was sent.
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
