package redlock

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
	"github.com/hasplock/hasp/internal/redisstore/pubsub"
)

// Bounds of the sleep between two attempts at a key.
const (
	minSleep = time.Millisecond
	maxSleep = time.Second            // without a message
	maxPoll  = 100 * time.Millisecond // if the waiter is subscribed to less than a quorum
	refusal  = 50 * time.Millisecond  // the first sleep after a refused attempt; it doubles
	straggle = 3 * time.Millisecond   // for the lead's message, once a quorum's messages are here

	surveyEvery = 250 * time.Millisecond // while messages arrive
)

// waiting is one Wait.
type waiting struct {
	d    *Driver
	c    backend.Claim
	life context.Context // bounds the subscriptions
	wake chan struct{}   // has room for one

	number int                // of the last attempt
	asked  time.Time          // when the last attempt began
	vain   int                // refused attempts since the last message
	late   int                // refused attempts that followed a message
	held   *backend.HeldError // the last answer of a quorum
	silent time.Time          // since when no quorum has answered; zero if one has
	outage error              // the last error since then
	trip   time.Duration      // how long the last attempt took

	surveyed time.Time // when all nodes were last asked
	stray    string    // the record that the lead had then
	since    time.Time // when the lead first had that record

	mu     sync.Mutex         // guards the fields below
	ears   []*pubsub.Listener // subscriptions
	closed bool               // Wait has returned
	token  string             // of the release that the last message reports
	heard  []bool             // the nodes that have published that release
	woken  bool               // that release has woken the waiter
	crowd  int                // clients that wait for the key, by that message
}

// Wait makes an attempt whenever a quorum of the nodes has published a release,
// when the holder's term ends, and from time to time. It asks one node first, the
// lead, and the others only if the lead votes yes. Waiters usually agree on the
// lead, so they do not split the vote. Waiters that were woken together also sleep
// for a random time.
func (d *Driver) Wait(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	life, cancel := context.WithCancel(context.Background())
	w := &waiting{d: d, c: c, life: life, wake: make(chan struct{}, 1), heard: make([]bool, len(d.nodes))}
	// At the end, cancel runs first: it ends subscriptions under way. Then close ends
	// the others.
	defer w.close()
	defer cancel()

	w.listen(ctx)

	// If this driver has just released the key, other waiters come first.
	doze(ctx, d.yields(c.Key))
	w.surveyed = time.Now() // the engine's attempt has just been refused
	heard := true           // a message has arrived, or the engine's attempt was refused

	for ctx.Err() == nil {
		g, err := w.look(ctx, heard)
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
			return backend.Grant{}, redisstore.Outage(err, w.silent)
		}
		heard = w.sleep(ctx)
	}
	return backend.Grant{}, w.why(ctx)
}

// look makes one attempt. If it is refused, look asks all nodes who holds the key.
// After a message it does so at most every surveyEvery, because a rival usually
// was faster.
func (w *waiting) look(ctx context.Context, heard bool) (backend.Grant, error) {
	began := time.Now()
	lead := w.d.leader(w.c.Key)
	g, err := w.attempt(ctx, lead)

	var held *backend.HeldError
	switch {
	case !errors.As(err, &held):
	case heard && began.Sub(w.surveyed) < surveyEvery:
		w.d.refused(w.c.Key)
	default:
		w.surveyed = began
		s := w.d.survey(ctx, w.c, lead)
		strayed := w.strayed(lead, s)
		switch {
		case s.hasQuorum() && s.free < w.d.quorum():
			w.d.refused(w.c.Key)
			err = s.heldError()
		case s.hasQuorum() && (strayed || w.stray == ""):
			// The record on the lead is gone, or blocks no quorum.
			g, err = w.attempt(ctx, w.d.leader(w.c.Key))
		case s.hasQuorum():
			w.d.refused(w.c.Key)
		default:
			err = s.outage(ctx)
		}
	}

	w.trip = time.Since(began)
	if err == nil {
		// Count from before the nodes were asked, so that the term ends here no
		// later than there.
		g.Until = w.asked.Add(w.c.TTL - backend.Drift(w.c.TTL))
		return g, nil
	}

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

// strayed reports whether the lead has had a record that no quorum can have, for
// leadTimeout or longer. Usually the record belongs to a rival that is about to ask
// the other nodes, but it may be a leftover. Then the next node leads.
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

// attempt makes the nodes vote, with a record that no earlier attempt has had.
func (w *waiting) attempt(ctx context.Context, lead int) (backend.Grant, error) {
	w.number++
	w.asked = time.Now()
	return w.d.tryAcquire(ctx, w.c, w.number, lead)
}

// leader returns the node that contended attempts ask first: the first one in order
// that is healthy and not much slower than the fastest. If clients disagree, they
// may split a vote. Nothing else depends on it.
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

// listen subscribes to releases on every node. It returns when a quorum has
// confirmed, so that no release falls between the subscription and the attempt that
// follows. It waits a third of Timeout at most, so that the attempt has time.
func (w *waiting) listen(ctx context.Context) {
	within, cancel := context.WithTimeout(ctx, min(w.c.Timeout/3, maxSleep))
	defer cancel()
	// There is room for all, because listen may return before the last one.
	tried := make(chan bool, len(w.d.nodes))
	for _, n := range w.d.nodes {
		if !w.d.spawn(func() { tried <- w.listenTo(n) }) {
			// Close has begun, and the next attempt reports it.
			return
		}
	}

	ears := 0
	for range w.d.nodes {
		select {
		case ok := <-tried:
			if ok {
				ears++
			}
		// The other subscriptions are made nevertheless, and serve later attempts.
		case <-within.Done():
			return
		}
		if ears == w.d.quorum() {
			return
		}
	}
}

// listenTo subscribes to releases on one node.
func (w *waiting) listenTo(n *node) bool {
	ctx, cancel := context.WithTimeout(w.life, w.c.Timeout)
	defer cancel()
	ear, err := n.store.Listen(ctx, redisstore.DerivedKey("channel", w.c.Key), redisstore.LockKey(w.c.Key), func(message string, again bool) {
		w.hear(n.i, message, again)
	})
	if err != nil {
		return false
	}

	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		// Wait has returned while the node confirmed, and close did not see ear.
		ear.Close()
	} else {
		w.ears = append(w.ears, ear)
	}
	return true
}

