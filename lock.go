package hasp

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/hasplock/hasp/backend"
)

// wait is one call of Lock or TryLock, from its arguments to a hold.
type wait struct {
	c     *Client
	r     request
	start instant // when Lock was called
	once  bool    // make only one attempt
	end   instant // of WithMaxWait, or never
	tries int     // calls to the store so far

	line       *line
	stood      bool  // the caller has waited in the line
	turn       turn  // its place there
	lastAnswer error // why the caller does not have the key, as far as it knows
	refused    bool  // the store's last answer to this caller was ErrHeld

	// The place that the caller has in the driver's queue between two calls of the
	// driver's Wait, or nil.
	place *backend.Claim
}

// waitPool has waits for reuse. Nothing refers to a wait after its call has returned.
var waitPool = sync.Pool{New: func() any { return new(wait) }}

// lock implements Lock and TryLock.
func (c *Client) lock(ctx context.Context, op, key string, opts []Option) (*Lease, error) {
	w := waitPool.Get().(*wait)
	defer func() {
		*w = wait{}
		waitPool.Put(w)
	}()

	w.c, w.start, w.end = c, c.clock.now(), never
	l, err := w.take(ctx, op, key, opts)
	if err != nil {
		err = &Error{op, key, err}
		c.observe(Event{Kind: EventRefused, Key: key, Wait: c.clock.now().sub(w.start), Tries: w.tries, Err: err})
		return nil, err
	}
	if c.opts.Observe != nil {
		c.observeAcquired(l, Event{Kind: EventAcquired, Key: key, Fence: l.Fence(), Wait: l.since.sub(w.start), Tries: w.tries})
	}
	return l, nil
}

// take returns a lease: by re-entry, handed over in the line, or from the store.
func (w *wait) take(ctx context.Context, op, key string, opts []Option) (*Lease, error) {
	c, r := w.c, &w.r
	if err := c.request(r, op, key, opts); err != nil {
		return nil, err
	}
	if ctx.Err() != nil {
		return nil, withContextEnd(ctx, nil)
	}

	r.around, _ = ctx.Value(leaseKey).(*Lease)
	if outer := c.innermost(r.around, r.key); outer != nil {
		if l, err := c.reenter(ctx, r, outer); l != nil || err != nil {
			return l, err
		}
	}

	w.once = r.op == "trylock" || r.bounded && r.maxWait == 0
	if r.bounded && !w.once {
		w.end = w.start.add(r.maxWait)
	}

	if l, err := w.joinLine(ctx); l != nil || err != nil {
		return l, err
	}
	h, err := w.askUntilHeld(ctx)

	c.mu.Lock()
	defer c.mu.Unlock()
	if err == nil && c.closing.Err() != nil {
		// Close began during the call, and ended only the leases that it found.
		c.reapLocked(h.claim, reapOnce)
		err = ErrClosed
	}
	if err != nil {
		if c.lined {
			c.giveUpHeadLocked(w.line, w.place)
		}
		c.leaveLocked(w.line)
		return nil, err
	}
	w.line.pace.acquiredLocked(w.tries == 1)
	return c.startHoldLocked(ctx, r, w.line, h), nil
}

// joinLine joins the line of the key. If there is a head, joinLine waits behind it. It
// returns a lease if a hold was handed over, an error if the wait has ended, and
// nil, nil if the caller must ask the store.
func (w *wait) joinLine(ctx context.Context) (*Lease, error) {
	c := w.c
	c.mu.Lock()
	if c.closing.Err() != nil {
		c.mu.Unlock()
		return nil, ErrClosed
	}

	ln := c.enterLocked(w.r.key)
	w.line = ln
	switch {
	// An Ordered driver queues the callers itself, so all of them may ask. But a
	// TryLock need not ask the store if another caller of this Client has the key or
	// waits for it.
	case !c.lined && (!w.once || ln.callers == 1 || ln.lastAnswer != nil && !errors.Is(ln.lastAnswer, ErrHeld)), c.lined && !ln.hasHead:
		ln.hasHead = true
		c.mu.Unlock()
		return nil, nil
	case w.once:
		err := c.refusalLocked(ln)
		if err == nil {
			err = errHeldHere // another caller of this Client wants the key and came first
		}
		c.leaveLocked(ln)
		c.mu.Unlock()
		return nil, err
	}
	return w.waitInLineLocked(ctx)
}

