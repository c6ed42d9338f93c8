package hasp

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/calls"
	"github.com/hasplock/hasp/internal/clock"
	"github.com/hasplock/hasp/internal/line"
)

// This file contains Lock and TryLock: their arguments, the loop of attempts, and re-entry. wait.go
// contains the waits of a caller that is not the first in line, or that the store has refused.

// wait is one call of Lock or TryLock, from its arguments to a hold.
type wait struct {
	c     *Client
	r     request
	start clock.Instant // when Lock was called
	began clock.Instant // the time of Clock.Awake at the moment start, because a suspend is no part of an outage
	once  bool          // make only one attempt
	end   clock.Instant // when WithMaxWait ends the wait, or Never
	tries int           // calls to the store so far

	line       *line.Line // the line that counts this caller; nil before the caller joins, and after it got a hold or left
	queued     bool       // the driver's Wait was called
	stood      bool       // the caller has waited: in the line, for the end of a gap, or between two calls
	turn       turn       // the caller's entry in the line; ready is nil unless the caller waits there
	lastAnswer error      // why the caller does not have the key; nil if that is not known
	refused    bool       // the store has just refused this caller

	calls.Listening                // what Listen returned; zero while the caller does not listen
	listenAgain     clock.Instant  // when to call Listen again, after it has failed
	intent          *backend.Claim // the last claim that may keep out new shared callers, or nil

	part *wait // with slots, the wait for the queue, or for the slot that was tried last
}

// Lock waits until it holds key. Its errors are of type [*Error]. It returns ErrHeld if ctx or
// WithMaxWait ended the wait while another caller held the key. It returns ErrUnavailable if the
// store could not be reached for Options.Timeout, or until WithMaxWait ended the wait. It returns
// the context's error if ctx ended the wait before the store had answered. Its other errors are
// ErrClosed, ErrInvalid and errors.ErrUnsupported.
//
// The context bounds the wait and the hold: when it ends, the context of the lease ends as well,
// and the lease is renewed for at most one more term. The key stays locked until Unlock, or until
// the term ends. With [Do], the lease is renewed until the function returns.
//
// With a context derived from a lease's context, Lock re-enters: if that lease holds the same key
// on the same Client, Lock returns immediately with a lease on the same hold. Unlock the inner
// lease first, as defer does. If the outer lease is unlocked first, the inner lease's context ends,
// and the hold is renewed for at most one more term. A call with any other context waits for the
// key, even if its caller holds it.
func (c *Client) Lock(ctx context.Context, key string, opts ...Option) (*Lease, error) {
	return c.lock(ctx, "lock", key, opts)
}

// TryLock makes one attempt, bounded by ctx and Options.Timeout. If the store does not answer within
// a third of Timeout, TryLock repeats the attempt once. It returns ErrHeld if the key is held. If
// another caller of this Client holds the key or waits for it, TryLock usually returns without a
// call to the store. It ignores WithMaxWait.
func (c *Client) TryLock(ctx context.Context, key string, opts ...Option) (*Lease, error) {
	return c.lock(ctx, "trylock", key, opts)
}

// waitPool stores values of type wait for reuse. Nothing refers to one after its call has returned.
var waitPool = sync.Pool{New: func() any { return new(wait) }}

func (c *Client) lock(ctx context.Context, op, key string, opts []Option) (*Lease, error) {
	w := waitPool.Get().(*wait)
	defer func() {
		*w = wait{}
		waitPool.Put(w)
	}()

	w.c = c
	w.once = op == "trylock" // before the options, because Lead's option sets op
	w.r.op, w.r.name, w.r.key, w.r.ttl = op, key, key, c.opts.TTL
	w.r.apply(opts)
	return w.observed(ctx, w.acquire)
}

