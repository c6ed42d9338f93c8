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
	unanswered bool // an enqueue was not answered, and may still arrive
	// when the first unanswered call began; zero if the last call was answered
	outageSince time.Time
	outage      error // the error of the last call, if outageSince is set

	// The mu of waiters guards these.
	group *group
	// is part of the queue entry; a grant counts only if it names the same round
	round int
	// the earliest start of a hold of this round; its term counts from here
	notBefore time.Time
	queued    bool               // the store has confirmed the place in this round
	unsure    bool               // an enqueue of this round was not answered
	handed    *handedOver        // the hold, once the key was handed over
	failure   error              // why the wait cannot go on
	held      *backend.HeldError // the store's last answer
	heldAt    time.Time          // when the call with that answer was sent
}

// handedOver is a hold that a message or a reply has announced.
type handedOver struct {
	fence     uint64
	until     time.Time // when the term ends, if an enqueue has raised the term; otherwise zero
	confirmed bool      // as many replicas as the URL asks for have confirmed the hold
}

// wait alternately calls the store and sleeps, until w has the key or cannot go on.
func (w *waiter) wait(ctx context.Context) (backend.Grant, error) {
	for try := 0; ; {
		// Check for a grant before ctx, because the key may be handed over just when ctx ends.
		if g, ok, err := w.outcome(); ok || err != nil {
			return g, err
		}
		if ctx.Err() != nil || w.ws.life.isOver() {
			return backend.Grant{}, w.endError(ctx)
		}
		if w.hasPlace() {
			// If a change came after w.outcome(), w.wake has a signal, so sleep returns at once.
			w.sleep(ctx, nil)
			continue
		}

		// Each call has the same token, so a repeat is safe even if the last call was executed and
		// only its reply was lost.
		began := time.Now()
		err := w.enqueue(ctx)
		if err == nil {
			w.outageSince = time.Time{}
			w.outage = nil
			try = 0
			continue
		}
		if ctx.Err() != nil && time.Since(began) < w.c.Timeout/3 {
			continue // ctx has caused err
		}

		// The claim's Timeout limits the whole outage, which begins with the first failed call.
		if w.outage = err; w.outageSince.IsZero() {
			w.outageSince = began
		}
		if time.Since(w.outageSince) >= w.c.Timeout {
			return backend.Grant{}, &backend.UnavailableError{Since: w.outageSince, Err: w.outage}
		}
		w.sleep(ctx, time.After(pause(try)))
		try++
	}
}

// pause returns how long to wait before an unanswered call is repeated.
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

func (w *waiter) wakeUpLocked() {
	select {
	case w.wake <- struct{}{}:
	default: // do not block, because mu is held; one signal is enough, because w reads all fields
	}
}

func (w *waiter) hasPlace() bool {
	w.ws.mu.Lock()
	defer w.ws.mu.Unlock()
	return w.queued
}

// endError returns the error of a wait that ctx or Close has ended.
func (w *waiter) endError(ctx context.Context) error {
	w.ws.mu.Lock()
	defer w.ws.mu.Unlock()
	switch {
	case w.outage != nil:
		// The outage is newer than every answer, because an answer to an enqueue clears w.outage.
		return &backend.UnavailableError{Since: w.outageSince, Err: w.outage}
	case ctx.Err() == nil:
		return errClosed
	case w.held != nil:
		// If the store has not answered since the time w.heldAt, return the outage.
		if err := w.group.outageAfterLocked(w.heldAt, w.c.Timeout); err != nil {
			return err
		}

		// From RetryAfter, subtract the time that has passed since the call was sent.
		e := *w.held
		if e.RetryAfter > 0 {
			e.RetryAfter = max(e.RetryAfter-time.Since(w.heldAt), 0)
		}
		return &e
	}

	return ctx.Err()
}

// outcome returns the grant and true, or the error that ended the wait. It returns false and nil if
// the wait goes on. If a hold may end too soon, outcome begins a new round, whose enqueue confirms
// the hold or takes a new place.
func (w *waiter) outcome() (backend.Grant, bool, error) {
	w.ws.mu.Lock()
	defer w.ws.mu.Unlock()
	if w.handed == nil {
		return backend.Grant{}, false, w.failure
	}

	if g, ok := w.grantLocked(); ok {
		return g, true, nil
	}
	w.newRoundLocked()
	return backend.Grant{}, false, nil
}

func (w *waiter) newRoundLocked() {
	// From now on, messages about earlier rounds do not count.
	w.round++
	w.notBefore = time.Time{}
	w.queued = false
	w.unsure = false
	w.handed = nil
}

