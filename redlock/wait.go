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

// These limit a waiter's sleeps between two looks. A look is an attempt that asks the lead, which
// keeps the waiter's place in the queue. If a waiter has not looked for a second, it loses its
// place (see window in turns.lua). The first waiter is one whose last look found no other before
// it.
const (
	minSleep   = time.Millisecond
	firstSleep = 50 * time.Millisecond  // the first sleep of the first waiter; it doubles each time
	maxPoll    = 100 * time.Millisecond // the longest sleep of a waiter without a subscription
	lookEvery  = 300 * time.Millisecond // the longest sleep of the first waiter
	laterEvery = 600 * time.Millisecond // the longest sleep of the other waiters
)

// waiting is the state of one call of wait.
type waiting struct {
	ct   *contest
	c    backend.Claim
	wake chan struct{} // signals a release; has room for one signal

	waiter       string           // the name in the queue
	began        time.Time        // when the wait began
	queue        int              // the node in whose queue the waiter stands, or noLead
	subscription *pubsub.Listener // on that node; it may not be confirmed yet; or nil

	number   int                // the number of the last attempt
	asked    time.Time          // when the last attempt began
	answer   int32              // the lead's answer to the last attempt
	failures int                // how many looks have failed since the waiter was last woken
	held     *backend.HeldError // the last refusal; it names the holder only if all nodes were asked
	took     time.Duration      // how long the last look took

	surveyed    time.Time // when all nodes were last asked
	record      string    // the lead's record at that time, or empty
	recordSince time.Time // the time since which record has been the same
}

// newWaiting returns the state of a wait that begins now, in no queue yet.
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