// hear is called for each message. Again means that messages may have been missed.
func (w *waiting) hear(i int, message string, again bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if again {
		// The missed message may have been a release. An attempt finds out.
		w.rouse()
		return
	}

	token, crowd, _ := strings.Cut(message, " ")
	// A number that is missing or wrong counts as 0; scatter then does not sleep.
	n, _ := strconv.Atoi(crowd)
	w.crowd = min(n, maxCrowd)

	if token != w.token {
		w.token, w.woken = token, false
		clear(w.heard)
	}
	w.heard[i] = true

	count := 0
	for _, h := range w.heard {
		if h {
			count++
		}
	}

	if w.woken || count < w.d.quorum() {
		return
	}

	// leader locks Driver.mu while w.mu is held. No caller locks them in the other
	// order.
	if lead := w.d.leader(w.c.Key); lead == noLead || w.heard[lead] {
		w.woken = true
		w.rouse()
	} else if count == w.d.quorum() {
		// The key is free, but an attempt would find the record that the lead is
		// about to release.
		time.AfterFunc(straggle, w.rouse)
	}
}

// rouse ends the sleep between two attempts.
func (w *waiting) rouse() {
	select {
	case w.wake <- struct{}{}:
	// A signal waits already, and one is enough.
	default:
	}
}

func (w *waiting) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.closed = true

	// From here on listenTo closes its subscription itself.
	for _, ear := range w.ears {
		ear.Close()
	}
}

// sleep returns when the next attempt is due, or when ctx is done. It reports
// whether a message ended the sleep.
func (w *waiting) sleep(ctx context.Context) bool {
	timer := time.NewTimer(w.pause(ctx))
	defer timer.Stop()
	select {
	case <-w.wake:
		w.vain = 0
		w.scatter(ctx)
		return true
	case <-timer.C:
	case <-ctx.Done():
	}
	return false
}

// scatter spreads the attempts of many waiters that were woken together, by a
// random sleep. A waiter that was often too late sleeps less. The number of
// waiters comes from the message, which any client may send, so maxScatter bounds
// the sleep.
func (w *waiting) scatter(ctx context.Context) {
	w.mu.Lock()
	crowd := w.crowd
	w.mu.Unlock()
	if crowd <= 1 {
		return
	}

	slot := w.d.slot(w.c.Key)
	window := time.Duration(crowd-1) * slot
	window = max(window>>min(w.late/6, 4), min(window, 8*slot))
	w.late++

	doze(ctx, rand.N(min(window, maxScatter)))
	select {
	case <-w.wake: // the attempt that follows also serves this message
	default:
	}
}

// pause returns how long to sleep if no message arrives.
func (w *waiting) pause(ctx context.Context) time.Duration {
	longest := maxSleep
	w.mu.Lock()
	if len(w.ears) < w.d.quorum() {
		// Without a quorum of subscriptions the waiter misses releases, so it
		// polls.
		longest = maxPoll
	}
	w.mu.Unlock()

	d := min(refusal<<min(w.vain, 10), longest)
	// Waiters that were refused together must not ask again together.
	d -= rand.N(d * 3 / 4)

	if w.held != nil && w.held.RetryAfter > 0 {
		left := w.held.RetryAfter
		d = min(d, left+minSleep+rand.N(left/16+2*minSleep)) // Redis frees a key after its last millisecond
	}

	// In an outage, make the last attempt when the outage has lasted for Timeout.
	if !w.silent.IsZero() {
		d = min(d, max(w.c.Timeout-time.Since(w.silent), minSleep))
	}

	// Make a last attempt before ctx ends, in case a release was not published.
	if end, ok := ctx.Deadline(); ok {
		if left := time.Until(end) - w.trip*3/2 - minSleep; left >= minSleep {
			d = min(d, left)
		}
	}
	return d
}

// why returns the error of a wait that ctx has ended.
func (w *waiting) why(ctx context.Context) error {
	switch {
	case !w.silent.IsZero():
		return redisstore.Outage(w.outage, w.silent)
	case w.held != nil:
		return w.held
	}
	return ctx.Err()
}
