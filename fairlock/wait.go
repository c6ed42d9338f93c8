package fairlock

import (
	"context"
	"errors"
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

// waiter is one Wait under way.
type waiter struct {
	d    *Driver
	c    backend.Claim
	term time.Duration // of a key that is handed over
	wake chan struct{} // something of what Driver.mu guards has changed

	// Only the goroutine of Wait uses these.
	doubt bool      // a call was not answered, and may still arrive
	since time.Time // of an outage
	err   error     // of that outage

	// Driver.mu guards these.
	line   *line
	round  int       // entries and grants of an earlier one do not count
	asked  time.Time // no hold of this round began before
	queued bool      // the store has said so in this round
	how    string    // the command by which the store announces a grant
	told   *told
	gone   error              // why there is no going on
	held   *backend.HeldError // the store's last answer, if it was that
	heldAt time.Time
}

// told is a grant as it was told: by a message, or in a reply.
type told struct {
	fence uint64
	until time.Time // zero: of the term of a key that is handed over
	kept  bool      // replicas have it, as many as were asked for
}

// Wait takes a place in the queue and returns when the key is handed over.
func (d *Driver) Wait(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	if err := ctx.Err(); err != nil {
		return backend.Grant{}, err
	}
	if !d.begin() {
		return backend.Grant{}, errClosed
	}
	defer d.wg.Done()
	w := d.stayedOn(c)
	if w == nil {
		w = &waiter{d: d, c: c, term: min(c.TTL, d.window), wake: make(chan struct{}, 1), round: 1}
	}
	g, err := w.wait(ctx)
	if ctx.Err() != nil && errors.Is(err, backend.ErrHeld) && d.staysOn(w) {
		return g, err
	}
	d.part(w)
	switch {
	case err == nil && w.doubt:
		d.doubtful(c)
	case errors.Is(err, backend.ErrHeld):
		// The place in the queue is still there. The engine releases it.
		err = errors.Join(err, ctx.Err())
	case errors.Is(err, backend.ErrInvalid) && w.doubt:
		err = errors.New(err.Error()) // as an error of unknown outcome
	}
	return g, err
}

// doubtful repeats the release of c.Token after c.Timeout, if it is released
// before then. An enqueue that was not answered arrives within c.Timeout, if at
// all. While c.Token holds the key, the enqueue changes nothing; after the
// release it would take a new place.
func (d *Driver) doubtful(c backend.Claim) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.doubts[c.Token] = false
	time.AfterFunc(c.Timeout, func() {
		d.mu.Lock()
		again := d.doubts[c.Token] && d.beginLocked()
		delete(d.doubts, c.Token)
		d.mu.Unlock()
		if !again {
			return
		}
		defer d.wg.Done()
		ctx, cancel := context.WithTimeout(d.calls, c.Timeout)
		defer cancel()
		_ = d.release(ctx, c) // if this fails, the entry expires
	})
}

// wait goes from one step to the next until w has the key or cannot go on.
func (w *waiter) wait(ctx context.Context) (backend.Grant, error) {
	for try := 0; ; {
		if g, ok, err := w.outcome(); ok || err != nil {
			return g, err
		}
		if ctx.Err() != nil || w.d.open.Err() != nil {
			return backend.Grant{}, w.why(ctx)
		}
		if w.stands() {
			w.sleep(ctx, nil)
			continue
		}
		began := time.Now()
		err := w.ask(ctx)
		if err == nil {
			w.since, w.err, try = time.Time{}, nil, 0
			continue
		}
		if ctx.Err() != nil {
			continue // which is why
		}
		if w.err = err; w.since.IsZero() {
			w.since = began
		}
		if time.Since(w.since) >= w.c.Timeout {
			return backend.Grant{}, redisstore.Outage(w.err, w.since)
		}
		w.sleep(ctx, time.After(pause(try)))
		try++
	}
}

// pause is how long to wait before an unanswered call is repeated.
func pause(try int) time.Duration {
	d := 20 * time.Millisecond << min(try, 4)
	return d/2 + rand.N(d/2)
}

// sleep waits for something to happen.
func (w *waiter) sleep(ctx context.Context, timeout <-chan time.Time) {
	select {
	case <-w.wake:
	case <-timeout:
	case <-ctx.Done():
	case <-w.d.open.Done():
	}
}

func (w *waiter) poke() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// why is the error of a wait that has ended without the key.
func (w *waiter) why(ctx context.Context) error {
	w.d.mu.Lock()
	defer w.d.mu.Unlock()
	switch {
	case w.err != nil:
		return redisstore.Outage(w.err, w.since)
	case ctx.Err() == nil:
		return errClosed
	case w.held != nil:
		// What the store said before it fell silent is not its last word.
		if err := w.line.silence(w.heldAt, w.c.Timeout); err != nil {
			return err
		}
		e := *w.held
		if e.RetryAfter > 0 {
			e.RetryAfter = max(e.RetryAfter-time.Since(w.heldAt), 0)
		}
		return &e
	}
	return ctx.Err()
}

