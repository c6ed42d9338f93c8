package redlock

import (
	"context"
	crand "crypto/rand"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
	"github.com/hasplock/hasp/internal/redisstore/pubsub"
)

// These limit a waiter's sleeps between two looks. A look is an attempt that asks the lead, and
// keeps the waiter's place. If a waiter has not looked for a second, it loses its place (see window
// in turns.lua).
const (
	minSleep   = time.Millisecond
	firstSleep = 50 * time.Millisecond  // the first sleep of the first waiter; it doubles each time
	maxPoll    = 100 * time.Millisecond // the longest sleep of a waiter without a subscription
	lookEvery  = 300 * time.Millisecond // the longest sleep of the first waiter
	laterEvery = 600 * time.Millisecond // the longest sleep of the others
)

// waiting is the state of one call of wait.
type waiting struct {
	ct   *contest
	c    backend.Claim
	wake chan struct{} // signals a release; has room for one signal

	waiter string           // the name in the queue
	began  time.Time        // when the wait began
	queue  int              // the node in whose queue the waiter stands, or noLead
	ear    *pubsub.Listener // the subscription on that node, which may not be confirmed yet; or nil

	number int                // the number of the last attempt
	asked  time.Time          // when the last attempt began
	answer int32              // the lead's answer to the last attempt
	vain   int                // how many looks have failed since the waiter was last woken
	held   *backend.HeldError // the last refusal; it names the holder only if all nodes were asked
	trip   time.Duration      // how long the last look took

	surveyed  time.Time // when all nodes were last asked
	blocked   string    // the lead's record at that time, or empty
	seenSince time.Time // the time since which blocked has been the same
}

func newWaiting(ct *contest, c backend.Claim) *waiting {
	return &waiting{
		ct:       ct,
		c:        c,
		wake:     make(chan struct{}, 1),
		waiter:   ct.id + "~" + crand.Text(),
		began:    time.Now(),
		queue:    noLead,
		surveyed: time.Now(), // acquire has just asked all nodes
	}
}

// wait queues on one node, the lead. It makes an attempt when a release there wakes this waiter,
// and from time to time. The first waiter also makes an attempt when the holder's term ends. An
// attempt asks the lead first, and the other nodes only if the lead votes yes or does not answer in
// time. Waiters usually agree on the lead, so they do not split the vote. If no quorum answers a
// look, wait returns the outage.
func (w *waiting) wait(ctx context.Context) (g backend.Grant, err error) {
	defer w.stand(context.Background(), noLead)

	for ctx.Err() == nil {
		began := time.Now()
		g, err = w.look(ctx)
		took := time.Since(began)
		switch {
		case err == nil:
			return g, nil
		case errors.As(err, &w.held):
		case backend.Definite(err), errors.Is(err, errClosed):
			return g, err
		case ctx.Err() == nil:
			return g, &backend.UnavailableError{Since: began, Err: err}
		case took >= w.c.Timeout/3:
			// ctx has ended the look, but no quorum has answered for a third of the Timeout, so the
			// last answer is too old.
			err = fmt.Errorf("no quorum has answered: %w", os.ErrDeadlineExceeded)
			return g, &backend.UnavailableError{Since: began, Err: err}
		}

		w.sleep(ctx)
	}

	if w.held != nil {
		return g, w.held
	}
	return g, ctx.Err()
}

// look makes one attempt. If the nodes refuse this attempt, all nodes are asked for the holder,
// unless they were asked recently. If there is no holder, look makes another attempt.
func (w *waiting) look(ctx context.Context) (backend.Grant, error) {
	began := time.Now()
	lead := w.ct.m.leader()
	w.stand(ctx, lead)
	g, err := w.attempt(ctx, lead)
	if isHeld(err) {
		w.ct.refused(w.c.Key)
		if !w.knows(began) {
			g, err = w.surveyAndTry(ctx, lead, began)
		} else if w.held != nil {
			err = w.held // the answers of all nodes say more
		}
	}

	w.trip = time.Since(began)
	if err != nil {
		w.vain++
		return g, err
	}

	// Count the term from w.asked, so that it ends here before it ends on the nodes.
	g.Until = w.asked.Add(w.c.TTL - backend.Drift(w.c.TTL))
	return g, nil
}

// surveyAndTry asks all nodes for the holder, after the lead has refused an attempt. It makes
// another attempt if the key is free on a quorum.
func (w *waiting) surveyAndTry(
	ctx context.Context, lead int, began time.Time,
) (g backend.Grant, err error) {
	w.surveyed = began
	s := askFor(ctx, w.ct.m, w.c, lead)
	record := ""
	if lead != noLead && s.on[lead] != nil {
		record = s.on[lead].Record
	}
	if record != w.blocked {
		w.blocked = record
		w.seenSince = time.Now()
	}

	switch {
	case !s.hasQuorum():
		return g, s.outage(ctx)
	case s.free < s.quorum():
		return g, s.heldError()
	case w.answer == behind:
	case record == "":
		return w.attempt(ctx, lead)
	case time.Since(w.seenSince) >= leadTimeout:
		// An attempt whose program has died has left the record on the lead. Do not act at once,
		// because a rival may have written it, and may be about to ask the other nodes.
		return w.attempt(ctx, noLead)
	}

	return g, &backend.HeldError{}
}