// waitInLineLocked waits behind the head, and returns as joinLine does. It unlocks mu.
func (w *wait) waitInLineLocked(ctx context.Context) (*Lease, error) {
	c, ln := w.c, w.line
	w.stood = true
	w.turn = turn{r: &w.r, ctx: ctx, since: w.start, ready: make(chan ticket, 1)}
	t := &w.turn
	ln.waiting.push(t)
	c.mu.Unlock()

	var timeout <-chan time.Time
	if w.end != never {
		timer := time.NewTimer(w.end.sub(c.clock.now()))
		defer timer.Stop()
		timeout = timer.C
	}

	select {
	case tk := <-t.ready:
		return w.takeTicket(ctx, tk)
	case <-ctx.Done():
	case <-timeout:
	case <-c.closing.Done():
		w.quitLine(ctx)
		return nil, ErrClosed
	}

	refusal := w.quitLine(ctx)
	waited := c.clock.now().sub(w.start)
	if refusal == nil && waited < w.answerTime() {
		// The store had no time to answer. Only this is known: other callers of this
		// Client came first.
		refusal = errHeldHere
	}

	// Not under mu: ctx may be the context of a lease, which locks mu.
	if err := withContextEnd(ctx, refusal); err != nil {
		return nil, err
	}
	return nil, noAnswer(waited)
}

// quitLine gives up the caller's place in the line, and returns why the caller does
// not have the key.
func (w *wait) quitLine(ctx context.Context) (refusal error) {
	c, ln, t := w.c, w.line, &w.turn
	c.mu.Lock()
	refusal = c.refusalLocked(ln)
	var handed *Lease
	if ln.waiting.remove(t) {
		c.leaveLocked(ln)
	} else {
		// The caller got a ticket at the same moment. Its lease must be unlocked, or the
		// head must pass to the next caller.
		tk := <-t.ready
		handed = tk.lease
		if tk.lease == nil && tk.err == nil {
			c.promoteNextLocked(ln, tk.place)
		}
		if tk.lease == nil {
			c.leaveLocked(ln)
		}
	}
	c.mu.Unlock()

	if handed != nil {
		// Lock returns an error, so no event may name this lease.
		c.spawn(func() { handed.unlock(ctx) })
	}
	return refusal
}

// takeTicket takes the ticket that ended the caller's time in the line. It returns
// what waitInLineLocked returns.
func (w *wait) takeTicket(ctx context.Context, tk ticket) (*Lease, error) {
	if tk.err != nil {
		w.c.mu.Lock()
		w.c.leaveLocked(w.line)
		w.c.mu.Unlock()
		return nil, tk.err
	}

	if tk.lease == nil {
		w.lastAnswer = tk.lastAnswer
		w.refused = w.c.traits.Ordered && errors.Is(tk.lastAnswer, ErrHeld)
		w.place = tk.place
		if d := min(tk.after, w.left(ctx)-w.margin()); d > 0 {
			w.sleep(ctx, d)
		}
	}
	return tk.lease, nil
}

