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

// This file has Lock and TryLock of a key that is free: arguments, re-entry, the line of this
// Client's callers, and attempts. wait.go has the waits of a caller that is not the first in line,
// or that the store has refused.

// wait is one call of Lock or TryLock, from its arguments to a hold.
type wait struct {
	c     *Client
	r     request
	start instant // when Lock was called
	began instant // start by clock.awake, because a suspend is no part of an outage
	once  bool    // make only one attempt
	end   instant // when WithMaxWait ends the wait, or never
	tries int     // calls to the store so far
	asked instant // when the last call to the store began

	line       *line // the line that counts this caller; nil before the caller joins, and after it got a hold or left
	queued     bool  // the driver's Wait was called
	stood      bool  // the caller has waited in the line, or for the end of a gap
	turn       turn  // the caller's entry in the line; ready is nil unless the caller waits there
	lastAnswer error // why the caller does not have the key; nil if that is not known
	refused    bool  // the store has just refused this caller

	listening                  // what Listen returned; zero while the caller does not listen
	listenAgain instant        // when to call Listen again, after it has failed
	intent      *backend.Claim // the last claim that may keep out new shared callers, or nil

	part *wait // with slots, the wait for the slot that was tried last, or for the queue
}

type request struct {
	op       string          // "lock", "trylock" or "lead"
	id       uint64          // ID of its events; 0 without Observe
	name     string          // the key as the caller gave it
	key      string          // the key that is locked: name, or with slots the key of one slot
	around   *Lease          // the innermost lease in the caller's context, or nil
	parent   context.Context // parent of the lease's context, if that is not the context of the wait; else nil
	ttl      time.Duration
	maxWait  time.Duration
	bounded  bool          // maxWait was given
	maxHold  time.Duration // 0 if there is none
	minHold  time.Duration // 0 if there is none
	linger   time.Duration // 0 if there is none
	oneOfAll bool          // LockAll makes the call; the min hold counts once LockAll has all keys
	slots    int           // number of slots; 0 without WithSlots
	slot     int           // number of the slot that is asked for, from 1; 0 without WithSlots
	shared   bool          // WithShared
	noRenew  bool
	apart    bool // WithoutReentry
	fenced   bool
	err      error // the error of the first invalid option
}

func (r *request) apply(opts []Option) {
	for _, o := range opts {
		if o != nil {
			o(r)
		}
	}
}

// refuse records an error, unless there is an earlier one.
func (r *request) refuse(format string, args ...any) {
	if r.err == nil {
		r.err = fmt.Errorf("%w: "+format, append([]any{ErrInvalid}, args...)...)
	}
}

// waitPool has waits for reuse. Nothing refers to a wait after its call has returned.
var waitPool = sync.Pool{New: func() any { return new(wait) }}

func (c *Client) lock(ctx context.Context, op, key string, opts []Option) (l *Lease, err error) {
	w := waitPool.Get().(*wait)
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
	if c.opts.Observe != nil {
		c.observer.requested(ctx, &w.r) // before w.start, so that Observe does not count as a part of the wait
	}
	w.c, w.start, w.end = c, c.clock.now(), never
	w.began = c.clock.withoutSleep(w.start)
	if err = w.prepare(ctx); err == nil {
		l, err = w.reenter(ctx)
	}
	switch {
	case err != errNoneAround:
	case w.r.slots > 0:
		l, err = w.takeSlot(ctx)
	default:
		l, err = w.take(ctx)
	}

	if err != nil {
		err = newError(w.r.op, key, err)
		c.observer.refused(ctx, w, err)
	} else {
		if c.opts.Observe != nil {
			c.observer.acquired(ctx, w, l)
		}
		if l.keep != 0 && !w.r.oneOfAll {
			l.countMinHold()
		}
	}
	returns = true
	return l, err
}

