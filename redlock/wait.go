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

// These limit a waiter's sleeps between two calls of look. The longest sleep is lookEvery.
const (
	minSleep   = time.Millisecond
	maxPoll    = 100 * time.Millisecond // the longest sleep of a waiter without a subscription
	firstSleep = 50 * time.Millisecond  // the first sleep of the first waiter; it doubles with each look
)

// waiting is the state of one call of Wait.
type waiting struct {
	d    *driver
	c    backend.Claim
	wake chan struct{} // signals a release; has room for one signal

	waiter string           // the name in the queue
	began  time.Time        // when Wait began
	queue  int              // the node in whose queue the waiter stands, or noLead
	ear    *pubsub.Listener // the subscription on that node, which may not be confirmed yet; or nil

	number int                // the number of the last attempt
	asked  time.Time          // when the last attempt began
	answer int32              // the lead's answer to the last attempt
	barred time.Duration      // the rest of the intent that made a node refuse this reader, or 0
	intent bool               // the waiter has stored intents
	vain   int                // how many looks have failed since the waiter was last woken
	held   *backend.HeldError // the last refusal; it names the holder only if all nodes were asked
	trip   time.Duration      // how long the last look took

	surveyed  time.Time // when all nodes were last asked
	leftover  string    // what strayed found on the lead at that time: the lead's record, a text about a record that the lead lacks, or empty
	seenSince time.Time // the time since which leftover has been the same
}

// Wait queues on one node, the lead. It makes an attempt when a release there wakes this waiter,
// and from time to time. The first waiter also makes an attempt when the holder's term ends. An
// attempt asks the lead first, and the other nodes only if the lead votes yes or does not answer in
// time. Waiters usually agree on the lead, so they do not split the vote. If no quorum answers a
// look, Wait returns the outage.
func (d *driver) Wait(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	w := &waiting{d: d, c: c, wake: make(chan struct{}, 1), waiter: d.id + "~" + crand.Text(), began: time.Now(), queue: noLead}
	defer w.stand(context.Background(), noLead)
	defer w.endIntent()

	w.surveyed = time.Now() // Acquire has just asked all nodes

	for ctx.Err() == nil {
		began := time.Now()
		g, err := w.look(ctx)
		took := time.Since(began)
		switch {
		case err == nil:
			return g, nil
		case errors.As(err, &w.held):
		case backend.Definite(err), errors.Is(err, errClosed):
			return backend.Grant{}, err
		case ctx.Err() == nil:
			return backend.Grant{}, &backend.UnavailableError{Since: began, Err: err}
		case took >= c.Timeout/3:
			// ctx has ended the look, but no quorum has answered for a third of the Timeout, so the
			// last answer is too old.
			err = fmt.Errorf("no quorum has answered for %v: %w", took.Round(time.Millisecond), os.ErrDeadlineExceeded)
			return backend.Grant{}, &backend.UnavailableError{Since: began, Err: err}
		}
		w.sleep(ctx)
	}

	if w.held != nil {
		return backend.Grant{}, w.held
	}
	return backend.Grant{}, ctx.Err()
}

// look makes one attempt. If the nodes refuse this attempt, all nodes are asked for the holder,
// unless they were asked recently. If there is no holder, look makes another attempt.
func (w *waiting) look(ctx context.Context) (backend.Grant, error) {
	began := time.Now()
	lead := w.lead(ctx)
	g, err := w.attempt(ctx, lead)

	switch {
	case !isHeld(err):
	case w.knows(began):
		w.d.refused(w.c.Key)
		if w.held != nil {
			err = w.held // the answers of all nodes say more
		}
	default:
		w.d.refused(w.c.Key)
		w.surveyed = began
		s := w.d.survey(ctx, w.c, lead)
		strayed := w.strayed(lead, s)
		switch {
		case !s.hasQuorum():
			err = s.outage(ctx)
		case s.open() < w.d.quorum():
			err = s.heldError()
		case w.barred > 0:
			// Make no attempt, because it would be refused too.
		case strayed || w.leftover == "" && w.answer != behind:
			// Make an attempt, because the lead shows no record, or a record that blocks no quorum.
			if lead = w.lead(ctx); s.shared(lead) {
				lead = noLead // a shared record is left on the lead, but a quorum is free
			}
			g, err = w.attempt(ctx, lead)
		}
	}

	w.trip = time.Since(began)
	if err != nil {
		w.leaveIntent()
		w.vain++
		return g, err
	}
	// Count the term from w.asked, so that it ends here before it ends on the nodes.
	g.Until = w.asked.Add(w.c.TTL - backend.Drift(w.c.TTL))
	return g, nil
}

