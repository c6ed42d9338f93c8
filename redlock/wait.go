package redlock

import (
	"context"
	crand "crypto/rand"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
	"github.com/hasplock/hasp/internal/redisstore/pubsub"
)

// Sleeps of a waiter between two calls of look. lookEvery is the longest.
const (
	minSleep   = time.Millisecond
	maxPoll    = 100 * time.Millisecond // the longest if the waiter is not subscribed
	firstSleep = 50 * time.Millisecond  // the first sleep of the first waiter; it doubles with each look
)

// waiting is the state of one Wait.
type waiting struct {
	d    *driver
	c    backend.Claim
	wake chan struct{} // has room for one

	waiter string           // the name in the queue
	began  time.Time        // when Wait began
	queue  int              // the node in whose queue the waiter stands, or noLead
	ear    *pubsub.Listener // the subscription on that node, which may not be confirmed yet; or nil

	number int                // of the last attempt
	asked  time.Time          // when the last attempt began
	answer int32              // the lead's answer to the last attempt
	barred time.Duration      // what is left of the intent that made a node refuse this reader, or 0
	intent bool               // the waiter has stored intents
	vain   int                // looks without success since the waiter was last woken
	held   *backend.HeldError // the last refusal; it names the holder only if all nodes were asked
	trip   time.Duration      // how long the last look took

	surveyed  time.Time // when all nodes were last asked
	leftover  string    // what strayed saw on the lead then: its record, a text that names the record that it lacks, or empty
	seenSince time.Time // since when leftover has been the same
}

// Wait queues on one node, the lead. It makes an attempt when a release there wakes this waiter,
// and from time to time. The first waiter also tries when the holder's term ends. An attempt asks
// the lead first, and then the others if the lead votes yes or does not answer in time. Waiters
// usually agree on the lead, so they do not split the vote. If no quorum answers a look, Wait
// returns the outage.
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
			// ctx has ended the look, but a quorum has not answered for so long that the last
			// answer is too old.
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

// look makes one attempt. If the nodes refuse, look asks all of them for the holder, unless it has
// done so recently. If there is no holder, look tries once more.
func (w *waiting) look(ctx context.Context) (backend.Grant, error) {
	began := time.Now()
	lead := w.lead(ctx)
	g, err := w.attempt(ctx, lead)

	switch {
	case !isHeld(err):
	case w.knows(began):
		w.d.refused(w.c.Key)
		if w.held != nil {
			err = w.held // the answer of all nodes says more
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
			// Make an attempt: the lead shows no record, or one that blocks no quorum.
			if lead = w.lead(ctx); s.shared(lead) {
				lead = noLead // a reader's record is left on the lead, and the other nodes are free
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
	// Count from before the nodes were asked, so that the term ends here first.
	g.Until = w.asked.Add(w.c.TTL - backend.Drift(w.c.TTL))
	return g, nil
}

// knows reports whether a refusal by the lead is enough, because all nodes were asked recently. The
// first waiter asks all nodes more often, to find out whether the lead's record has a quorum.
// Asking them also shows an outage of the others.
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

// stand moves the waiter to another node: it leaves the old queue, and subscribes on the new node.
// With noLead it only leaves. The next attempt takes the place in the queue, and a release after
// that wakes the waiter. A reader has no place in the queue, and subscribes to a channel for all
// readers of the key, because one release lets all of them in.
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
	// Until the subscription is confirmed, the waiter polls, and the Listener goes on trying.
	ctx, cancel := context.WithTimeout(ctx, n.patience())
	defer cancel()
	w.ear, _ = n.store.Subscribe(ctx, channel, redisstore.LockKey(w.c.Key), func(string, bool) {
		select {
		case w.wake <- struct{}{}:
		// Drop the signal: one waits already.
		default:
		}
	})
}

// strayed lets the next node lead, and returns true, if the lead has contradicted the other nodes
// for leadTimeout: its record cannot have a quorum, or it has no record although it voted yes and
// another caller holds the key. strayed does not act at once, because a rival may be about to ask
// the other nodes, or may have written its record after the lead answered.
func (w *waiting) strayed(lead int, s survey) bool {
	seen, odd := "", false
	record, most := s.record(lead)
	own := strings.HasPrefix(record, w.c.Token+"~") // the vote of w's last attempt, which the lead is about to release
	if record != "" && !own {
		seen, odd = record, most < w.d.quorum()
	} else if lead != noLead && s.on[lead] != nil && (own || s.on[lead].Free()) && s.holder != nil && w.answer == leadYes {
		seen, odd = "lacks a shared record", true // without its members, which may change
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

// attempt makes the nodes vote, with a record that no earlier attempt has had.
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

// leader returns the node that contended attempts ask first: the first one in order that votes, is
// healthy, and is not much slower than the fastest. Clients that disagree may split a vote, and
// stand in different queues.
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

// sleep returns when the next attempt is due, or when ctx is done.
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

	d := longest - rand.N(longest/6) // shorter at random, never longer, because only looks keep the place in the queue
	if w.answer != behind {
		first := firstSleep
		if w.answer == leadYes || w.c.Shared {
			// Other nodes have refused: a rival that asked another node first is about to release
			// its votes, or holds the key.
			first = minSleep
		}
		d = min(first<<min(w.vain, 10), longest)
		d -= rand.N(d * 3 / 4)
	}

	if w.barred > 0 {
		d = min(d, w.barred+minSleep) // only this wakes the reader if the writer has died
	}

	// The first waiter tries when the holder's term ends, as far as the last survey knows.
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

// Readers do not stand in the queue. As long as new readers join, a quorum of free nodes for a
// writer may never come. So if the first waiter waits for readers, it stores an intent on every
// node, again and again. A node with an intent votes no for readers. In a trial, readers
// queued as well: they got the key later, and writers got it no sooner.

// leaveIntent stores an intent on all nodes if this writer waits for readers. It does not wait for
// the nodes.
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
// that writer repeats them. An intent that arrives later expires.
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
			// If this fails, readers may come first, until the next look repeats the intent.
			n.observe(ctx, began, err)
		})
	}
}