// grantLocked returns the grant of the hold that was handed over, and whether Wait may return this
// grant. It may if the replicas have confirmed the hold, at least half of its term is left, and the
// term is the whole TTL or a renewal will raise it.
func (w *waiter) grantLocked() (backend.Grant, bool) {
	g := backend.Grant{Until: w.handed.until}
	if w.c.Fenced {
		g.Fence = w.handed.fence
	}
	if !g.Until.IsZero() {
		return g, true // an enqueue has raised the term, and replicas have confirmed the hold
	}
	if !w.handed.confirmed && w.ws.store.Replicas() > 0 {
		return g, false
	}

	// The record outlasts g.Until, because the record was written after w.notBefore.
	g.Until = w.notBefore.Add(w.term - backend.Drift(w.term))
	return g, (w.c.Renewed || w.term == w.c.TTL) && time.Until(g.Until) >= w.term/2
}

// enqueue sends the script that queues w. If w already has a place, w keeps it. If w holds the key,
// the script raises the term. enqueue may be repeated after an unknown outcome, because a token has
// at most one place.
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

	// A repeat does not move notBefore, because an earlier enqueue of this round, whose reply was
	// lost, may have led to a grant.
	if w.notBefore.IsZero() {
		w.notBefore = sent
	}
	entry := strings.Join([]string{
		w.c.Token, g.sub.command, g.sub.channel, strconv.Itoa(w.round),
		redisstore.Millis(w.term), flags(w.c), w.c.Owner,
	}, " ")

	gaps := g.sub.gaps // read before the call, because a message may come before the reply

	// If another call has just kept the client's places, this place may end when those places end.
	till := g.kept
	if sent.Sub(g.extended) > ws.window/3 {
		till = 0
	}
	call := ws.scripts.call(g.keys[:], entry, redisstore.Millis(w.c.TTL),
		redisstore.Millis(ws.window), strconv.FormatInt(till, 10), g.sub.receives())
	ws.mu.Unlock()
	reply, err := ws.store.Run(ctx, enqueueScript, call)

	if err = noQueue(w.c.Key, err); errors.Is(err, backend.ErrInvalid) {
		// Let the method outcome end the wait with this error, which is an answer.
		ws.mu.Lock()
		defer ws.mu.Unlock()
		w.failure = err
		return nil
	}

	if err != nil {
		// w.unanswered stays set, because this call may arrive even after a later one was answered.
		ws.mu.Lock()
		defer ws.mu.Unlock()
		w.unanswered = true
		w.unsure = true
		return err
	}

	return w.noteEnqueue(reply, sent, gaps)
}

// noteEnqueue handles the reply to an enqueue. The argument sent is the time at which the enqueue
// was sent, and the argument gaps is the value of sub.gaps at that time.
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
		// A message was faster than this reply. The replicas have confirmed the record only if the
		// token still held the key.
		w.handed.confirmed = mine
	case w.failure != nil:
	case mine && w.c.Fenced && r.fence == 0:
		return ws.store.Unexpected(reply)
	case mine:
		// The script has raised the term to the whole TTL.
		w.handed = &handedOver{r.fence, sent.Add(w.c.TTL - backend.Drift(w.c.TTL)), true}
	default:
		w.notePlaceLocked(r, sent)
		g.noteKeepLocked(r, sent)
		// Count from the last call that kept the places alive. If this report is brief, that was an
		// earlier call, and a poll that is in flight schedules the next poll.
		if r.pttl != noPTTL || g.pending == 0 {
			g.pollByLocked(g.nextPollLocked(r, g.extended))
		}
		if g.sub.gaps != gaps {
			// Poll, because a message for this place may have been missed.
			g.pollByLocked(sent)
		}
	}

	return nil
}

// notePlaceLocked records that w was still in the queue. The call that found this was sent at the
// time sent, and returned the report r.
func (w *waiter) notePlaceLocked(r report, sent time.Time) {
	w.queued = true
	// Replies may arrive out of order, so use the time of the call that was sent last.
	if sent.After(w.notBefore) {
		w.notBefore = sent
	}
	w.held = held(r.pttl, r.owner, r.shared)
	w.heldAt = sent
	w.held.Kept = redisstore.Kept(r.token)
}

// holdOf returns a hold with the given fence, or nil if no hold of w can have that fence.
func (w *waiter) holdOf(fence string) *handedOver {
	n, err := strconv.ParseUint(fence, 10, 64)
	if err != nil || w.c.Fenced && n == 0 {
		return nil
	}
	return &handedOver{fence: n}
}