// knows reports whether a refusal by the lead is enough, because all nodes were asked recently. The
// first waiter asks all nodes more often, to find out whether the lead's record has a quorum.
// Asking all nodes also shows an outage of the other nodes.
func (w *waiting) knows(now time.Time) bool {
	recent := min(3*time.Second/2, w.c.Timeout/2)
	if w.answer != behind {
		recent = lookEvery * 3 / 4
	}
	return now.Sub(w.surveyed) < recent
}

// stand moves the waiter to the node with index lead. The waiter leaves the old queue, and
// subscribes on the new node. If lead is noLead, it only leaves the queue. The next attempt takes a
// place in the new queue, so that releases can wake the waiter.
func (w *waiting) stand(ctx context.Context, lead int) {
	if w.queue == lead {
		return
	}
	if w.ear != nil {
		w.ear.Close()
		w.ear = nil
	}
	if w.queue != noLead && w.answer != leadYes {
		w.leave(w.ct.m.nodes[w.queue])
	}
	w.queue = lead
	if lead == noLead {
		return
	}

	n := w.ct.m.nodes[lead]

	// Until the subscription is confirmed, the waiter polls, and the Listener keeps trying.
	ctx, cancel := context.WithTimeout(ctx, n.patience())
	defer cancel()
	signal := func() {
		select {
		case w.wake <- struct{}{}:
		// Drop the signal, because one is already waiting.
		default:
		}
	}

	channel := channelOf(w.c.Key) + ":" + w.ct.id
	lockKey := redisstore.LockKey(w.c.Key)
	w.ear, _ = n.store.Subscribe(ctx, channel, lockKey, func(token string, _ bool) {
		if token == w.c.Token {
			// A clean-up of this waiter has woken another one of the driver. Without a pause, this
			// waiter would ask and clean up without end.
			time.AfterFunc(minSleep, signal)
			return
		}

		signal()
	})
}

// leave starts a goroutine that removes the waiter from the queue on a node. If the key is free,
// the node wakes the next waiter. If the removal fails, or a vote in flight queues the waiter
// again, the waiter's place ends a second after its last look.
func (w *waiting) leave(n *node) {
	w.ct.m.spawn(func() {
		_, _ = n.run(w.c.Timeout, leaveScript, redisstore.Call{
			Keys: keysOf(w.c.Key),
			Args: []string{w.waiter, channelOf(w.c.Key)},
		})
	})
}

// attempt asks the nodes to vote, with a record that no earlier attempt has had.
func (w *waiting) attempt(ctx context.Context, lead int) (g backend.Grant, err error) {
	w.number++
	w.asked = time.Now()
	g, w.answer, err = w.ct.attempt(ctx, w.c, w.number, lead, w)
	if w.answer == behindFree {
		w.answer = behind
	}
	return g, err
}

// sleep waits until the next attempt is due, or ctx is done.
func (w *waiting) sleep(ctx context.Context) {
	select {
	case <-w.wake:
		w.vain = 0
	case <-time.After(w.pause(ctx)):
	case <-ctx.Done():
	}
}

// pause returns how long to sleep if no message arrives.
func (w *waiting) pause(ctx context.Context) time.Duration {
	longest := lookEvery
	switch {
	case w.ear == nil || w.ear.Command() == "":
		longest = maxPoll // nothing wakes the waiter
	case w.answer == behind:
		longest = laterEvery
	}

	// Subtract a random part, but never add one, because only looks keep the place in the queue.
	d := longest - rand.N(longest/6)
	if w.answer != behind {
		first := firstSleep
		if w.answer == leadYes {
			// Nodes other than the lead have refused. A rival that asked another node first is
			// about to release its votes, or it holds the key.
			first = minSleep
		}

		d = min(first<<min(w.vain, 10), longest)
		d -= rand.N(d * 3 / 4)
	}

	// The first waiter makes an attempt when the holder's term ends according to the last survey.
	if w.held != nil && w.answer != behind {
		if left := w.held.RetryAfter - time.Since(w.surveyed); left > 0 {
			// Redis frees a key after its last millisecond.
			d = min(d, left+minSleep+rand.N(left/16+2*minSleep))
		}
	}

	// Make a last attempt before ctx ends, in case a release was not published. That look asks all
	// nodes, so that the error of wait names the holder.
	if end, ok := ctx.Deadline(); ok {
		if left := time.Until(end) - w.trip*3/2 - minSleep; left >= minSleep && left <= d {
			d = left
			w.surveyed = time.Time{}
		}
	}

	return d
}
