package hasp

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/hasplock/hasp/backend"
)

// This file has the code for a caller that gets the key at once. wait.go has the code for
// a caller that has to wait for the store, and line.go for callers of one Client that
// share a key.

// wait is one call of Lock or TryLock, from its arguments to a hold.
type wait struct {
	c     *Client
	r     request
	start instant // when Lock was called
	began instant // the same by clock.awake: a suspend is no part of an outage
	once  bool    // make only one attempt
	end   instant // of WithMaxWait, or never
	tries int     // calls to the store so far
	asked instant // when the last of them began

	line       *line // the line that counts this caller; nil before it joins, and once it has a hold or has left
	stood      bool  // the caller has waited in the line, or for the end of a gap
	turn       turn  // its entry there; ready is nil unless it waits there
	lastAnswer error // why the caller does not have the key, as far as it knows
	refused    bool  // the store has just refused this caller

	listening                  // zero while the caller does not listen to a Waker
	listenAgain instant        // when to call Listen again, after it has failed
	intent      *backend.Claim // the last claim that may keep new shared callers away; nil if there is none

	part *wait // with slots, the wait for one of their keys that began last
}

// waitPool has waits for reuse. Nothing refers to a wait after its call has returned.
var waitPool = sync.Pool{New: func() any { return new(wait) }}

// lock implements Lock and TryLock.
func (c *Client) lock(ctx context.Context, op, key string, opts []Option) (*Lease, error) {
	w := waitPool.Get().(*wait)
	var l *Lease
	returns := false
	defer func() {
		if !returns {
			w.abandon(l)
		}
		*w = wait{}
		waitPool.Put(w)
	}()

	w.r.op, w.r.name, w.r.key, w.r.ttl = op, key, key, c.opts.TTL
	w.r.apply(opts)
	c.observer.requested(ctx, &w.r) // before the time of the wait begins
	w.c, w.start, w.end = c, c.clock.now(), never
	w.began = c.clock.withoutSleep(w.start)
	err := w.prepare(ctx)
	if err == nil {
		l, err = c.reenter(ctx, &w.r)
	}
	switch {
	case l != nil || err != nil:
	case w.r.slots > 0:
		l, err = w.takeSlot(ctx)
	default:
		l, err = w.take(ctx)
	}
	if err != nil {
		err = newError(w.r.op, key, err)
		c.observer.refused(ctx, w, err)
		returns = true
		return nil, err
	}
	c.observer.acquired(ctx, w, l)
	if l.keep != 0 && !w.r.oneOfAll {
		l.countMinHold()
	}
	returns = true
	return l, nil
}

// abandon gives up what the call has. The caller's code has panicked or has ended the
// goroutine: Options.Observe, Options.Backoff, or a method of the context. L is the lease
// that Lock would have returned, or nil.
func (w *wait) abandon(l *Lease) {
	if l != nil {
		_, _ = l.unlock(context.Background()) // without another event; if it fails, the Client repeats it
	}
	if w.part != nil {
		w.part.abandon(nil)
	}
	switch {
	case w.line == nil:
	case w.turn.ready != nil:
		w.quitLine(context.Background())
	default:
		w.c.mu.Lock()
		defer w.c.mu.Unlock()
		w.giveUpLocked()
	}
}

// prepare returns an error if the arguments of a call are invalid. Otherwise it sets w to
// what follows from them.
func (w *wait) prepare(ctx context.Context) error {
	r := &w.r
	switch {
	case r.name == "":
		r.refuse("empty key")
	case r.err != nil:
	case r.fenced && !w.c.traits.Fenced:
		r.err = fmt.Errorf("fence: %w", errUnsupported)
	case r.minHold > 0 && !w.c.traits.Keeps:
		r.err = fmt.Errorf("min hold: %w", errUnsupported)
	case r.shared && r.minHold > 0:
		r.refuse("WithShared and WithMinHold: only an exclusive lease can keep the key")
	case r.shared && r.slots > 0:
		r.refuse("WithShared and WithSlots: a slot is exclusive")
	case r.shared && !w.c.traits.Shared:
		r.err = fmt.Errorf("WithShared: the driver has no shared holds: %w", errUnsupported)
	}
	if r.err != nil {
		return r.err
	}
	if ctx.Err() != nil {
		return withContextEnd(ctx, nil)
	}

	// If ctx is the context of a lease, or is derived from one, the key may be re-entered.
	r.around, _ = ctx.Value(leaseKey).(*Lease)
	w.once = r.op == "trylock" || r.bounded && r.maxWait == 0
	if r.bounded && !w.once {
		w.end = w.start.add(r.maxWait)
	}
	return nil
}