// knows reports whether a refusal by the lead is enough, because all nodes were asked recently. The
// first waiter asks all nodes more often, to find out whether the lead's record has a quorum.
// Asking all nodes also shows an outage of the other nodes.
func (w *waiting) knows(now time.Time) bool {
	recent := min(time.Second, w.c.Timeout/3)
	if w.answer != behind && !w.c.Shared {
		recent = lookEvery * 3 / 4
	}
	return now.Sub(w.surveyed) < recent
}

// lead moves the waiter to the present lead, and returns the node that the next attempt asks first.
// A reader asks all nodes at once.
func (w *waiting) lead(ctx context.Context) int {
	lead := w.d.leader(w.c.Key)
	w.stand(ctx, lead)
	if w.c.Shared {
		return noLead
	}
	return lead
}

// stand moves the waiter to the node with index lead. The waiter leaves the old queue, and
// subscribes on the new node. If lead is noLead, it only leaves the queue. The next attempt takes a
// place in the new queue, so that releases can wake the waiter. A reader has no place in the queue,
// and subscribes to a channel for all readers of the key, because a release admits them all.
func (w *waiting) stand(ctx context.Context, lead int) {
	if w.queue == lead {
		return
	}
	if w.ear != nil {
		w.ear.Close()
		w.ear = nil
	}
	if w.queue != noLead && w.answer != leadYes && !w.c.Shared {
		w.d.leave(w.queue, w.c, w.waiter)
	}
	w.queue = lead
	if lead == noLead {
		return
	}

	n, channel := w.d.nodes[lead], redisstore.DerivedKey("channel", w.c.Key)
	if !w.c.Shared {
		channel += ":" + w.d.id
	}
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
	w.ear, _ = n.store.Subscribe(ctx, channel, redisstore.LockKey(w.c.Key), func(token string, _ bool) {
		if token == w.c.Token {
			// A clean-up of this waiter has woken another one of the driver. Without a pause, this
			// waiter would ask and clean up without end.
			time.AfterFunc(minSleep, signal)
			return
		}
		signal()
	})
}

// strayed reports whether the lead has contradicted the other nodes for the time leadTimeout. That
// is, its record cannot have a quorum, or it has no record, although it voted yes and another
// caller holds the key. If so, strayed shuns the lead. It does not act at once, because a rival may
// be about to ask the other nodes, or may have written its record after the lead answered.
func (w *waiting) strayed(lead int, s survey) bool {
	seen, odd := "", false
	record, most := s.record(lead)
	if record != "" {
		seen, odd = record, most < w.d.quorum()
	} else if lead != noLead && s.on[lead] != nil && s.on[lead].Free() && s.holder != nil && w.answer == leadYes {
		seen, odd = "lacks a shared record", true // the text does not name the members, which may change
		if !s.holder.Shared() {
			seen = "lacks " + s.holder.Record
		}
	}
	if seen != w.leftover {
		w.leftover, w.seenSince = seen, time.Now()
	}

	if !odd || time.Since(w.seenSince) < leadTimeout {
		return false
	}
	w.d.shun(w.c.Key, lead)
	return true
}

// attempt asks the nodes to vote, with a record that no earlier attempt has had.
func (w *waiting) attempt(ctx context.Context, lead int) (backend.Grant, error) {
	w.number++
	w.asked = time.Now()
	p := &queueState{waiter: w.waiter, since: w.began}
	g, err := w.d.tryAcquire(ctx, w.c, w.number, lead, p)
	w.answer = p.answer.Load()
	if w.answer == behindFree {
		w.answer = behind
	}
	w.barred = time.Duration(p.intent.Load()) * time.Millisecond
	return g, err
}

