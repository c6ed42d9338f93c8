package redlock

import (
	"context"
	crand "crypto/rand"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
	"github.com/hasplock/hasp/internal/redisstore/pubsub"
)

// The sleep between two looks. lookEvery is the longest.
const (
	minSleep   = time.Millisecond
	maxPoll    = 100 * time.Millisecond // the longest if the waiter is not subscribed
	firstSleep = 50 * time.Millisecond  // of the first waiter; it doubles with each look
)

// waiting is one Wait.
type waiting struct {
	d    *Driver
	c    backend.Claim
	life context.Context // ends with Wait, and ends subscriptions that are not confirmed yet
	wake chan struct{}   // has room for one

	waiter string             // the name in the queue
	began  time.Time          // when Wait began
	number int                // of the last attempt
	asked  time.Time          // when the last attempt began
	left   *atomic.Bool       // set when the waiter leaves the queue that it stands in
	answer int32              // of the lead to the last attempt
	barred time.Duration      // the rest of an intent that has refused this reader, or 0
	wants  bool               // readers have refused this writer, so it leaves intents
	among  bool               // readers were in the way of this writer at the last survey
	intent bool               // it has left some intents
	vain   int                // looks without success since the waiter was last woken
	final  bool               // the coming attempt is the last one before the end of ctx
	held   *backend.HeldError // the last answer of all nodes; without a holder if only the lead has answered
	silent time.Time          // since when no quorum has answered; zero if one has
	outage error              // the last error since then
	trip   time.Duration      // how long the last look took

	surveyed time.Time // when all nodes were last asked
	stray    string    // the record that the lead had then
	since    time.Time // since when this waiter has seen that record there

	lacked      string    // the holder's record that the lead lacked then
	lackedSince time.Time // since when

	mu    sync.Mutex       // guards the fields below
	queue int              // the node on whose queue the waiter stands, or noLead
	ear   *pubsub.Listener // the subscription there, which may not be confirmed yet; or nil
}

// Wait queues on one node, the lead. It makes an attempt when a release there wakes this
// waiter, and from time to time. The first waiter also tries when the holder's term ends.
// An attempt asks the lead first, and the others if the lead votes yes or does not answer
// in time. Waiters usually agree on the lead, so they do not split the vote.
func (d *Driver) Wait(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	life, cancel := context.WithCancel(context.Background())
	w := &waiting{d: d, c: c, life: life, wake: make(chan struct{}, 1), waiter: d.id + "~" + crand.Text(), began: time.Now(), queue: noLead}
	// At the end, cancel runs first: it ends a subscription under way.
	defer w.stand(life, noLead)
	defer w.endIntent()
	defer cancel()

	w.surveyed = time.Now() // Acquire has just asked all nodes

	for ctx.Err() == nil {
		g, err := w.look(ctx)
		switch {
		case err == nil:
			return g, nil
		case ctx.Err() != nil:
		case errors.As(err, &w.held):
			w.silent = time.Time{}
		case definite(err), errors.Is(err, errClosed):
			return backend.Grant{}, err
		// A shorter outage may end by itself, and the wait goes on.
		case time.Since(w.silent) >= c.Timeout:
			return backend.Grant{}, &backend.UnavailableError{Since: w.silent, Err: err}
		}
		w.sleep(ctx)
	}

	switch {
	case !w.silent.IsZero():
		return backend.Grant{}, &backend.UnavailableError{Since: w.silent, Err: w.outage}
	case w.held != nil:
		return backend.Grant{}, w.held
	}
	return backend.Grant{}, ctx.Err()
}