// wait queues on one node, the lead. It looks when a release there wakes this waiter, and from time
// to time. The first waiter also looks when the holder's term ends. A look asks the lead first, and
// the other nodes only if the lead votes yes or does not answer in time. Waiters usually agree on
// the lead, so they do not split the vote.
//
// wait returns the grant, or an error. If no quorum answers a look, the error is an outage. If ctx
// ends, it is the last refusal, or the error of ctx if there was none.
func (w *waiting) wait(ctx context.Context) (g backend.Grant, err error) {
	defer w.stand(context.Background(), noLead) // leaves the queue

	for ctx.Err() == nil {
		began := time.Now()
		g, err = w.look(ctx)
		took := time.Since(began)
		switch {
		case err == nil:
			return g, nil
		case errors.As(err, &w.held):
			// The key is held, or others wait for it. Sleep, and look again.
		case backend.Definite(err), errors.Is(err, errClosed):
			return g, err
		case ctx.Err() == nil:
			// No quorum has answered.
			return g, &backend.UnavailableError{Since: began, Err: err}
		case took >= w.c.Timeout/3:
			// ctx has ended the look. But no quorum has answered for a third of the Timeout, so the
			// last refusal is too old to be returned. After a shorter look, sleep returns at once,
			// and the last refusal is returned below.
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

// look makes one attempt. If the attempt is refused, look asks all nodes for the holder, unless
// they were asked recently. If there is no holder, look may make another attempt. The error is that
// of the last attempt, or the answer of all nodes if it says more.
func (w *waiting) look(ctx context.Context) (backend.Grant, error) {
	began := time.Now()
	lead := w.ct.m.leader()
	w.stand(ctx, lead)
	g, err := w.attempt(ctx, lead)
	if isHeld(err) {
		w.ct.refused(w.c.Key)
		if !w.surveyedRecently(began) {
			g, err = w.surveyAndTry(ctx, lead, began)
		} else if w.held != nil {
			err = w.held // may name the holder, which the refusal of the lead does not
		}
	}

	w.took = time.Since(began)
	if err != nil {
		w.failures++
		return g, err
	}

	// Count the term from before the attempt, so that it ends here before it ends on the nodes.
	g.Until = w.asked.Add(w.c.TTL - backend.Drift(w.c.TTL))
	return g, nil
}

// surveyAndTry asks all nodes for the holder, after an attempt that asked lead first was refused.
// If the key is free on a quorum, it makes another attempt, except when other callers come first.
func (w *waiting) surveyAndTry(
	ctx context.Context, lead int, began time.Time,
) (g backend.Grant, err error) {
	w.surveyed = began
	s := askFor(ctx, w.ct.m, w.c, lead)
	record := ""
	if lead != noLead && s.on[lead] != nil {
		record = s.on[lead].Record
	}
	if record != w.record {
		w.record = record
		w.recordSince = time.Now()
	}

	switch {
	case !s.hasQuorum():
		return g, s.outage(ctx)
	case s.free < s.quorum():
		return g, s.heldError()
	case w.answer == behind:
		// The key is free for the waiter that comes first.
	case record == "":
		return w.attempt(ctx, lead)
	case time.Since(w.recordSince) >= leadTimeout:
		// Only the record on the lead blocks the key. If the record were a rival's, the rival would
		// have asked the other nodes by now. So its program has probably died during an attempt. Do
		// not ask the lead first, because it would refuse again.
		return w.attempt(ctx, noLead)
	}

	return g, &backend.HeldError{}
}

// surveyedRecently reports whether all nodes were asked so recently that a refusal by the lead is
// enough. Asking all nodes shows whether the lead's record has a quorum, and whether the other
// nodes have an outage.
func (w *waiting) surveyedRecently(now time.Time) bool {
	// Ask often enough to notice an outage within the Timeout.
	recent := min(3*time.Second/2, w.c.Timeout/2)
	if w.answer != behind {
		// The first waiter asks at nearly every look, because it is the one to take the key if the
		// lead's record has no quorum.
		recent = lookEvery * 3 / 4
	}
	return now.Sub(w.surveyed) < recent
}

// stand moves the waiter to the queue on the node with index lead. The waiter leaves the old queue,
// and subscribes on the new node, so that releases there can wake it. The next attempt takes the
// place in the new queue. If lead is noLead, the waiter only leaves the queue. If the waiter is on
// that node already, stand does nothing.
func (w *waiting) stand(ctx context.Context, lead int) {
	if w.queue == lead {
		return
	}
	if w.subscription != nil {
		w.subscription.Close()
		w.subscription = nil
	}
	if w.queue != noLead && w.answer != leadYes { // with its yes, the lead has removed the waiter
		w.leave(w.ct.m.nodes[w.queue])
	}
	w.queue = lead
	if lead == noLead {
		return
	}

	n := w.ct.m.nodes[lead]

	// Wait only briefly for the subscription. Until it is confirmed, the waiter polls, and the
	// Listener keeps trying. So the error below need not be handled.
	ctx, cancel := context.WithTimeout(ctx, n.patience())
	defer cancel()
	signal := func() {
		select {
		case w.wake <- struct{}{}:
		default: // a signal is pending already
		}
	}

	channel := channelOf(w.c.Key) + ":" + w.ct.id
	lockKey := redisstore.LockKey(w.c.Key)
	w.subscription, _ = n.store.Subscribe(ctx, channel, lockKey, func(token string, _ bool) {
		if token == w.c.Token {
			// The release came from the clean-up of a failed attempt of this waiter. It may be
			// meant for another waiter of this driver, which shares the channel. Pause first,
			// because otherwise this waiter could ask, fail and clean up in a tight loop.
			time.AfterFunc(minSleep, signal)
			return
		}

		signal()
	})
}

// leave starts a goroutine that removes the waiter from the queue on a node. If the key is free,
// the node wakes the next waiter. leave ignores errors: if the removal fails, or a vote in flight
// queues the waiter again, the waiter's place ends a second after its last look.
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
		w.answer = behind // for a waiter it makes no difference that the key is free
	}
	return g, err
}

// sleep waits until the next look is due, or ctx is done. It is due when a release wakes the
// waiter, or when the time that pause returns has passed.
func (w *waiting) sleep(ctx context.Context) {
	select {
	case <-w.wake:
		w.failures = 0
	case <-time.After(w.pause(ctx)):
	case <-ctx.Done():
	}
}

// pause returns how long to sleep if no release wakes the waiter.
func (w *waiting) pause(ctx context.Context) time.Duration {
	longest := lookEvery
	switch {
	case w.subscription == nil || w.subscription.Command() == "":
		longest = maxPoll // no release can wake the waiter
	case w.answer == behind:
		longest = laterEvery
	}

	// Vary the sleeps, so that the waiters do not look at the same moments. Subtract a random part
	// and add none, because a place is lost if its waiter looks too late.
	d := longest - rand.N(longest/6)

	// The first waiter begins with short sleeps, because the key may become free without a message.
	if w.answer != behind {
		first := firstSleep
		if w.answer == leadYes {
			// Nodes other than the lead have refused. A rival that asked another node first is
			// about to release its votes, or it holds the key.
			first = minSleep
		}

		// Limit the shift, which could overflow. Subtract a large random part, so that rivals do
		// not collide again.
		d = min(first<<min(w.failures, 10), longest)
		d -= rand.N(d * 3 / 4)
	}

	// The first waiter looks when the holder's term ends according to the last survey.
	if w.held != nil && w.answer != behind {
		if left := w.held.RetryAfter - time.Since(w.surveyed); left > 0 {
			// Add a millisecond, because Redis frees a key only after its last one, and a random
			// part.
			d = min(d, left+minSleep+rand.N(left/16+2*minSleep))
		}
	}

	// Look a last time before ctx ends, in case a release was not published. Begin early enough for
	// the look to end in time: one and a half times as long before the deadline as the last look
	// took.
	if end, ok := ctx.Deadline(); ok {
		left := time.Until(end) - w.took*3/2 - minSleep
		if left >= minSleep && left <= d {
			d = left
			w.surveyed = time.Time{} // so that the look asks all nodes for the holder
		}
	}

	return d
}