// leader returns the node that contended attempts ask first. It is the first node in order that
// votes, is healthy and not shunned, and is not much slower than the fastest node. Clients with
// different leads may split the votes, and their waiters stand in different queues.
func (d *driver) leader(key string) int {
	fastest := time.Duration(1<<63 - 1)
	for _, n := range d.nodes {
		if trip := time.Duration(n.latency.Load()); trip > 0 && n.healthy() {
			fastest = min(fastest, trip)
		}
	}

	// The margin keeps the lead the same while latencies vary, so that clients agree on it.
	for i, n := range d.nodes {
		if trip := time.Duration(n.latency.Load()); trip > 0 && trip <= 4*fastest+2*time.Millisecond && n.healthy() && n.marks.voting() && d.leads(key, i) {
			return i
		}
	}
	return noLead
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
	case w.answer == nextReaders:
		longest = backend.SharedRetryEvery // each look repeats the intent
	}

	d := longest - rand.N(longest/6) // subtract a random part, but never add one, because only looks keep the place in the queue
	if w.answer != behind {
		first := firstSleep
		if w.answer == leadYes || w.c.Shared {
			// Nodes other than the lead have refused. A rival that asked another node first is
			// about to release its votes, or it holds the key.
			first = minSleep
		}
		d = min(first<<min(w.vain, 10), longest)
		d -= rand.N(d * 3 / 4)
	}

	if w.barred > 0 {
		d = min(d, w.barred+minSleep) // only this limit wakes the reader if the writer has died
	}

	// The first waiter makes an attempt when the holder's term ends according to the last survey.
	if w.held != nil && w.answer != behind {
		if left := w.held.RetryAfter - time.Since(w.surveyed); left > 0 {
			d = min(d, left+minSleep+rand.N(left/16+2*minSleep)) // Redis frees a key after its last millisecond
		}
	}

	// Make a last attempt before ctx ends, in case a release was not published. That look asks all
	// nodes, so that the error of Wait names the holder.
	if end, ok := ctx.Deadline(); ok {
		if left := time.Until(end) - w.trip*3/2 - minSleep; left >= minSleep && left <= d {
			d, w.surveyed = left, time.Time{}
		}
	}
	return d
}

// Readers do not stand in the queue. As long as new readers join, a quorum may never be free for a
// writer. So if the first waiter waits for readers, each of its looks stores an intent on every
// node. A node with an intent refuses readers. In a trial in which readers queued as well, they
// acquired the key later, and writers acquired it no sooner.

// leaveIntent stores an intent on all nodes if this writer waits for readers. It does not wait for
// the nodes' answers.
func (w *waiting) leaveIntent() {
	if w.answer != nextReaders {
		return
	}
	w.intent = true
	// Let the intent last until the next look repeats it, even if nodes are far away.
	ttl := redisstore.IntentTTL + min(2*w.trip, w.c.Timeout)
	w.onNodes("set", redisstore.IntentKey(w.c.Key), w.c.Token, "px", redisstore.Millis(ttl))
}

// endIntent removes the intents when Wait ends. It may also remove intents of another writer, but
// that writer repeats them. An intent that reaches a node later expires by itself.
func (w *waiting) endIntent() {
	if w.intent {
		w.onNodes("del", redisstore.IntentKey(w.c.Key))
	}
}

// onNodes sends a command to all nodes. It does not wait for the answers.
func (w *waiting) onNodes(command ...string) {
	for _, n := range w.d.nodes {
		w.d.spawn(func() {
			if n.admit() != nil {
				return
			}
			ctx, cancel := context.WithTimeout(context.Background(), w.c.Timeout)
			defer cancel()
			began := time.Now()
			_, err := n.store.Do(ctx, command...)
			// If this fails, new readers may get in until the next look repeats the intent.
			n.observe(ctx, began, err)
		})
	}
}