// take returns a lease that was handed over in the line, or one from the store.
func (w *wait) take(ctx context.Context) (*Lease, error) {
	c, r := w.c, &w.r
	if l, err := w.joinLine(ctx); l != nil || err != nil {
		return l, err
	}

	// From here on this caller asks the store. The line counts it until its hold has
	// ended, or until it gives up below.
	h, err := w.askUntilHeld(ctx)

	c.mu.Lock()
	defer c.mu.Unlock()
	if err == nil && c.closing.Err() != nil {
		// Close began during the call, and ended only the leases that it found.
		c.reaper.addLocked(&reap{claim: h.claim, times: reapOnce}, h.claim.TTL)
		err = ErrClosed
	}
	if err != nil {
		w.giveUpLocked()
		return nil, err
	}

	ln := w.line
	ln.pace.acquiredLocked(w.waitedLocked(h.granted))
	w.line = nil            // from here on the line counts the hold
	ln.sought = w.tries > 1 // the release leaves a gap then, however long ago the refusal was
	return c.startHoldLocked(ctx, r, ln, h), nil
}

// giveUpLocked leaves the line, whose head the caller was unless the driver is Ordered.
func (w *wait) giveUpLocked() {
	if w.intent != nil {
		// The release lets new shared callers in at once.
		w.c.reaper.addLocked(&reap{claim: *w.intent, times: reapOnce}, w.intent.TTL)
	}
	if !w.c.traits.Ordered {
		w.c.giveUpHeadLocked(w.line)
	}
	w.leaveLocked()
}

// leaveLocked leaves the line.
func (w *wait) leaveLocked() {
	w.c.leaveLocked(w.line)
	w.line = nil
}

// joinLine joins the line of the key. If there is a head, a Lock waits behind it, and a
// TryLock does not wait. joinLine returns a lease if a hold was handed over, an error if
// the wait has ended, and nil, nil if the caller must ask the store.
func (w *wait) joinLine(ctx context.Context) (*Lease, error) {
	c, key := w.c, w.r.key
	c.mu.Lock()
	if c.closing.Err() != nil {
		c.mu.Unlock()
		return nil, ErrClosed
	}

	c.callers++
	if w.r.shared {
		w.line = &line{key: key, callers: 1}
		c.mu.Unlock()
		return nil, nil
	}
	ln := c.lines[key]
	if ln == nil {
		ln = &line{key: key}
		c.lines[key] = ln
	}
	w.line = ln
	if ln.callers++; ln.callers == 1 && c.contended.lately(key, c.clock.now()) {
		ln.pace = c.contended[key].pace
	}

	// An Ordered driver queues the callers itself, so all of them may ask. But a
	// TryLock need not ask the store if another caller of this Client has the key or
	// waits for it, unless there is an outage.
	asks := !ln.hasHead
	if c.traits.Ordered {
		asks = !w.once || ln.callers == 1 || ln.outage != 0
	}
	if asks {
		ln.hasHead = true
		gap := c.restOfGapLocked(key)
		c.mu.Unlock()
		if gap = min(gap, w.untilLastCall(ctx)); gap > 0 && !w.once { // a TryLock does not wait
			w.stood = true
			w.sleep(ctx, gap)
		}
		return nil, nil
	}
	if w.once {
		defer c.mu.Unlock()
		err := cmp.Or(c.refusalLocked(ln), errHeldHere)
		w.leaveLocked()
		return nil, err
	}
	return w.waitInLineLocked(ctx)
}

// leaveLocked takes a caller out of the count. The last one ends the line.
func (c *Client) leaveLocked(ln *line) {
	c.callers--
	c.changed.Broadcast()
	if ln.callers--; ln.callers == 0 && c.lines[ln.key] == ln {
		delete(c.lines, ln.key) // no caller refers to the line any more
	}
}