// observed makes a call of Lock, TryLock or Resume by the function take, and reports it to Observe.
// If code of the caller panics or ends the goroutine, nothing stays acquired.
func (w *wait) observed(ctx context.Context, take func(context.Context) (*Lease, error)) (l *Lease, err error) {
	c, r := w.c, &w.r
	if ctx == nil {
		r.err = errNilContext
		ctx = context.Background()
	}

	returns := false
	open := false // EventRequested was reported, but not the event that must follow it
	defer func() {
		if returns {
			return
		}
		w.abandon(l)
		if open {
			w.reportRefusal(ctx, newError(r.op, r.name, errNoReturn))
		}
	}()

	if c.opts.Observe != nil {
		r.id = lastEventID.Add(1)
		c.observer.call(ctx, Event{Kind: EventRequested, ID: r.id, Op: r.op, Key: r.name}) // before start is read, so that the time of Observe is no part of the wait
		open = true
	}
	start, slept := c.clock.Read()
	w.start, w.began, w.end = start, start-clock.Instant(slept), clock.Never
	l, err = take(ctx)
	open = false

	switch {
	case err != nil:
		err = newError(r.op, r.name, err)
		w.reportRefusal(ctx, err)
	case c.opts.Observe != nil:
		c.observer.acquired(ctx, l, time.Duration(l.since-start), w.tries)
	}
	if l != nil && l.keep != 0 && r.parent == nil {
		l.countMinHold()
	}
	returns = true
	return l, err
}

// reportRefusal reports EventRefused.
func (w *wait) reportRefusal(ctx context.Context, err error) {
	c := w.c
	if c.opts.Observe != nil {
		waited := time.Duration(c.clock.Now() - w.start)
		c.observer.call(ctx, Event{Kind: EventRefused, ID: w.r.id, Op: w.r.op, Key: w.r.name, Wait: waited, Tries: w.tries, Err: err})
	}
}

// acquire re-enters a lease around the caller, or takes the key or a slot of it.
func (w *wait) acquire(ctx context.Context) (*Lease, error) {
	if err := w.prepare(ctx); err != nil {
		return nil, err
	}
	if w.r.around != nil && !w.r.apart {
		if l, err := w.reenter(ctx); err != errNoneAround {
			return l, err
		}
	}
	if w.c.opts.Observe != nil && !w.once {
		defer w.reportLongWait(ctx).Stop()
	}

	if w.r.slots > 0 {
		return w.takeSlot(ctx)
	}
	return w.take(ctx)
}

// prepare returns an error if the arguments of a call are invalid. Otherwise it sets the fields of
// w that follow from the arguments.
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

	if r.shared || r.slots > 0 || w.c.traits.Reach == backend.Process {
		r.linger = false
	}

	// If ctx is the context of a lease, or is derived from one, the key may be re-entered.
	if x := leaseContextOf(ctx); x != nil {
		r.around, r.parent = x.lease, x.parent
		r.linger = r.linger && x.parent == nil
	}
	w.once = w.once || r.bounded && r.maxWait == 0
	if r.bounded && !w.once {
		w.end = w.start.Add(r.maxWait)
	}
	return nil
}

// take returns a lease that was handed over in the line, or one from the store.
func (w *wait) take(ctx context.Context) (*Lease, error) {
	c := w.c
	tk, freed := w.join(ctx)
	if tk.Do == line.MustWait {
		tk = w.waitInLine(ctx)
	}
	switch tk.Do {
	case line.HaveLease:
		return tk.Lease.(*Lease), nil
	case line.GiveUp:
		return nil, tk.Err
	}

	// This caller is the head now, and takes over the answer that the last head received. The line
	// counts the caller until its hold has ended, or until it gives up below.
	w.lastAnswer = tk.LastAnswer
	if freed != nil && (w.once || !c.traits.Ordered) { // otherwise the caller waits in the driver's queue, before later callers
		if over, err := w.awaitFreed(ctx, freed); over {
			c.mu.Lock()
			defer c.mu.Unlock()
			w.giveUpLocked()
			return nil, err
		}
	}
	if tk.After > 0 && (!w.once || w.r.op == "trylock" && w.r.parent != nil) { // a TryLock waits for a gap only if LockAll calls it
		if d := min(tk.After, w.untilLastCall(ctx)); d > 0 {
			w.stood = true
			w.sleep(ctx, d)
		}
	}
	h, err := w.askUntilHeld(ctx)

	c.mu.Lock()
	defer c.mu.Unlock()
	if err == nil && c.closing.Err() != nil {
		// Close began during the call, and did not find this hold.
		h.reapLocked(&reap{})
		err = ErrClosed
	}
	if err != nil {
		w.giveUpLocked()
		return nil, err
	}
	var waited time.Duration
	if w.stood {
		waited = w.line.Waited(h.Granted, w.start)
	}
	l := h.startLocked(ctx, &w.r, w.line, waited, w.tries > 1 || w.queued)
	w.line = nil // from here on the line counts the hold
	return l, nil
}

