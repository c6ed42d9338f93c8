package redlock

import (
	"context"
	"errors"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
	"github.com/hasplock/hasp/internal/redisstore/pubsub"
)

// Bounds of the sleep between two looks at a key.
const (
	minSleep = time.Millisecond
	maxSleep = time.Second            // though nothing is heard
	maxPoll  = 100 * time.Millisecond // where too few nodes can be listened to
	refusal  = 50 * time.Millisecond  // the first sleep after a look in vain; it doubles
	straggle = 3 * time.Millisecond   // for the message of the lead, when a quorum has come

	surveyEvery = 250 * time.Millisecond // while releases are heard
)

// waiting is one Wait.
type waiting struct {
	d    *Driver
	c    backend.Claim
	life context.Context // of what listens
	wake chan struct{}   // has room for one

	number int                // of attempts
	asked  time.Time          // when the last one began
	vain   int                // looks since something was heard
	late   int                // looks because something was heard
	held   *backend.HeldError // the last word of the nodes
	silent time.Time          // since when too few have answered; zero if they have
	outage error              // how that was told
	trip   time.Duration      // that the last answer took

	surveyed time.Time // when all nodes were asked the last time
	stray    string    // the record that the lead had then
	since    time.Time // when that was seen first

	mu     sync.Mutex // guards all below
	ears   []*pubsub.Listener
	closed bool
	token  string // whose release is being heard
	heard  []bool // from which node
	woken  bool   // by that release
	crowd  int    // how many clients hear of a release
}

// Wait looks whenever a quorum of the nodes has told of a release, when the
// holder's term ends, and from time to time. It asks one node first, the lead,
// on which all who wait agree as a rule, and the others only if that has said
// yes: so rivals do not split the vote. Those who have done so all the same
// sleep for a random time.
func (d *Driver) Wait(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	life, cancel := context.WithCancel(context.Background())
	w := &waiting{d: d, c: c, life: life, wake: make(chan struct{}, 1), heard: make([]bool, len(d.nodes))}
	defer w.close()
	defer cancel()
	w.listen(ctx)
	doze(ctx, d.yields(c.Key))
	w.surveyed = time.Now() // the engine has tried, and knows
	heard := true           // that the key is held, or that it was released, just now
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
		case time.Since(w.silent) >= c.Timeout:
			return backend.Grant{}, redisstore.Outage(err, w.silent)
		}
		heard = w.sleep(ctx)
	}
	return backend.Grant{}, w.why(ctx)
}

// look makes one attempt. If that is in vain, all nodes are asked how it
// stands, but not each time that a release was heard which a rival was quicker
// to use.
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
		case s.voted(w.d) && s.free < w.d.quorum():
			w.d.refused(w.c.Key)
			err = w.d.heldBy(s)
		case s.voted(w.d) && (strayed || w.stray == ""):
			// What was in the way is gone, or is in nobody else's.
			g, err = w.attempt(ctx, w.d.leader(w.c.Key))
		case s.voted(w.d):
			w.d.refused(w.c.Key)
		case ctx.Err() == nil:
			err = w.d.unanswered(ctx, s)
		}
	}
	w.trip = time.Since(began)
	if err == nil {
		g.Until = w.asked.Add(w.c.TTL - backend.Drift(w.c.TTL))
		return g, nil
	}
	w.vain++
	if !definite(err) && ctx.Err() == nil {
		w.outage = err
		if w.silent.IsZero() {
			w.silent = began
		}
	}
	return backend.Grant{}, err
}

// strayed reports whether the lead has a record that no quorum can have, and has
// had it for too long: as a rule that is a rival who is about to ask the others,
// but it may be one that somebody has left. Then the next node leads.
func (w *waiting) strayed(lead int, s state) bool {
	record, most := s.record(w.d, lead)
	if record != w.stray {
		w.stray, w.since = record, time.Now()
	}
	if record == "" || most >= w.d.quorum() || time.Since(w.since) < leadPatience {
		return false
	}
	w.d.shun(w.c.Key, lead)
	return true
}

// attempt has the nodes vote, with a record that no earlier attempt has had.
func (w *waiting) attempt(ctx context.Context, lead int) (backend.Grant, error) {
	w.number++
	w.asked = time.Now()
	return w.d.attempt(ctx, w.c, w.number, lead)
}

// leader is the node that contended attempts ask first: the first one in order
// that is well and not much slower than the fastest. Clients that disagree may
// split a vote, and no more than that.
func (d *Driver) leader(key string) int {
	fastest := time.Duration(1<<63 - 1)
	for _, n := range d.nodes {
		if trip := time.Duration(n.trip.Load()); trip > 0 && n.trusted() {
			fastest = min(fastest, trip)
		}
	}
	for i, n := range d.nodes {
		if trip := time.Duration(n.trip.Load()); trip > 0 && trip <= 4*fastest+2*time.Millisecond && n.trusted() && n.marks.voting() && d.leads(key, i) {
			return i
		}
	}
	return nobody
}

// listen has every node tell of releases. It returns when a quorum does, so
// that no release falls between that and the look that follows; or when it has
// been tried for long enough, since the look is to have most of the time.
func (w *waiting) listen(ctx context.Context) {
	within, cancel := context.WithTimeout(ctx, min(w.c.Timeout/3, maxSleep))
	defer cancel()
	tried := make(chan bool, len(w.d.nodes))
	for _, n := range w.d.nodes {
		if !w.d.spawn(func() { tried <- w.listenTo(n) }) {
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
		case <-within.Done():
			return
		}
		if ears == w.d.quorum() {
			return
		}
	}
}

// listenTo has one node tell of releases.
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
		ear.Close()
	} else {
		w.ears = append(w.ears, ear)
	}
	return true
}

// hear is called for each message, and when some may have been missed.
func (w *waiting) hear(i int, message string, again bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if again {
		w.rouse()
		return
	}
	token, crowd, _ := strings.Cut(message, " ")
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
	if lead := w.d.leader(w.c.Key); lead == nobody || w.heard[lead] {
		w.woken = true
		w.rouse()
	} else if count == w.d.quorum() {
		time.AfterFunc(straggle, w.rouse)
	}
}

// rouse ends the sleep.
func (w *waiting) rouse() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

func (w *waiting) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.closed = true
	for _, ear := range w.ears {
		ear.Close()
	}
}

// sleep returns when it is time for another look, or when ctx has ended. It
// reports whether a release was heard.
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
	case <-w.wake: // which the look that follows serves, too
	default:
	}
}

// pause is how long to sleep if nothing is heard.
func (w *waiting) pause(ctx context.Context) time.Duration {
	longest := maxSleep
	w.mu.Lock()
	if len(w.ears) < w.d.quorum() {
		longest = maxPoll
	}
	w.mu.Unlock()
	d := min(refusal<<min(w.vain, 10), longest)
	d -= rand.N(d * 3 / 4)
	if w.held != nil && w.held.RetryAfter > 0 {
		left := w.held.RetryAfter
		d = min(d, left+minSleep+rand.N(left/16+2*minSleep)) // Redis frees a key after its last millisecond
	}
	// A last look, so that a release which was not told is not missed.
	if end, ok := ctx.Deadline(); ok {
		if left := time.Until(end) - w.trip*3/2 - minSleep; left >= minSleep {
			d = min(d, left)
		}
	}
	return d
}

// why is the error of a wait that ctx has ended.
func (w *waiting) why(ctx context.Context) error {
	switch {
	case !w.silent.IsZero():
		return redisstore.Outage(w.outage, w.silent)
	case w.held != nil:
		return w.held
	}
	return ctx.Err()
}
