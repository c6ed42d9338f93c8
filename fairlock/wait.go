package fairlock

import (
	"context"
	"errors"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

// waiter is one claim that waits for its key.
type waiter struct {
	ws *waiters
	c  backend.Claim
	// the term of a hold that is handed over: the TTL, or the window if that is shorter
	term time.Duration
	// signals a change of a field that the mu of waiters guards; has room for one signal
	wake chan struct{}

	// Only the goroutine of Wait uses these.
	unanswered bool // some enqueue was not answered, and may still arrive
	// when the first of the enqueues that have failed in a row began; zero if the last was answered
	outageSince time.Time
	outage      error // the error of the last enqueue, if outageSince is set

	// The mu of waiters guards these.
	group *group
	// Counts the places that w has asked for. It is part of the queue entry and of messages, so
	// that a message about an earlier place does not count as a grant.
	round int
	// The earliest time at which a hold of this round can begin. Its term counts from here.
	notBefore time.Time
	queued    bool               // the store has confirmed the place in this round
	unsure    bool               // an enqueue of this round was not answered
	handed    *handedOver        // the hold, once the key was handed over
	failure   error              // why the wait cannot go on
	held      *backend.HeldError // the store's last answer that w must wait
	heldAt    time.Time          // when the call with that answer was sent
}

// handedOver is a hold that a message or a reply has announced.
type handedOver struct {
	fence     uint64
	until     time.Time // when the term ends, if an enqueue has raised the term; otherwise zero
	confirmed bool      // as many replicas as the URL asks for have confirmed the hold
}

// wait takes a place in the queue, and sleeps until the key is handed over or w cannot go on. It
// enqueues again after an outage, or if the place is lost.
func (w *waiter) wait(ctx context.Context) (backend.Grant, error) {
	for try := 0; ; {
		// Check for a grant before ctx, because the key may be handed over just when ctx ends.
		if g, granted, err := w.outcome(); granted || err != nil {
			return g, err
		}
		if ctx.Err() != nil || w.ws.life.isOver() {
			return backend.Grant{}, w.endError(ctx)
		}
		if w.hasPlace() {
			// If something has changed since the call of outcome, w.wake has a signal, so that
			// sleep returns at once.
			w.sleep(ctx, nil)
			continue
		}

		// Each enqueue has the same token. So it is safe to repeat one that was executed, and of
		// which only the reply was lost.
		began := time.Now()
		err := w.enqueue(ctx)
		if err == nil {
			w.outageSince = time.Time{}
			w.outage = nil
			try = 0
			continue
		}
		if ctx.Err() != nil && time.Since(began) < w.c.Timeout/3 {
			// The end of ctx has cut the call short, so err is no outage. The loop ends above.
			continue
		}

		// The claim's Timeout limits the whole outage, which begins with the first failed call.
		w.outage = err
		if w.outageSince.IsZero() {
			w.outageSince = began
		}
		if time.Since(w.outageSince) >= w.c.Timeout {
			return backend.Grant{}, &backend.UnavailableError{Since: w.outageSince, Err: w.outage}
		}
		w.sleep(ctx, time.After(pause(try)))
		try++
	}
}

// pause returns how long to wait before an unanswered call is repeated. It grows with try, the
// number of repeats so far, up to the fourth, and has a random part.
func pause(try int) time.Duration {
	d := 20 * time.Millisecond << min(try, 4)
	return d/2 + rand.N(d/2)
}

// sleep waits until w is woken, the channel timeout fires, ctx ends, or Close begins.
func (w *waiter) sleep(ctx context.Context, timeout <-chan time.Time) {
	select {
	case <-w.wake:
	case <-timeout:
	case <-ctx.Done():
	case <-w.ws.life.open.Done():
	}
}

// wakeUpLocked makes w check its fields again.
func (w *waiter) wakeUpLocked() {
	select {
	case w.wake <- struct{}{}:
	default: // a signal is pending, and one is enough, because w then checks all fields
	}
}

// hasPlace reports whether the store has confirmed a place for the present round.
func (w *waiter) hasPlace() bool {
	w.ws.mu.Lock()
	defer w.ws.mu.Unlock()
	return w.queued
}

// endError returns the error of a wait that ctx or Close has ended. It is a refusal only if the
// store has refused the key, and there is no outage since.
func (w *waiter) endError(ctx context.Context) error {
	w.ws.mu.Lock()
	defer w.ws.mu.Unlock()
	switch {
	case w.outage != nil:
		// The outage is newer than w.held, because an answer to an enqueue clears w.outage.
		return &backend.UnavailableError{Since: w.outageSince, Err: w.outage}
	case ctx.Err() == nil:
		return errClosed
	case w.held != nil:
		// The refusal counts only if the polls after it had no outage.
		if err := w.group.outageAfterLocked(w.heldAt, w.c.Timeout); err != nil {
			return err
		}

		// RetryAfter counts from when the refused call was sent. Make it count from now.
		e := *w.held
		if e.RetryAfter > 0 {
			e.RetryAfter = max(e.RetryAfter-time.Since(w.heldAt), 0)
		}
		return &e
	}

	return ctx.Err()
}

// outcome returns the grant and true if w has the key, or the error that has ended the wait. It
// returns false and nil if the wait goes on. If w has the key, but Wait must not return the grant
// yet (see grantLocked), outcome begins a new round. The enqueue of that round confirms the hold,
// or takes a new place if the hold has ended.
func (w *waiter) outcome() (g backend.Grant, granted bool, err error) {
	w.ws.mu.Lock()
	defer w.ws.mu.Unlock()
	if w.handed == nil {
		return g, false, w.failure
	}

	g, granted = w.grantLocked()
	if !granted {
		w.newRoundLocked()
	}
	return g, granted, nil
}

// newRoundLocked makes w enqueue again. From now on, messages about earlier rounds do not count.
func (w *waiter) newRoundLocked() {
	w.round++
	w.notBefore = time.Time{}
	w.queued = false
	w.unsure = false
	w.handed = nil
}

// grantLocked returns the grant of the hold that was handed over, and whether Wait may return this
// grant. It may if replicas need not confirm the hold or have done so, at least half of the term is
// left, and the term is the whole TTL or a renewal will raise it. It always may if an enqueue has
// raised the term.
func (w *waiter) grantLocked() (g backend.Grant, ready bool) {
	g.Until = w.handed.until
	if w.c.Fenced {
		g.Fence = w.handed.fence
	}
	if !g.Until.IsZero() {
		return g, true // an enqueue has raised the term, which replicas have also confirmed
	}
	if !w.handed.confirmed && w.ws.store.Replicas() > 0 {
		return g, false
	}

	// The record outlasts g.Until, because it was written after w.notBefore.
	g.Until = w.notBefore.Add(w.term - backend.Drift(w.term))
	isLong := w.term == w.c.TTL || w.c.Renewed
	return g, isLong && time.Until(g.Until) >= w.term/2
}

// enqueue sends the script that queues w. If w already has a place, it keeps that place. If w holds
// the key, the script raises the term to the whole TTL. enqueue may be repeated after an unknown
// outcome, because a token has at most one place. It returns an error only if the store has not
// answered: if the answer ends the wait, enqueue sets w.failure and returns nil.
func (w *waiter) enqueue(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, w.c.Timeout)
	defer cancel()

	if w.group == nil {
		// Subscribe first, so that the waiter receives every message.
		w.ws.join(ctx, w)
	}

	ws := w.ws
	g := w.group
	ws.mu.Lock()
	sent := time.Now()

	// A repeat must not move notBefore, because an earlier enqueue of this round, whose reply was
	// lost, may have led to a hold that began before the repeat.
	if w.notBefore.IsZero() {
		w.notBefore = sent
	}
	entry := strings.Join([]string{
		w.c.Token, g.sub.command, g.sub.channel, strconv.Itoa(w.round),
		redisstore.Millis(w.term), flags(w.c), w.c.Owner,
	}, " ")

	gaps := g.sub.gaps // read before the call, because a message may come before the reply

	// If another call has just kept the client's places, let this place end with those. The next
	// poll is early enough for all of them, and the server may answer by a brief report. Otherwise
	// till is 0, which asks for a full report.
	till := g.kept
	if sent.Sub(g.extended) > ws.window/3 {
		till = 0
	}
	call := ws.scripts.call(g.keys[:], entry, redisstore.Millis(w.c.TTL),
		redisstore.Millis(ws.window), strconv.FormatInt(till, 10), g.sub.receives())
	ws.mu.Unlock()
	reply, err := ws.store.Run(ctx, enqueueScript, call)

	if err == nil {
		return w.noteEnqueue(reply, sent, gaps)
	}
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if err = noQueue(w.c.Key, err); errors.Is(err, backend.ErrInvalid) {
		w.failure = err // the store has answered that the key has no queue
		return nil
	}

	// w.unanswered is never cleared, because this enqueue may arrive even after a later one was
	// answered.
	w.unanswered = true
	w.unsure = true
	return err
}