// look makes one attempt. If it is refused, look asks all nodes who holds the key,
// unless it has done so recently. If nobody holds it, look tries once more.
func (w *waiting) look(ctx context.Context) (backend.Grant, error) {
	began := time.Now()
	lead := w.lead(ctx)
	g, err := w.attempt(ctx, lead)

	var held *backend.HeldError
	switch {
	case !errors.As(err, &held):
	case w.knows(began):
		w.d.refused(w.c.Key)
		if w.held != nil {
			err = w.held // the answer of all nodes says more
		}
	default:
		w.surveyed = began
		s := w.d.survey(ctx, w.c, lead)
		w.among = s.amongReaders()
		strayed := w.strayed(lead, s)
		switch {
		case s.hasQuorum() && s.open() < w.d.quorum():
			w.d.refused(w.c.Key)
			err = s.heldError()
			if w.lacksHolder(lead, s) {
				w.d.shun(w.c.Key, lead)
			}
		case w.barred > 0 && s.hasQuorum():
			// Another look would be refused too.
		case s.hasQuorum() && (strayed || w.stray == "" && w.answer != behind):
			// The lead shows no record, or one that blocks no quorum.
			if lead = w.lead(ctx); s.shared(lead) {
				lead = noLead // a reader has left its record there, and the others are free
			}
			g, err = w.attempt(ctx, lead)
		case s.hasQuorum():
			w.d.refused(w.c.Key)
		default:
			err = s.outage(ctx)
		}
	}

	w.trip = time.Since(began)
	if lead != noLead {
		// A look that is not refused by the lead takes twice as long.
		w.trip = max(w.trip, 2*time.Duration(w.d.nodes[lead].latency.Load()))
	}
	if err == nil {
		// Count from before the nodes were asked, so that the term ends here no
		// later than there.
		g.Until = w.asked.Add(w.c.TTL - backend.Drift(w.c.TTL))
		return g, nil
	}

	w.leaveIntent()
	w.vain++
	switch {
	case definite(err):
	case ctx.Err() == nil:
		w.outage = err
		if w.silent.IsZero() {
			w.silent = began
		}
	case w.silent.IsZero() && w.trip >= w.c.Timeout/3:
		// ctx has ended the attempt, which by itself is no sign of an outage. But no quorum
		// has answered for so long that the last answer says nothing about the present.
		w.silent = began
		w.outage = fmt.Errorf("no quorum has answered for %v: %w", w.trip.Round(time.Millisecond), os.ErrDeadlineExceeded)
	}
	return backend.Grant{}, err
}

// knows reports whether a refusal by the lead is enough at that time, because all nodes
// were asked recently. The first waiter asks them more often, because it has to find out
// if the lead's record is a leftover. To ask them also shows an outage of the others.
func (w *waiting) knows(now time.Time) bool {
	recent := min(time.Second, w.c.Timeout/3)
	if w.answer != behind && !w.c.Shared {
		recent = lookEvery * 3 / 4
	}
	return w.silent.IsZero() && !w.final && now.Sub(w.surveyed) < recent
}

// lead returns the node that the next attempt asks first, after the waiter has moved there.
// A reader asks all nodes at once.
func (w *waiting) lead(ctx context.Context) int {
	lead := w.d.leader(w.c.Key)
	w.stand(ctx, lead)
	if w.c.Shared {
		return noLead
	}
	return lead
}

// stand moves the waiter to another node: it leaves the old queue, and subscribes on the
// new node. With noLead it only leaves. The next attempt takes the place in the queue, and
// a release after it wakes the waiter. If the node takes too long to confirm the
// subscription, stand does not wait for it. A reader has no place in the queue. It
// subscribes to the channel that all readers of a key share, because one release lets all of
// them in.
func (w *waiting) stand(ctx context.Context, lead int) {
	w.mu.Lock()
	was, ear := w.queue, w.ear
	if was != lead {
		w.queue, w.ear = lead, nil
	}
	w.mu.Unlock()
	if was == lead {
		return
	}

	if ear != nil {
		ear.Close()
	}
	if was != noLead {
		// A vote in flight may still make a place. It reads left when it ends, so set left
		// before the place is removed.
		w.left.Store(true)
		if w.answer != leadYes && !w.c.Shared {
			w.d.leave(was, w.c, w.waiter)
		}
	}
	w.left = new(atomic.Bool)
	if lead == noLead {
		return
	}

	n, channel := w.d.nodes[lead], redisstore.DerivedKey("channel", w.c.Key)
	if !w.c.Shared {
		channel += ":" + w.d.id
	}
	done := make(chan struct{})
	if !w.d.spawn(func() { w.listen(n, channel); close(done) }) {
		return // Close has begun, and the next attempt reports it
	}
	select {
	case <-done:
	// The subscription is made nevertheless, and serves later attempts.
	case <-time.After(n.patience()):
	case <-ctx.Done():
	}
}

// listen subscribes to a channel on a node. Each message, and a subscription that is confirmed
// again or later, ends the sleep. Until it is confirmed the waiter polls. The user may have no
// right to subscribe.
func (w *waiting) listen(n *node, channel string) {
	ctx, cancel := context.WithTimeout(w.life, w.c.Timeout)
	defer cancel()
	ear, _ := n.store.Subscribe(ctx, channel, redisstore.LockKey(w.c.Key), func(string, bool) {
		select {
		case w.wake <- struct{}{}:
		// A signal waits already, and one is enough.
		default:
		}
	})

	w.mu.Lock()
	defer w.mu.Unlock()
	// stand may have moved the waiter while the node confirmed.
	if w.queue != n.i || w.ear != nil {
		ear.Close()
		return
	}
	w.ear = ear
}