// turn is the entry of a wait in its line.
type turn struct {
	line.Turn
	r   *request
	ctx context.Context // Lock's context
}

// join adds the caller to the line of its key, or gives it a hold that lingers. If the caller cannot
// use that hold, the channel freed is closed after the release of that hold. Otherwise freed is nil.
func (w *wait) join(ctx context.Context) (tk line.Ticket, freed chan struct{}) {
	c, r := w.c, &w.r
	w.turn = turn{r: r, ctx: ctx}
	w.turn.Turn = line.Turn{Key: r.key, Shared: r.shared, Since: w.began, Caller: &w.turn}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closing.Err() != nil {
		return line.Ticket{Do: line.GiveUp, Err: ErrClosed}, nil
	}

	if held := c.queue.Hold(r.key); held != nil {
		if h := held.Engine.(*hold); h.lingers != 0 {
			if l := h.reuseLocked(ctx, r); l != nil {
				return line.Ticket{Do: line.HaveLease, Lease: l}, nil
			}
			freed = make(chan struct{})
			h.endLingerLocked(freed)
		}
	}
	w.line, tk = c.queue.Join(&w.turn.Turn, w.once)
	return tk, freed
}

// askUntilHeld asks the store until the caller has the key or the wait has ended. Between two
// attempts the caller waits in the driver, or sleeps until a wake-up or the next poll.
func (w *wait) askUntilHeld(ctx context.Context) (*hold, error) {
	mayWait := w.c.store.driver.Waits() && !w.once
	_, timed := ctx.Deadline()
	timed = timed || w.end != clock.Never // if the wait has no end, no call is the last one
	defer func() {
		if w.Wake != nil {
			w.stopListening()
		}
	}()
	for attempt := 1; ; attempt++ {
		if ctx.Err() != nil || w.c.closing.Err() != nil {
			return nil, w.endErr(ctx)
		}

		// Decide before the call whether it is the last one, so that its outcome cannot prolong the
		// wait.
		last := w.once || timed && w.untilLastCall(ctx) <= 0
		useWait := mayWait && w.shouldWait()
		start, slept := w.c.clock.Read() // before the call, because a term, and the time until Grant.Until, begin during the call
		sent := start - clock.Instant(slept)

		var h *hold
		var err error
		w.tries++
		w.stood = w.stood || w.tries > 1
		if useWait {
			w.queued = true
			h, err = w.waitInStore(ctx, start, slept)
		} else {
			h, err = w.attempt(ctx, start, slept, last)
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
			continue // wait in the driver instead of sleeping
		}
		if w.refused && w.listen(ctx) {
			continue // ask again, because the key may have been released before the Client listened
		}
		if !w.sleep(ctx, w.pause(ctx, attempt, err)) {
			return nil, w.endErr(ctx)
		}
	}
}

// untilLastCall returns how long the caller may still wait before it must make its last call, so
// that the answer arrives in time.
func (w *wait) untilLastCall(ctx context.Context) time.Duration {
	left := time.Duration(clock.Never)
	if w.end != clock.Never {
		left = time.Duration(w.end - w.c.clock.Now())
	}
	if d, ok := ctx.Deadline(); ok {
		left = min(left, time.Until(d))
	}

	// Allow one and a half round trips, because now and then an answer takes that long.
	trip := w.c.roundTrip()
	return left - trip - max(trip/2, time.Millisecond)
}