// askUntilHeld asks the store until the caller has the key or the wait is over.
func (w *wait) askUntilHeld(ctx context.Context) (*hold, error) {
	for attempt := 1; ; attempt++ {
		if ctx.Err() != nil || w.c.closing.Err() != nil {
			return nil, w.endErr(ctx)
		}

		last := w.once || w.lastCall(ctx)
		useWait := w.shouldWait()
		asked := w.start
		if attempt > 1 || w.stood {
			asked = w.c.clock.now()
		}

		var h *hold
		var err error
		w.tries++
		if useWait {
			h, err = w.await(ctx)
		} else {
			h, err = w.c.acquire(ctx, w.c.claim(&w.r, newToken()), w.beginAttempt(), asked)
		}
		if err == nil {
			return h, nil
		}

		if useWait {
			asked = w.c.outageOf(err) // Wait may have begun long before the outage
		}
		if over, why := w.over(ctx, err, asked, last); over {
			return nil, why
		}
		if !useWait && w.shouldWait() {
			continue // the driver's Wait is better than a sleep
		}
		if !w.sleep(ctx, w.pause(ctx, attempt, err)) {
			return nil, w.endErr(ctx)
		}
	}
}

// shouldWait reports whether to call the driver's Wait instead of Acquire. That needs a
// Waiter, and a reason to expect that Acquire would be refused. With a Waiter that is
// not Ordered, the only reason is that the store has just refused this caller. With an
// Ordered one there are two more: other callers of this Client want the key, or another
// Client held the key a moment ago.
func (w *wait) shouldWait() bool {
	if w.c.waiter == nil || w.once {
		return false
	}
	if w.refused || !w.c.traits.Ordered {
		return w.refused
	}
	if w.end != never && w.end.sub(w.c.clock.now()) < w.answerTime() {
		return false // there is time only for one attempt
	}

	w.c.mu.Lock()
	defer w.c.mu.Unlock()
	// After an outage an attempt comes first: a Wait would give no answer, and so not
	// end the outage, until it returns. The same holds for callers in line without an
	// answer, because the head's Wait would not bring one.
	if last := w.line.lastAnswer; !errors.Is(last, ErrHeld) && (last != nil || w.c.lined) {
		return false
	}
	return w.line.callers > 1 || w.c.contended.lately(w.line.key, w.c.clock.now())
}

// answerTime returns how long a healthy store may take to answer.
func (w *wait) answerTime() time.Duration {
	return min(max(4*w.c.roundTrip(), 50*time.Millisecond), w.c.opts.Timeout)
}

// beginAttempt records that an attempt begins, and returns how long it may take. That is
// the rest of Timeout in an outage, or the rest of the wait, but always long enough
// for a healthy store to answer.
func (w *wait) beginAttempt() time.Duration {
	c, ln := w.c, w.line
	if c.traits.Reach == backend.Process {
		return c.opts.Timeout // its calls do not block
	}

	now := c.clock.now()
	d := min(c.opts.Timeout, w.end.sub(now))

	c.mu.Lock()
	defer c.mu.Unlock()
	ln.asked, ln.asking = now, true
	if ln.outage {
		d = min(d, c.opts.Timeout-now.sub(max(ln.outageSince, w.start)))
	}
	return max(d, w.answerTime())
}

// await calls the driver's Wait for as long as this caller may wait. It uses the
// caller's place in the driver's queue, if it has one.
func (w *wait) await(ctx context.Context) (*hold, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(w.c.closing, cancel)()
	if w.end != never {
		var stop context.CancelFunc
		ctx, stop = context.WithDeadline(ctx, w.c.clock.time(w.end))
		defer stop()
	}

	cl := w.c.claim(&w.r, "")
	cl.Stays = w.c.traits.Ordered && w.c.lined
	if w.place != nil {
		cl.Token = w.place.Token
	} else {
		cl.Token = newToken()
	}

	h, err := w.c.await(ctx, cl)
	w.place = nil // the call has used it up, unless it says otherwise below
	if !errors.Is(err, ErrHeld) {
		return h, err
	}
	if isContextError(err) {
		// The place is being released. Report only that the key was held: ctx may
		// have ended by WithMaxWait and not by the caller's context.
		var held *backend.HeldError
		if errors.As(err, &held) {
			return nil, held
		}
		return nil, ErrHeld
	}
	if cl.Stays {
		place := cl // not cl itself, which would be allocated for every wait
		w.place = &place
	}
	return nil, err
}