// abandon gives up what the call has acquired. lock calls it if Options.Observe, Options.Backoff or
// a method of the context has panicked or has ended the goroutine. l is the lease that Lock would
// have returned, or nil.
func (w *wait) abandon(l *Lease) {
	if l != nil {
		_, _ = l.unlock(context.Background()) // without another event; if the release fails, the Client repeats it
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

// prepare returns an error if the arguments of a call are invalid. Otherwise it sets the fields of
// w that follow from them.
func (w *wait) prepare(ctx context.Context) error {
	r := &w.r
	switch {
	case r.name == "":
		r.refuse("empty key")
	case r.err != nil:
	case r.fenced && !w.c.traits.Fenced:
		r.err = fmt.Errorf("fence: %w", errors.ErrUnsupported)
	case r.minHold > 0 && !w.c.traits.MinHold:
		r.err = fmt.Errorf("min hold: %w", errors.ErrUnsupported)
	case r.shared && r.minHold > 0:
		r.refuse("WithShared and WithMinHold: only an exclusive lease can keep the key")
	case r.shared && r.slots > 0:
		r.refuse("WithShared and WithSlots: a slot is exclusive")
	case r.shared && !w.c.traits.Shared:
		r.err = fmt.Errorf("WithShared: the driver has no shared holds: %w", errors.ErrUnsupported)
	}
	if r.err != nil {
		return r.err
	}
	if ctx.Err() != nil {
		return withContextEnd(ctx, nil)
	}

	// If ctx is the context of a lease, or is derived from one, the key may be re-entered.
	if x, ok := ctx.Value(leaseKey).(*leaseContext); ok {
		r.around = x.lease
	}
	w.once = r.op == "trylock" || r.bounded && r.maxWait == 0
	if r.bounded && !w.once {
		w.end = w.start.add(r.maxWait)
	}
	return nil
}

// take returns a lease that was handed over in the line, or one from the store.
func (w *wait) take(ctx context.Context) (*Lease, error) {
	tk := w.join(ctx)
	for tk.do == joinAgain {
		if err := w.awaitFreed(ctx, tk.freed); err != nil {
			return nil, err
		}
		tk = w.join(ctx)
	}
	if tk.do == mustWait {
		tk = w.waitInLine(ctx)
	}
	switch tk.do {
	case haveLease:
		return tk.lease, nil
	case giveUp:
		return nil, tk.err
	}

	// This caller is the head now, and takes over the last head's answer. The line counts the
	// caller until its hold has ended, or until it gives up below.
	w.lastAnswer = tk.lastAnswer
	if tk.after > 0 && (!w.once || w.r.op == "trylock" && w.r.oneOfAll) { // a TryLock waits for a gap only if LockAll makes it
		if d := min(tk.after, w.untilLastCall(ctx)); d > 0 {
			w.stood = true
			w.sleep(ctx, d)
		}
	}
	h, err := w.askUntilHeld(ctx)

	c := w.c
	c.mu.Lock()
	defer c.mu.Unlock()
	if err == nil && c.closing.Err() != nil {
		// Close began during the call, and did not find this hold.
		c.reaper.addLocked(&reap{claim: h.claim, times: reapOnce}, h.claim.TTL)
		err = ErrClosed
	}
	if err != nil {
		w.giveUpLocked()
		return nil, err
	}
	l := h.startLocked(ctx, &w.r, w.line, w.waitedLocked(h.granted), w.tries > 1 || w.queued)
	w.line = nil // from here on the line counts the hold
	return l, nil
}

// giveUpLocked leaves the line after the caller has asked the store and has got no hold.
func (w *wait) giveUpLocked() {
	if w.intent != nil {
		// Release the claim, because it would keep out new shared callers for a while.
		w.c.reaper.addLocked(&reap{claim: *w.intent, times: reapOnce}, w.intent.TTL)
	}
	w.line.leaveWithoutHoldLocked()
	w.line = nil
}

func (w *wait) join(ctx context.Context) (tk ticket) {
	w.c.mu.Lock()
	defer w.c.mu.Unlock()
	if w.c.closing.Err() != nil {
		return ticket{do: giveUp, err: ErrClosed}
	}
	w.turn = turn{r: &w.r, ctx: ctx, since: w.began}
	w.line, tk = w.c.queue.joinLocked(&w.turn, w.once)
	return tk
}

// askUntilHeld asks the store until the caller has the key or the wait is over. Between two
// attempts the caller waits in the driver, or sleeps until the driver wakes it or the next poll is
// due.
func (w *wait) askUntilHeld(ctx context.Context) (*hold, error) {
	mayWait := w.c.store.waiter != nil && !w.once
	defer w.stopListening()
	for attempt := 1; ; attempt++ {
		if ctx.Err() != nil || w.c.closing.Err() != nil {
			return nil, w.endErr(ctx)
		}

		// Decide before the call whether it is the last one, so that its outcome does not extend
		// the wait.
		last := w.once || w.untilLastCall(ctx) <= 0
		useWait := mayWait && w.shouldWait()
		w.asked = w.c.clock.now()
		sent := w.c.clock.withoutSleep(w.asked)

		var h *hold
		var err error
		w.tries++
		if useWait {
			w.queued = true
			h, err = w.waitInStore(ctx)
		} else {
			h, err = w.attempt(ctx, last)
		}
		if err == nil {
			return h, nil
		}

		if useWait {
			sent = w.c.outageOf(err, sent) // because Wait may have begun long before the outage
		}
		if over, why := w.over(ctx, err, sent, last); over {
			return nil, why
		}
		if !useWait && mayWait && w.shouldWait() {
			continue // wait in the driver instead of a sleep
		}
		if w.refused && w.listen(ctx) {
			continue // ask again: the key may have been released before the Client listened
		}
		if !w.sleep(ctx, w.pause(ctx, attempt, err)) {
			return nil, w.endErr(ctx)
		}
	}
}

// untilLastCall returns how long the caller may still wait before it must make its last call, so
// that the answer arrives in time.
func (w *wait) untilLastCall(ctx context.Context) time.Duration {
	left := time.Duration(never)
	if w.end != never {
		left = w.end.sub(w.c.clock.now())
	}
	if d, ok := ctx.Deadline(); ok {
		left = min(left, time.Until(d))
	}

	// Allow one and a half round trips for the answer, because now and then an answer takes that
	// long.
	trip := w.c.roundTrip()
	return left - trip - max(trip/2, time.Millisecond)
}

// attempt makes one attempt. If its outcome is unknown, the reaper releases the token. With a
// driver of Reach Process, the outcome is always known. If last is true, no attempt follows.
func (w *wait) attempt(ctx context.Context, last bool) (*hold, error) {
	c, ln, start := w.c, w.line, w.asked
	cl := w.claim()
	cl.WillRetry = !last

	// The call may last for Timeout, but not past the end of the wait, and in an outage only for
	// the rest of Timeout. It may always last as long as a healthy store may take to answer.
	bound := min(c.opts.Timeout, w.end.sub(start))
	c.mu.Lock()
	ln.unanswered = cmp.Or(ln.unanswered, c.clock.withoutSleep(start))
	bound = min(bound, c.opts.Timeout-ln.outageLocked(w.began))
	if c.queue.polls {
		cl.Waited = w.waitedLocked(start)
	}
	c.mu.Unlock()
	if bound < c.opts.Timeout {
		bound = max(bound, c.answerTime())
	}

	slept := c.clock.slept.Load()
	if c.traits.Reach != backend.Process {
		// Read the clock again, so that a suspend before the call does not shorten the term.
		start, slept = c.clock.read()
	}
	g, err := c.reaper.acquire(ctx, cl, bound)

	// Read the clock, because the machine may have slept during the call.
	now, _ := c.clock.read()
	if err == nil || backend.Definite(err) {
		c.noteTrip(c.clock.withoutSleep(now).sub(start - instant(slept)))
	}
	if err != nil {
		var held *backend.HeldError
		if c.store.waker != nil && cl.WillRetry && !cl.Shared && errors.As(err, &held) && held.Shared {
			left := cl // a pointer to cl itself would allocate cl for every attempt
			w.intent = &left
		}
		return nil, err
	}
	return newHold(c, cl, g, start, now, slept)
}

// claim returns the claim of a new attempt, whose token is 128 random bits.
func (w *wait) claim() backend.Claim {
	var b [16]byte
	var text [22]byte
	rand.Read(b[:])
	base64.RawURLEncoding.Encode(text[:], b[:])
	c, r, token := w.c, &w.r, string(text[:])
	if r.linger > 0 {
		token = c.recalls.mark(token)
	}

	ttl := r.ttl
	if 0 < r.maxHold && r.maxHold < ttl {
		// Ask for little more than the max hold, so that the key is free soon after it if the
		// holder dies.
		ttl = min(ttl, termFor(r.maxHold))
	}
	return backend.Claim{Key: c.opts.Prefix + r.key, Token: token, Owner: c.opts.Owner, TTL: ttl,
		Timeout: c.opts.Timeout, Fenced: r.fenced, Shared: r.shared, Renewed: !r.noRenew}
}

// waitedLocked returns how long the Client has waited for the key. It returns 0 if this is the
// caller's first attempt and the caller did not wait before it.
func (w *wait) waitedLocked(now instant) time.Duration {
	if w.tries > 1 || w.stood {
		return min(max(now.sub(max(w.line.pace.ended, w.start)), 1), longestWait)
	}
	return 0
}

// errNoneAround says that no lease around the caller holds the key.
var errNoneAround = errors.New("no lease around the caller holds the key")

// reenter finds the innermost lease around the caller that holds the key, or a slot of the key if
// the call has slots. It adds a lease to the hold of that lease. A lease is around the caller if
// the caller's context is derived from the lease's. Without such a lease, the error is
// errNoneAround.
func (w *wait) reenter(ctx context.Context) (*Lease, error) {
	r := &w.r
	for o := r.around; o != nil && !r.apart; o = o.around {
		if o.hold.c != w.c || o.key != r.name || (o.slot > 0) != (r.slots > 0) || o.Err() != nil {
			continue
		}
		if l, err := o.join(ctx, r); err != errNoneAround {
			return l, err
		}
	}
	return nil, errNoneAround
}

// join adds a lease to the hold of outer. If outer has just ended, the error is errNoneAround.
func (outer *Lease) join(ctx context.Context, r *request) (*Lease, error) {
	h := outer.hold
	c := h.c
	if h.claim.Shared && !r.shared {
		return nil, fmt.Errorf("%w: the outer lease of the key is shared, and cannot become exclusive; unlock it first", ErrInvalid)
	}
	if r.fenced && !h.claim.Fenced {
		return nil, fmt.Errorf("%w: the outer lease has no fence; pass WithFence to its Lock as well", ErrInvalid)
	}
	if err := checkLongest(c.traits, r.ttl); err != nil {
		// Refuse the term here. Otherwise the store would refuse renewals for it, and both leases
		// would be lost.
		return nil, err
	}

	c.mu.Lock()
	defer c.mu.Unlock()
	if outer.state.Load() != held {
		return nil, errNoneAround
	}

	now := c.clock.now()

	// If the hold is renewed, a renewal asks for the longer term immediately. Until the store has
	// answered, the shorter term counts.
	if r.ttl > h.claim.TTL {
		h.claim.TTL = r.ttl
		h.raised = now
		h.renewAt(now, now)
	}

	r.slot = outer.slot
	l := h.addLeaseLocked(ctx, r, now)
	l.reentry = true
	h.resumeRenewalLocked(now)
	c.renewer.scheduleLocked(h)
	return l, nil
}