// noteEnqueue handles the reply to an enqueue. The argument sent is the time at which the enqueue
// was sent, and the argument gaps is the value of sub.gaps at that time. The error says that the
// reply is not valid.
func (w *waiter) noteEnqueue(reply any, sent time.Time, gaps int) error {
	ws := w.ws
	g := w.group
	r, ok := reportOf(reply)
	if !ok {
		return ws.store.Unexpected(reply)
	}
	ws.deliver(r.handed, sent)   // locks mu, and may set w.handed or w.failure
	mine := r.token == w.c.Token // the claim has the key now

	ws.mu.Lock()
	defer ws.mu.Unlock()
	if r.unsubscribed {
		g.sub.listener.Relisten()
	}

	switch {
	case w.handed != nil:
		// The key was handed over, by this enqueue or before its reply arrived. The replicas have
		// confirmed the hold with this reply, unless the token did not hold the key any more.
		w.handed.confirmed = mine
	case w.failure != nil: // the method outcome ends the wait
	case mine && w.c.Fenced && r.fence == 0:
		return ws.store.Unexpected(reply)
	case mine:
		// The token held the key already, and the script has raised the term to the whole TTL.
		until := sent.Add(w.c.TTL - backend.Drift(w.c.TTL))
		w.handed = &handedOver{fence: r.fence, until: until, confirmed: true}
	default:
		w.notePlaceLocked(r, sent)
		g.noteKeepLocked(r, sent)
		// Schedule the next poll. It is due some time after the last call that kept the places,
		// which is an earlier call if this report is brief. In that case, a poll in flight
		// schedules it instead.
		if r.pttl != noPTTL || g.pending == 0 {
			g.pollByLocked(g.nextPollLocked(r, g.extended))
		}
		if g.sub.gaps != gaps {
			// Poll at once, because a message for this place may have been missed.
			g.pollByLocked(sent)
		}
	}

	return nil
}

// notePlaceLocked records that w was still in the queue. The call that found this was sent at the
// time sent, and returned the report r.
func (w *waiter) notePlaceLocked(r report, sent time.Time) {
	w.queued = true
	// A place in the queue means that no hold had begun when the call was sent. Replies may arrive
	// out of order, so keep the latest such time.
	if sent.After(w.notBefore) {
		w.notBefore = sent
	}
	w.held = held(r.pttl, r.owner, r.shared)
	w.heldAt = sent
	w.held.Kept = redisstore.Kept(r.token)
}

// holdOf returns a hold with the given fence, or nil if no hold of w can have that fence, because
// it is no number, or is 0 although the claim wants a fence.
func (w *waiter) holdOf(fence string) *handedOver {
	n, err := strconv.ParseUint(fence, 10, 64)
	if err != nil || w.c.Fenced && n == 0 {
		return nil
	}
	return &handedOver{fence: n}
}