// over records the outcome of a call that began at asked and returned err. It reports
// whether the wait is over, and with which error. Last says that the call was begun
// as the last one.
func (w *wait) over(ctx context.Context, err error, asked instant, last bool) (bool, error) {
	var outage time.Duration // how long this caller has waited during the outage
	switch {
	case errors.Is(err, ErrHeld):
		w.lastAnswer, w.refused = err, true
		w.noteAnswer(err, asked)
		w.noteContended()
	case definite(err), errors.Is(err, ErrClosed):
		return true, err
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		// This wait has ended before the store answered.
		if w.unanswered(asked) {
			w.lastAnswer = nil
		}
	default:
		outage = w.noteAnswer(err, asked)
		if !last || !errors.Is(w.lastAnswer, ErrHeld) {
			w.lastAnswer, w.refused = err, false
		}
	}

	switch {
	case ctx.Err() != nil, w.c.closing.Err() != nil:
		return true, w.endErr(ctx)
	case w.once, outage >= w.c.opts.Timeout:
		return true, err
	case last && w.lastCall(ctx), w.c.clock.now() >= w.end:
		w.awaitEnd(ctx)
		return true, w.endErr(ctx)
	}
	return false, nil
}

// awaitEnd waits until ctx has ended, if its deadline is what leaves no time for
// another call. Then the error can say so.
func (w *wait) awaitEnd(ctx context.Context) {
	d, ok := ctx.Deadline()
	if !ok || !w.c.clock.time(w.end).After(d) {
		return
	}

	timer := time.NewTimer(time.Until(d) + grace)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	case <-w.c.closing.Done():
	}
}

// noteAnswer records for the line the outcome of a call that began at asked: ErrHeld,
// or an outage. It returns how long the outage has lasted while this caller waited.
func (w *wait) noteAnswer(err error, asked instant) time.Duration {
	c, ln := w.c, w.line
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.clock.now()
	ln.lastAnswer, ln.silent, ln.asking = err, false, false
	if errors.Is(err, ErrHeld) {
		ln.outage = false
		return 0
	}

	if !ln.outage {
		ln.outage, ln.outageSince = true, asked
	}
	return now.sub(max(ln.outageSince, w.start))
}

// unanswered records for the line that a call ended with its caller's context,
// without an answer. The call began at asked. unanswered reports whether the store
// has not answered the line for a third of Timeout. Then its last answer is too old
// to report.
func (w *wait) unanswered(asked instant) bool {
	c, ln := w.c, w.line
	c.mu.Lock()
	defer c.mu.Unlock()
	ln.asking = false
	if !ln.silent {
		ln.silent, ln.silence = true, asked
	}
	if c.clock.now().sub(ln.silence) < c.opts.Timeout/3 {
		return false
	}
	if errors.Is(ln.lastAnswer, ErrHeld) {
		ln.lastAnswer = nil
	}
	return true
}

// outageOf returns when the outage began that a Waiter reports with err: err.Since(),
// or now if err has no such method.
func (c *Client) outageOf(err error) instant {
	now := c.clock.now()
	var dated interface{ Since() time.Time }
	if !errors.As(err, &dated) {
		return now
	}
	return min(c.clock.at(dated.Since(), c.clock.slept.Load()), now)
}

// noteContended records that another Client holds the key.
func (w *wait) noteContended() {
	if !w.c.traits.Ordered {
		return
	}
	w.c.mu.Lock()
	defer w.c.mu.Unlock()
	w.c.contended.note(w.line.key, w.c.clock.now())
}

// contended has the keys that an Ordered driver has refused lately, and when it first
// refused each. A caller that wants one of them joins the driver's queue at once. An
// attempt before that would cost a round trip and a place in the queue.
type contended map[string]instant

const (
	contendedFor = time.Second
	maxContended = 256 // keys; one that is forgotten costs a round trip
)