// attempt makes one attempt. The argument start is when it begins, and slept is how long the
// machine has slept at that time. If the outcome is unknown, reaper.acquire has the token released.
// With Reach Process it is always known. If the argument last is true, no attempt follows.
func (w *wait) attempt(ctx context.Context, start clock.Instant, slept int64, last bool) (*hold, error) {
	c, ln, sent := w.c, w.line, start-clock.Instant(slept)
	cl := w.claim()
	cl.WillRetry = !last

	// The call may take a third of Timeout, but not past the end of the wait: a call over a
	// connection that a firewall has forgotten gets no answer, and Lock retries for Timeout. During
	// an outage, subtract how long the outage has lasted. The bound is never below c.answerTime.
	bound := c.opts.Timeout / triesPerTimeout
	if w.once && w.tries > 1 {
		// A TryLock repeats its attempt only once. Count from its own start, because the outage of
		// the line may have ended meanwhile, for another caller.
		bound = c.opts.Timeout - time.Duration(sent-w.began)
	}
	bound = min(bound, time.Duration(w.end-start))
	c.mu.Lock()
	ln.Asked(sent)
	if ln.InOutage() {
		bound = min(bound, c.opts.Timeout-ln.Outage(w.began))
	}
	if c.queue.Polls && w.stood {
		cl.Waited = ln.Waited(start, w.start)
		cl.Contended = c.queue.Contended(w.r.key, start)
	}
	c.mu.Unlock()

	g, err := c.reaper.acquire(ctx, cl, max(bound, c.answerTime()))

	// Read the clock, because the machine may have slept during the call.
	now, sleptNow := c.clock.Read()
	if err == nil || backend.Definite(err) {
		c.noteTrip(time.Duration(now - clock.Instant(sleptNow) - sent))
	}
	if err != nil {
		var held *backend.HeldError
		if c.store.driver.Wakes() && cl.WillRetry && !cl.Shared && errors.As(err, &held) && held.Shared {
			left := cl // a pointer to cl itself would allocate cl for every attempt
			w.intent = &left
		}
		return nil, err
	}
	return newHold(&c.renewer, cl, g, start, now, slept)
}

// triesPerTimeout is how many attempts without an answer fit into Options.Timeout.
const triesPerTimeout = 3

// tokenLen is the length of a token: 128 random bits in URL-safe base64.
const tokenLen = 22

// claim returns the claim of a new attempt, with a new token.
func (w *wait) claim() backend.Claim {
	var b [16]byte
	var text [tokenLen]byte
	rand.Read(b[:])
	base64.RawURLEncoding.Encode(text[:], b[:])
	c, r, token := w.c, &w.r, string(text[:])

	ttl := r.ttl
	if 0 < r.maxHold && r.maxHold < ttl {
		// Ask for little more than the max hold, so that the key of a holder that died is free soon
		// after the max hold.
		ttl = min(ttl, termFor(r.maxHold))
	}
	return backend.Claim{Key: c.opts.Prefix + r.key, Token: token, Owner: c.opts.Owner, TTL: ttl,
		Timeout: c.opts.Timeout, Fenced: r.fenced, Shared: r.shared, Renewed: !r.noRenew}
}

// errNoneAround says that no lease around the caller holds the key.
var errNoneAround = errors.New("no lease around the caller holds the key")

// reenter finds the innermost lease around the caller that holds the key, or a slot of the key if
// the call has slots. It adds a lease to the hold of that lease. A lease is around the caller if
// the caller's context derives from the lease's. If there is no such lease, the error is
// errNoneAround.
func (w *wait) reenter(ctx context.Context) (*Lease, error) {
	r := &w.r
	for o := r.around; o != nil; o = o.around {
		if o.hold.renewer != &w.c.renewer || o.key != r.name || (o.slot > 0) != (r.slots > 0) || o.Err() != nil {
			continue
		}
		if l, err := o.join(ctx, r); err != errNoneAround {
			return l, err
		}
	}
	return nil, errNoneAround
}

// join adds a lease to the hold of outer. If that lease has just ended, join returns errNoneAround.
func (outer *Lease) join(ctx context.Context, r *request) (*Lease, error) {
	h := outer.hold
	c := h.renewer
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

	now := c.clock.Now()

	// If the hold is renewed, a renewal asks for the longer term immediately. Until the store has
	// answered, the shorter term counts.
	if r.ttl > h.claim.TTL {
		h.claim.TTL = r.ttl
		h.raised = now
		h.due, h.planned = now, now
	}

	r.slot = int(outer.slot)
	l := h.addLeaseLocked(ctx, r, now)
	l.reentry = true
	h.resumeRenewalLocked(now)
	c.scheduleLocked(h)
	return l, nil
}