// strayed reports whether the lead has a leftover: a record that has been there for
// leadTimeout or longer, and that no quorum can have. Then it makes the next node lead. A
// newer record usually belongs to a rival that is about to ask the other nodes.
func (w *waiting) strayed(lead int, s survey) bool {
	record, most := s.record(lead)
	if record != w.stray {
		w.stray, w.since = record, time.Now()
	}

	if record == "" || most >= w.d.quorum() || time.Since(w.since) < leadTimeout {
		return false
	}
	w.d.shun(w.c.Key, lead)
	return true
}

// lacksHolder reports whether the lead has voted yes although another caller holds the key,
// and has lacked that record for leadTimeout or longer. One look is not enough: a rival may
// have written its record there after the lead answered.
func (w *waiting) lacksHolder(lead int, s survey) bool {
	f, ok := s.answer(lead)
	if s.holder == nil || w.answer != leadYes || !ok || f.err != nil || f.Shared() || !s.holder.Shared() && f.Record() == s.holder.Record() {
		w.lacked = ""
		return false
	}
	lacked := s.holder.Record()
	if s.holder.Shared() {
		lacked = "shared" // the holders may change, and the lead has none of them
	}
	if w.lacked != lacked {
		w.lacked, w.lackedSince = lacked, time.Now()
	}
	return time.Since(w.lackedSince) >= leadTimeout
}

// attempt makes the nodes vote, with a record that no earlier attempt has had.
func (w *waiting) attempt(ctx context.Context, lead int) (backend.Grant, error) {
	w.number++
	w.asked = time.Now()
	p := &place{waiter: w.waiter, since: w.began, left: w.left}
	g, err := w.d.tryAcquire(ctx, w.c, w.number, lead, p)
	answer := p.answer.Load()
	if w.answer = answer; answer == behindFree {
		w.answer = behind
	}
	w.barred = time.Duration(p.intent.Load()) * time.Millisecond
	w.wants = !w.c.Shared && (answer == nextReaders || w.answer != behind && w.among)
	return g, err
}

// leader returns the node that contended attempts ask first: the first one in order that
// votes, is healthy, and is not much slower than the fastest. If clients disagree, they
// may split a vote, and stand in different queues.
func (d *Driver) leader(key string) int {
	fastest := time.Duration(1<<63 - 1)
	for _, n := range d.nodes {
		if trip := time.Duration(n.latency.Load()); trip > 0 && n.healthy() {
			fastest = min(fastest, trip)
		}
	}

	// The margin keeps the lead while latencies vary, so that clients agree on it.
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
	if w.wants {
		longest = backend.AskAgain // each look repeats the intent
	}
	w.mu.Lock()
	if w.ear == nil || w.ear.Command() == "" {
		longest = maxPoll // nothing wakes the waiter
	}
	w.mu.Unlock()

	var d time.Duration
	switch {
	case w.answer == behind:
		// Nothing but a look keeps the place in the queue.
		d = longest - rand.N(longest/6)
	case w.answer == leadYes || w.c.Shared:
		// Other nodes have refused. A rival that asked another node first is about to
		// release its votes, or holds the key.
		d = min(minSleep<<min(w.vain, 10), longest)
		d -= rand.N(d * 3 / 4)
	default:
		d = min(firstSleep<<min(w.vain, 10), longest)
		d -= rand.N(d * 3 / 4)
	}

	if w.barred > 0 {
		d = min(d, w.barred+minSleep) // if the writer has died, nothing else wakes this reader
	}

	// The first waiter tries when the holder's term ends. The holder may have renewed since all
	// nodes were asked.
	if w.held != nil && w.answer != behind {
		if left := w.held.RetryAfter - time.Since(w.surveyed); left > 0 {
			d = min(d, left+minSleep+rand.N(left/16+2*minSleep)) // Redis frees a key after its last millisecond
		}
	}

	// In an outage, make the last attempt when the outage has lasted for Timeout.
	if !w.silent.IsZero() {
		d = min(d, max(w.c.Timeout-time.Since(w.silent), minSleep))
	}

	// Make a last attempt before ctx ends, in case a release was not published.
	w.final = false
	if end, ok := ctx.Deadline(); ok {
		if left := time.Until(end) - w.trip*3/2 - minSleep; left >= minSleep && left <= d {
			d, w.final = left, true
		}
	}
	return d
}