func (k *contended) note(key string, now instant) {
	if *k == nil || len(*k) >= maxContended {
		*k = contended{}
	}
	if !k.lately(key, now) {
		(*k)[key] = now
	}
}

func (k *contended) lately(key string, now instant) bool {
	at, ok := (*k)[key]
	if ok && now.sub(at) >= contendedFor {
		delete(*k, key)
		ok = false
	}
	return ok
}

// endErr returns the error of a wait that ended by ctx, by its end, or by Close.
func (w *wait) endErr(ctx context.Context) error {
	if w.c.closing.Err() != nil {
		return ErrClosed
	}
	if w.lastAnswer == nil {
		w.lastAnswer = w.heldHere()
	}
	if err := withContextEnd(ctx, w.lastAnswer); err != nil {
		return err
	}
	return noAnswer(w.c.clock.now().sub(w.start))
}

// heldHere returns a HeldError if this Client itself holds the key, which needs no
// answer of the store. Otherwise it returns nil.
func (w *wait) heldHere() error {
	w.c.mu.Lock()
	defer w.c.mu.Unlock()
	if w.line.hold == nil {
		return nil
	}
	return w.c.refusalLocked(w.line)
}

// withContextEnd returns err joined with ctx's error and cause, if ctx has ended.
func withContextEnd(ctx context.Context, err error) error {
	end := ctx.Err() // before Cause: a lease's context reads the clock here
	cause := context.Cause(ctx)
	if end == nil {
		d, ok := ctx.Deadline()
		if !ok || time.Now().Before(d) {
			return err
		}
		end = context.DeadlineExceeded // the deadline has passed, and ctx's timer is late
		cause = end
	}

	if cause != end && !errors.Is(cause, end) {
		cause = &waitError{end, cause}
	}
	if err == nil {
		return cause
	}
	return &waitError{err, cause}
}

// lastCall reports whether a call that begins now is the last one.
func (w *wait) lastCall(ctx context.Context) bool {
	return w.left(ctx) <= w.margin()
}

// margin returns how long before the end of the wait the last call begins, so that
// its answer arrives in time.
func (w *wait) margin() time.Duration {
	trip := w.c.roundTrip()
	return trip + max(trip/2, time.Millisecond)
}

// left returns how long the caller may still wait.
func (w *wait) left(ctx context.Context) time.Duration {
	left := time.Duration(never)
	if w.end != never {
		left = w.end.sub(w.c.clock.now())
	}
	if d, ok := ctx.Deadline(); ok {
		left = min(left, time.Until(d))
	}
	return left
}

// pause returns how long to sleep before the next attempt. Options.Backoff decides, or
// the pace of the line. But the sleep ends with the holder's term, and in time for a
// last attempt before the wait ends.
func (w *wait) pause(ctx context.Context, attempt int, err error) time.Duration {
	c := w.c
	var held backend.HeldError
	if he := (*backend.HeldError)(nil); errors.As(err, &he) {
		held = *he
	}

	var d time.Duration
	if c.opts.Backoff != nil {
		d = jitter(max(c.opts.Backoff(attempt), minSleep))
	}
	switch {
	case !errors.Is(err, ErrHeld):
		// An outage. Calls that fail at once must not keep a processor busy.
		d = max(d, jitter(min(5*time.Millisecond<<min(attempt, 6), c.opts.Timeout/8)))
	case c.opts.Backoff == nil:
		c.mu.Lock()
		d = w.line.pace.refusedLocked(c.clock.now(), &held, c.roundTrip())
		c.mu.Unlock()
	}
	if held.RetryAfter > 0 {
		d = min(d, held.RetryAfter+minSleep)
	}
	return min(d, max(w.left(ctx)-w.margin(), 0))
}

// sleep returns true after d, or false as soon as the wait is over.
func (w *wait) sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
	case <-w.c.closing.Done():
	}
	return false
}