// askUntilHeld asks the store until the caller has the key or the wait is over.
func (w *wait) askUntilHeld(ctx context.Context) (*hold, error) {
	mayWait := w.c.store.waiter != nil && !w.once
	defer w.stopListening()
	for attempt := 1; ; attempt++ {
		if ctx.Err() != nil || w.c.closing.Err() != nil {
			return nil, w.endErr(ctx)
		}

		// Decide before the call whether it is the last one: its outcome must not extend
		// the wait.
		last := w.once || w.untilLastCall(ctx) <= 0
		useWait := mayWait && w.shouldWait()
		sent := w.began
		w.asked = w.start
		if attempt > 1 || w.stood {
			w.asked = w.c.clock.now()
			sent = w.c.clock.withoutSleep(w.asked)
		}

		var h *hold
		var err error
		w.tries++
		if useWait {
			h, err = w.await(ctx)
		} else {
			h, err = w.attempt(ctx, last)
		}
		if err == nil {
			return h, nil
		}

		if useWait {
			sent = w.c.outageOf(err, sent) // Wait may have begun long before the outage
		}
		if over, why := w.over(ctx, err, sent, last); over {
			return nil, why
		}
		if !useWait && mayWait && w.shouldWait() {
			continue // the driver's Wait is better than a sleep
		}
		if w.refused && w.listen(ctx) {
			continue // the key may have been released before the Client listened
		}
		if !w.sleep(ctx, w.pause(ctx, attempt, err)) {
			return nil, w.endErr(ctx)
		}
	}
}

// untilLastCall returns how long the caller may still wait before it must make its last
// call, so that the answer arrives in time.
func (w *wait) untilLastCall(ctx context.Context) time.Duration {
	left := time.Duration(never)
	if w.end != never {
		left = w.end.sub(w.c.clock.now())
	}
	if d, ok := ctx.Deadline(); ok {
		left = min(left, time.Until(d))
	}

	// An answer takes a round trip, and now and then half as long again.
	trip := time.Duration(w.c.store.trip.Load())
	return left - trip - max(trip/2, time.Millisecond)
}

// attempt makes one attempt. If its outcome is unknown, the token is released in the
// background; the outcome of a driver of Reach Process is always known. Last says that no
// attempt follows.
func (w *wait) attempt(ctx context.Context, last bool) (*hold, error) {
	c, start := w.c, w.asked
	cl, bound := c.claim(&w.r), w.beginAttempt()
	cl.Waiting = !last
	if c.store.polls {
		c.mu.Lock()
		cl.Waited = w.waitedLocked(start)
		c.mu.Unlock()
	}
	slept := c.clock.slept.Load()
	var g backend.Grant
	var err error
	if c.traits.Reach == backend.Process {
		g, err = c.store.driver.Acquire(context.WithoutCancel(ctx), cl)
	} else {
		// A suspend before the call must not count as a part of the term.
		start, slept = c.clock.read()
		g, err = call(&c.store, ctx, bound, c.reaper.after(cl, c.store.driver.Acquire), c.reaper.late(cl))
	}

	// The clock is read after the call, during which the machine may have slept.
	now, _ := c.clock.read()
	if err == nil || backend.Definite(err) {
		c.noteTrip(c.clock.withoutSleep(now).sub(start - instant(slept)))
	}
	if err != nil {
		var held *backend.HeldError
		if c.store.waker != nil && cl.Waiting && !cl.Shared && errors.As(err, &held) && held.Shared {
			left := cl // cl itself would be allocated for every attempt
			w.intent = &left
		}
		return nil, err
	}
	return newHold(c, cl, g, start, now, slept)
}

// beginAttempt records that an attempt begins, and returns how long it may take. That is
// Timeout, or the rest of Timeout in an outage, or the rest of the wait, whichever is the
// shortest. But it is always long enough for a healthy store to answer.
func (w *wait) beginAttempt() time.Duration {
	c, ln := w.c, w.line
	// Without a max wait, end is never, and Timeout is the bound.
	now := c.clock.now()
	d := min(c.opts.Timeout, w.end.sub(now))

	c.mu.Lock()
	defer c.mu.Unlock()
	if ln.unanswered == 0 {
		ln.unanswered = c.clock.withoutSleep(now)
	}
	d = min(d, c.opts.Timeout-c.outageLocked(ln, w.began))
	if d < c.opts.Timeout {
		d = max(d, w.c.answerTime())
	}
	return d
}

// claim returns the claim of a new attempt, whose token is 128 random bits.
func (c *Client) claim(r *request) backend.Claim {
	var b [16]byte
	var token [22]byte
	rand.Read(b[:])
	base64.RawURLEncoding.Encode(token[:], b[:])
	return backend.Claim{Key: c.opts.Prefix + r.key, Token: string(token[:]), Owner: c.opts.Owner,
		TTL: r.term(), Timeout: c.opts.Timeout, Fenced: r.fenced, Shared: r.shared, Renewed: !r.noRenew}
}

// term returns the term that a claim asks for.
func (r *request) term() time.Duration {
	if 0 < r.maxHold && r.maxHold < r.ttl {
		// If the holder dies, the next caller gets the key soon after the max hold.
		return min(r.ttl, termFor(r.maxHold))
	}
	return r.ttl
}