func (w *waiter) stands() bool {
	w.d.mu.Lock()
	defer w.d.mu.Unlock()
	return w.queued
}

// outcome reports what there is to return. A grant that may not last is
// confirmed first: the next ask does that.
func (w *waiter) outcome() (backend.Grant, bool, error) {
	w.d.mu.Lock()
	defer w.d.mu.Unlock()
	if w.told == nil {
		return backend.Grant{}, false, w.gone
	}
	if g, ok := w.grant(); ok {
		return g, true, nil
	}
	w.again()
	return backend.Grant{}, false, nil
}

// again begins a new round. The caller holds mu.
func (w *waiter) again() {
	w.round++
	w.asked, w.queued, w.told = time.Time{}, false, nil
}

// grant is what w was told, if it is worth having: more than half of its term
// is left, it is all of the term, or will be by the first renewal, and the
// replicas have it. The caller holds mu.
func (w *waiter) grant() (backend.Grant, bool) {
	g := backend.Grant{Until: w.told.until}
	if w.c.Fenced {
		g.Fence = w.told.fence
	}
	if !g.Until.IsZero() {
		return g, true
	}
	if !w.told.kept && w.d.store.Replicas() > 0 {
		return g, false
	}
	g.Until = w.asked.Add(w.term - backend.Drift(w.term))
	return g, (w.c.Renewed || w.term == w.c.TTL) && time.Until(g.Until) >= w.term/2
}

// ask has the store give w a place in the queue, or confirm one, or prolong
// the hold that it has. A channel is listened to before.
func (w *waiter) ask(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, w.c.Timeout)
	defer cancel()
	if w.line == nil {
		w.d.join(ctx, w)
	}
	d, l := w.d, w.line
	d.mu.Lock()
	sent := time.Now()
	if w.asked.IsZero() {
		w.asked = sent
	}
	w.how = l.ear.how()
	missed := l.ear.missed
	d.mu.Unlock()
	reply, err := d.store.Run(ctx, enqueueScript, d.call(w.c.Key, w.c.Token, w.c.Owner, redisstore.Millis(w.term), flag(w.c.Fenced),
		w.how, l.ear.channel, w.round, redisstore.Millis(w.c.TTL), redisstore.Millis(d.window)))
	if err = foreign(w.c.Key, err); errors.Is(err, backend.ErrInvalid) {
		d.mu.Lock()
		defer d.mu.Unlock()
		w.gone = err
		return nil
	}
	if err != nil {
		w.doubt = true
		return err
	}
	s, ok := decode(reply)
	if !ok {
		return d.store.Unexpected(reply)
	}
	d.tell(w.c.Key, s.told, sent)
	d.mu.Lock()
	defer d.mu.Unlock()
	if s.deaf {
		l.ear.listener.Relisten()
	}
	switch {
	case w.told != nil:
		w.told.kept = s.token == w.c.Token
	case w.gone != nil:
	case s.token == w.c.Token && w.c.Fenced && s.fence == 0:
		return d.store.Unexpected(reply)
	case s.token == w.c.Token: // the whole term was asked for
		w.told = &told{s.fence, sent.Add(w.c.TTL - backend.Drift(w.c.TTL)), true}
	default:
		w.stand(s, sent)
		l.lookBy(l.next(s, sent))
		if l.ear.missed != missed {
			l.lookBy(sent)
		}
	}
	return nil
}

// stand notes that w is in the queue, as a call said that was sent then. The
// caller holds mu.
func (w *waiter) stand(s state, sent time.Time) {
	w.queued = true
	if sent.After(w.asked) {
		w.asked = sent
	}
	w.held, w.heldAt = held(s.pttl, s.owner), sent
}

// state is what state.lua returns.
type state struct {
	pttl     int64
	stranger bool
	deaf     bool // the server knows of no subscriber of the channel
	token    string
	fence    uint64
	owner    string
	found    string
	told     parts
}

func decode(reply any) (state, bool) {
	r := array(reply)
	if len(r) < 8 || r.int(1) < -2 || !r.isText(4) || !r.isText(5) || !r.isText(6) || !r.isText(7) {
		return state{}, false
	}
	fence, _ := strconv.ParseUint(r.text(5), 10, 64) // in a stranger's record it may be anything
	return state{r.int(1), r.int(2) == 1, r.int(3) == 1, r.text(4), fence, r.text(6), r.text(7), r[8:]}, true
}
