package hasp

import (
	"cmp"
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/calls"
	"github.com/hasplock/hasp/internal/clock"
	"github.com/hasplock/hasp/internal/line"
)

// wait is one call of Lock or TryLock, from its arguments to a hold.
type wait struct {
	c     *Client
	r     request
	start clock.Instant // when Lock was called
	began clock.Instant // the same by Clock.Awake, because a suspend is no part of an outage
	once  bool          // make only one attempt
	end   clock.Instant // when WithMaxWait ends the wait, or Never
	tries int           // calls to the store so far

	turn   turn       // the caller's entry in the line; Ready is nil unless the caller waits there
	line   *line.Line // the line that counts this caller, or nil
	queued bool       // the driver's Wait was called
	stood  bool       // the caller has waited: in the line, for a gap, or between two calls

	lastAnswer error // why the caller does not have the key; nil if that is not known
	refused    bool  // the store has just refused this caller

	calls.Listening                // what Listen returned; zero while the caller does not listen
	listenAgain     clock.Instant  // when to call Listen again, after it has failed
	intent          *backend.Claim // the last claim that may keep out new shared callers, or nil

	part *wait // with slots, the wait for the queue, or for the slot that was tried last
}

// observed makes a call of Lock, TryLock or Resume by the function take, and reports it to Observe.
// If code of the caller panics or ends the goroutine, nothing stays acquired.
func (w *wait) observed(ctx context.Context, take func(context.Context) (*Lease, error)) (
	l *Lease, err error) {
	c := w.c
	r := &w.r
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

		// Report it before start is read, so that the time of Observe is no part of the wait.
		c.observer.call(ctx, w.event(EventRequested))
		open = true
	}
	start, slept := c.clock.Read()
	w.start = start
	w.began = start - clock.Instant(slept)
	w.end = clock.Never

	l, err = take(ctx)
	open = false // from here on the event that must follow is reported below

	switch {
	case err != nil:
		err = newError(r.op, r.name, err)
		w.reportRefusal(ctx, err)
	case c.opts.Observe != nil:
		c.observer.acquired(ctx, l, time.Duration(l.since-start), w.tries)
	}
	if l != nil && l.keep != 0 && r.parent == nil { // LockAll, which has set parent, does it itself
		l.countMinHold()
	}
	returns = true
	return l, err
}

// event returns an event of the call, with the fields that all events of the call have.
func (w *wait) event(kind EventKind) Event {
	return Event{Kind: kind, ID: w.r.id, Op: w.r.op, Key: w.r.name}
}

// reportRefusal reports EventRefused.
func (w *wait) reportRefusal(ctx context.Context, err error) {
	c := w.c
	if c.opts.Observe == nil {
		return
	}
	e := w.event(EventRefused)
	e.Wait = time.Duration(c.clock.Now() - w.start)
	e.Tries = w.tries
	e.Err = err
	c.observer.call(ctx, e)
}

// reportLongWait has EventStillWaiting reported when the wait has lasted for ten terms, or for a
// minute if that is shorter. The caller stops the timer at the end of the wait.
func (w *wait) reportLongWait(ctx context.Context) *time.Timer {
	// The timer's function uses no field of w, because w is used again after the wait.
	c := w.c
	start := w.start
	key := w.r.key
	e := w.event(EventStillWaiting)

	return time.AfterFunc(min(overdueTerms*w.r.ttl, time.Minute), func() {
		c.spawn(func() {
			e.Err = c.heldBy(ctx, key)
			e.Wait = time.Duration(c.clock.Now() - start)
			c.mu.Lock()
			defer c.mu.Unlock()
			c.observer.queueEventLocked(ctx, e)
		})
	})
}

// acquire re-enters a lease around the caller, or takes the key or a slot of it.
func (w *wait) acquire(ctx context.Context) (*Lease, error) {
	if err := w.prepare(ctx); err != nil {
		return nil, err
	}
	if w.r.around != nil && !w.r.apart {
		if l, err := w.c.reenter(ctx, &w.r); err != errNoneAround {
			return l, err
		}
	}
	if w.c.opts.Observe != nil && !w.once {
		defer w.reportLongWait(ctx).Stop()
	}

	if w.r.slots > 0 {
		s := &slotSearch{w: w, n: w.r.slots, freed: make(chan int, 1)}
		return s.take(ctx)
	}
	return w.take(ctx)
}

// prepare returns an error if the arguments of a call are invalid. Otherwise it sets the fields of
// w that follow from the arguments.
func (w *wait) prepare(ctx context.Context) error {
	r := &w.r
	if err := r.check(w.c.traits); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return withContextEnd(ctx, nil)
	}

	// WithLinger documents the calls on which it has no effect.
	if r.shared || r.slots > 0 || w.c.traits.Reach == backend.Process {
		r.linger = false
	}

	// If ctx is the context of a lease, or is derived from one, the key may be re-entered. If
	// LockAll waits with ctx, parent is not nil.
	if x := leaseContextOf(ctx); x != nil {
		r.around = x.lease
		r.parent = x.parent
		r.linger = r.linger && x.parent == nil
	}

	w.once = w.once || r.bounded && r.maxWait == 0 // WithMaxWait(0) means one attempt
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

	// Wait until the store has released the hold that lingered. Otherwise it would refuse this
	// caller. But if the driver is Ordered, only a TryLock waits here. A Lock joins the driver's
	// queue now, so that it comes before later callers, and waits there.
	if freed != nil && (w.once || !c.traits.Ordered) {
		if over, err := w.awaitFreed(ctx, freed); over {
			c.mu.Lock()
			defer c.mu.Unlock()
			w.giveUpLocked()
			return nil, err
		}
	}

	// Wait for the end of a gap. A call that makes one attempt does not wait, unless LockAll makes
	// it, because LockAll may wait.
	byLockAll := w.r.op == "trylock" && w.r.parent != nil
	if tk.After > 0 && (!w.once || byLockAll) {
		if d := min(tk.After, w.untilLastCall(ctx)); d > 0 {
			w.stood = true
			w.sleep(ctx, d)
		}
	}
	h, err := w.askUntilHeld(ctx)
	return w.startLease(ctx, h, err)
}

// startLease ends a call that has asked the store, and got the hold h or the error err. It returns
// the first lease of h, or the error of the call.
func (w *wait) startLease(ctx context.Context, h *hold, err error) (*Lease, error) {
	c := w.c
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

// join adds the caller to the line of its key, or gives it a hold that lingers. The ticket says
// what the caller must do. If the caller cannot use the hold that lingers, join ends that hold, and
// the channel freed is closed after its release. Otherwise freed is nil.
func (w *wait) join(ctx context.Context) (tk line.Ticket, freed chan struct{}) {
	c := w.c
	r := &w.r
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

// takePart takes the key of the request r, as a part of the wait w. The part must end at the time
// end. If once is true, it makes only one attempt.
func (w *wait) takePart(ctx context.Context, r request, end clock.Instant,
	once bool) (*Lease, error) {
	start, slept := w.c.clock.Read()
	p := &wait{
		c:     w.c,
		r:     r,
		start: start,
		began: start - clock.Instant(slept),
		end:   end,
		once:  once,
	}
	w.part = p

	l, err := p.take(ctx)
	w.tries += p.tries
	return l, err
}

// waitInLine waits behind the head, and returns the ticket that ends that wait.
func (w *wait) waitInLine(ctx context.Context) line.Ticket {
	c := w.c
	w.stood = true
	var timeout <-chan time.Time // nil without WithMaxWait
	if w.end != clock.Never {
		timer := time.NewTimer(time.Duration(w.end - c.clock.Now()))
		defer timer.Stop()
		timeout = timer.C
	}

	select {
	case tk := <-w.turn.Ready:
		w.turn.Ready = nil
		if tk.Do != line.MayAsk {
			w.line = nil // the line does not count this caller any more, but perhaps its hold
		}
		return tk
	case <-ctx.Done():
	case <-timeout:
	case <-c.closing.Done():
		w.quitLine(ctx)
		return line.Ticket{Do: line.GiveUp, Err: ErrClosed}
	}

	refusal := w.quitLine(ctx)
	waited := time.Duration(c.clock.Now() - w.start)
	if refusal == nil && waited < c.answerTime() {
		// The store had no time to answer the head, so this is no outage. Report that other callers
		// of this Client came first.
		refusal = line.ErrHeldHere
	}

	// Do not hold mu here, because ctx may be the context of a lease, whose methods lock mu.
	err := cmp.Or(withContextEnd(ctx, refusal), calls.NoAnswer(waited))
	return line.Ticket{Do: line.GiveUp, Err: err}
}

// quitLine takes the waiting caller out of the line, and returns why it does not have the key.
func (w *wait) quitLine(ctx context.Context) (refusal error) {
	w.c.mu.Lock()
	refusal = w.line.Refusal()
	lease := w.line.Quit(&w.turn.Turn)
	w.line = nil
	w.c.mu.Unlock()

	// A hold may have been handed over at the same moment. Unlock its lease without an event,
	// because Lock returns an error and no lease.
	if handed, ok := lease.(*Lease); ok {
		w.c.spawn(func() { handed.unlock(ctx) })
	}
	return refusal
}

// awaitFreed waits, as the head, for the release of a hold that lingered and that the caller cannot
// use. It returns true and an error if the caller's wait ends before the release. If the release
// takes longer than Timeout, that is an outage.
func (w *wait) awaitFreed(ctx context.Context, freed <-chan struct{}) (over bool, err error) {
	c := w.c
	sent := c.clock.Awake()
	timer := time.NewTimer(min(time.Duration(w.end-c.clock.Now()), c.opts.Timeout))
	defer timer.Stop()

	// If the wait ends before the release, treat that as a call that its context has ended.
	w.lastAnswer = line.ErrHeldHere
	err = context.Canceled

	select {
	case <-freed:
		return false, nil
	case <-ctx.Done():
	case <-c.closing.Done():
	case <-timer.C:
		if c.clock.Now() < w.end { // Timeout has passed, and not WithMaxWait
			err = calls.NoAnswer(c.opts.Timeout)
		}
	}
	return w.over(ctx, err, sent, false)
}

// giveUpLocked leaves the line after the caller has asked the store and has got no hold.
func (w *wait) giveUpLocked() {
	if w.intent != nil {
		// Release the claim, because the driver would keep out new shared callers for its sake.
		w.c.reaper.addLocked(&reap{claim: *w.intent, times: reapOnce}, w.intent.TTL)
	}
	w.line.LeaveWithoutHold()
	w.line = nil
}

// abandon gives up what the call has acquired. The method observed calls it if Options.Observe,
// Options.Backoff or a method of the context has panicked or has ended the goroutine. The argument
// l is the lease that Lock would have returned, or nil.
func (w *wait) abandon(l *Lease) {
	if l != nil {
		// Report no further event. If the release fails, the Client repeats it.
		_, _ = l.unlock(context.Background())
	}
	if w.part != nil {
		w.part.abandon(nil)
	}

	switch {
	case w.line == nil: // the caller is not in a line
	case w.turn.Ready != nil: // it waits in the line
		w.quitLine(context.Background())
	default: // it asks the store
		w.c.mu.Lock()
		defer w.c.mu.Unlock()
		w.giveUpLocked()
	}
}

// askUntilHeld asks the store until the caller has the key or the wait has ended. Between two
// attempts the caller waits in the driver, or sleeps until a wake-up or the next poll.
func (w *wait) askUntilHeld(ctx context.Context) (*hold, error) {
	mayWait := w.c.store.driver.Waits() && !w.once
	_, hasEnd := ctx.Deadline()
	hasEnd = hasEnd || w.end != clock.Never
	defer func() {
		if w.Wake != nil {
			w.stopListening()
		}
	}()

	for attempt := 1; ; attempt++ {
		w.yield(ctx)
		if ctx.Err() != nil || w.c.closing.Err() != nil {
			return nil, w.endErr(ctx)
		}

		// Decide before the call whether it is the last one, so that its outcome cannot prolong the
		// wait. If the wait has no end, no call is the last one.
		last := w.once || hasEnd && w.untilLastCall(ctx) <= 0
		useWait := mayWait && w.shouldWait()

		// Read the clock before the call, because the granted term begins during the call.
		start, slept := w.c.clock.Read()
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
			sent = w.outageOf(err, sent) // Wait may have begun long before the outage
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
		w.sleep(ctx, w.pause(ctx, attempt, err))
	}
}

// yield leaves a mixed key to other programs for a moment: see line.Line.Yields. A call that makes
// only one attempt makes it immediately.
func (w *wait) yield(ctx context.Context) {
	w.c.mu.Lock()
	d := w.line.Yields()
	w.c.mu.Unlock()

	d = min(d, w.untilLastCall(ctx))
	if d > 0 && !w.once {
		w.stood = true
		rest(ctx, w.c.closing.Done(), d)
	}
}

// shouldWait reports whether to call the Wait of a Waiter instead of Acquire. It returns true if
// the store has just refused this caller, so Acquire would probably be refused. With an Ordered
// Waiter, it also does if other callers of this Client want the key, or the key was refused lately.
// Otherwise callers of other Clients could join the driver's queue during an attempt.
func (w *wait) shouldWait() bool {
	if w.refused {
		return true
	}
	if !w.c.traits.Ordered {
		return false
	}
	if w.end != clock.Never && time.Duration(w.end-w.c.clock.Now()) < w.c.answerTime() {
		return false // there is time for one attempt only
	}

	w.c.mu.Lock()
	defer w.c.mu.Unlock()

	// In an outage make an attempt, whose answer ends the outage. A Wait may return much later.
	if w.line.InOutage() {
		return false
	}
	return w.line.Crowded() || w.c.queue.Contended(w.r.key, w.c.clock.Now())
}

// untilLastCall returns how long the caller may still wait before it must make its last call, so
// that the answer arrives before the wait ends. The result is not positive if that time has passed.
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
// machine has slept at that time. If the argument last is true, no attempt follows. If the outcome
// is unknown, reaper.acquire has the token released.
func (w *wait) attempt(ctx context.Context, start clock.Instant, slept int64, last bool) (
	*hold, error) {
	c := w.c
	sent := start - clock.Instant(slept)
	cl := w.r.claim(&c.opts, newToken())
	cl.WillRetry = !last

	// The call may take only a third of Timeout, so that others can follow within Timeout: a call
	// over a connection that a firewall has forgotten gets no answer. It may not take longer than
	// the wait, nor than the rest of Timeout during an outage. But it may always take answerTime.
	bound := c.opts.Timeout / triesPerTimeout
	if w.once && w.tries > 1 {
		// The repeated attempt of a TryLock is its last one, so it may take the rest of Timeout.
		// Count from the start of the TryLock, because the outage of the line may have ended
		// meanwhile, for another caller.
		bound = c.opts.Timeout - time.Duration(sent-w.began)
	}
	bound = min(bound, time.Duration(w.end-start))

	c.mu.Lock()
	w.line.Asked(sent)
	if w.line.InOutage() {
		bound = min(bound, c.opts.Timeout-w.line.Outage(w.began))
	}
	if c.queue.Polls && w.stood { // the drivers that poll use these two fields
		cl.Waited = w.line.Waited(start, w.start)
		cl.Contended = c.queue.Contended(w.r.key, start)
	}
	c.mu.Unlock()

	g, err := c.reaper.acquire(ctx, cl, max(bound, c.answerTime()))

	// Read the clock, because the machine may have slept during the call. Do not count that as a
	// part of the round trip.
	now, sleptNow := c.clock.Read()
	if err == nil || backend.Definite(err) {
		c.noteTrip(time.Duration(now - clock.Instant(sleptNow) - sent))
	}
	if err != nil {
		// If shared holds have refused an exclusive claim that will be repeated, a Waker keeps out
		// new shared callers for its sake, until giveUpLocked releases the claim.
		mayIntend := c.store.driver.Wakes() && cl.WillRetry && !cl.Shared
		var held *backend.HeldError
		if mayIntend && errors.As(err, &held) && held.Shared {
			intent := cl // a pointer to cl itself would allocate cl for every attempt
			w.intent = &intent
		}
		return nil, err
	}
	return newHold(&c.renewer, cl, g, start, now, slept)
}

// triesPerTimeout is how many attempts without an answer fit into Options.Timeout.
const triesPerTimeout = 3

// waitInStore calls the driver's Wait, until it returns or the caller's wait ends. If the outcome
// is unknown, the reaper releases the token.
func (w *wait) waitInStore(ctx context.Context, start clock.Instant, slept int64) (*hold, error) {
	c := w.c
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(c.closing, cancel)()
	if w.end != clock.Never {
		var stop context.CancelFunc
		ctx, stop = context.WithDeadline(ctx, c.clock.Time(w.end))
		defer stop()
	}

	cl := w.r.claim(&c.opts, newToken())
	f, late := c.reaper.guard(cl, c.store.driver.Wait)
	g, err := calls.Run(&c.store.caller, ctx, 0, nil, nil, f, late)

	switch {
	case err == nil:
		now, _ := c.clock.Read()
		return newHold(&c.renewer, cl, g, start, now, slept)
	case ctx.Err() == nil: // the wait goes on, so err is not about its end
		err = calls.PlainDated(err, cl.Timeout)
	case errors.Is(err, ErrHeld) && calls.IsContextError(err):
		// The end of ctx has ended the wait for a key that was held. Report only that it was held,
		// because ctx here may have ended by WithMaxWait or Close. The method over adds the error
		// of the caller's context, if that has ended. The reaper or the driver releases the place
		// in the queue.
		var held *backend.HeldError
		if errors.As(err, &held) {
			return nil, held
		}
		err = ErrHeld
	}
	return nil, err
}

// over records the outcome err of a call. It reports whether the wait has ended, and with which
// error. The argument sent is the time of Clock.Awake at which the call began, or for a driver's
// Wait, the result of outageOf. If last is true, the call was meant to be the last one.
func (w *wait) over(ctx context.Context, err error, sent clock.Instant, last bool) (bool, error) {
	outage, final := w.note(err, sent, last)
	took := time.Duration(w.c.clock.Awake() - sent)

	// Check ctx before the outage, because if ctx has ended, the error must say so. endErr joins
	// that end and the last answer.
	switch {
	case final:
		return true, err
	case ctx.Err() != nil, w.c.closing.Err() != nil:
		return true, w.endErr(ctx)
	case outage >= w.c.opts.Timeout:
		return true, err
	case w.once && !w.repeats(took):
		return true, err
	case last && w.untilLastCall(ctx) <= 0, w.c.clock.Now() >= w.end:
		// There is no time for another call. If the deadline of ctx ends the wait, and not
		// WithMaxWait, wait until the deadline, so that the error reports it. Allow for Grace,
		// because the timer of ctx may be late.
		if d, ok := ctx.Deadline(); ok && w.c.clock.Time(w.end).After(d) {
			rest(ctx, w.c.closing.Done(), time.Until(d)+calls.Grace)
		}
		return true, w.endErr(ctx)
	}
	return false, nil
}

// repeats reports whether a call that makes only one attempt repeats it. The attempt took the time
// took. The call repeats it if that was a third of Timeout or more, so probably nothing answered,
// and if another attempt fits into Timeout, with an eighth of Timeout in reserve.
func (w *wait) repeats(took time.Duration) bool {
	c := w.c
	elapsed := time.Duration(c.clock.Awake() - w.began)
	return took >= c.opts.Timeout/triesPerTimeout && elapsed+c.answerTime() <= c.opts.Timeout*7/8
}

// note records the outcome of a call, for the line and for this caller. It returns how long the
// caller has waited during an outage, and whether err is final:
//
//	ErrHeld                    the store answers: there is no outage
//	another definite error     it is final, and so is ErrClosed
//	the end of the context     there was no answer, which may become an outage
//	any other                  an outage; if last is true, w.lastAnswer keeps an earlier ErrHeld
func (w *wait) note(err error, sent clock.Instant, last bool) (outage time.Duration, final bool) {
	c := w.c
	ln := w.line
	held := errors.Is(err, ErrHeld)
	if !held && (backend.Definite(err) || errors.Is(err, ErrClosed)) {
		return 0, true
	}

	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case held:
		ln.Answered(err, sent)
		w.lastAnswer = err
		w.refused = true
	case calls.IsContextError(err):
		ln.Unanswered(sent)
		if ln.Stale(w.lastAnswer) {
			w.lastAnswer = nil
		}
	default:
		// The last call may be cut short, so an earlier ErrHeld says more than its error.
		ln.Answered(err, sent)
		if !last || !errors.Is(w.lastAnswer, ErrHeld) {
			w.lastAnswer = err
			w.refused = false
		}
		outage = ln.Outage(w.began)
	}
	return outage, false
}

// outageOf returns the time of Clock.Awake at which the outage began that a Waiter has reported
// with err. The result is
//   - the Since of a [backend.UnavailableError], if err has one;
//   - the value began, if err is only the context's error, because Wait had no answer since then;
//   - otherwise the present time.
func (w *wait) outageOf(err error, began clock.Instant) clock.Instant {
	c := w.c
	now := c.clock.Awake()
	var dated *backend.UnavailableError
	switch {
	case errors.As(err, &dated) && !dated.Since.IsZero():
		return min(c.clock.At(dated.Since, 0), now) // with 0, At returns a time of Clock.Awake
	case calls.IsContextError(err):
		return began
	}
	return now
}

// endErr returns the error of a wait that was ended by ctx, by WithMaxWait, or by Close. It joins
// the last answer of the store and the end of ctx. If there is neither, the error is an outage.
func (w *wait) endErr(ctx context.Context) error {
	if w.c.closing.Err() != nil {
		return ErrClosed
	}
	if w.lastAnswer == nil {
		// If this Client itself holds the key, the store need not have answered.
		w.c.mu.Lock()
		if w.line.Held() {
			w.lastAnswer = w.line.Refusal()
		}
		w.c.mu.Unlock()
	}

	if err := withContextEnd(ctx, w.lastAnswer); err != nil {
		return err
	}
	return calls.NoAnswer(time.Duration(w.c.clock.Now() - w.start))
}

// pause returns how long to sleep after an attempt that failed with err. If the key is held,
// Options.Backoff decides, or the pace of the line if there is no Backoff. A listening caller polls
// seldom, because the Waker wakes it. In an outage the number of attempts decides, and Backoff may
// make the sleep longer. The sleep ends when the holder's term ends, and leaves time for a last
// attempt before the wait ends.
func (w *wait) pause(ctx context.Context, attempt int, err error) time.Duration {
	c := w.c
	outage := !errors.Is(err, ErrHeld)
	var held backend.HeldError // zero if err says nothing of the hold
	var refusal *backend.HeldError
	if errors.As(err, &refusal) {
		held = *refusal
	}

	// A foreign program wakes nobody, so a caller that waits for it polls although it listens.
	var d time.Duration
	listens := w.Wake != nil && !held.Foreign
	asksBackoff := outage || !listens
	if c.opts.Backoff != nil && !w.once && asksBackoff {
		d = line.Jitter(max(c.opts.Backoff(attempt), line.MinSleep))
	}
	switch {
	case outage:
		// In an outage, no sleep is below the duration shortest, so that calls that fail
		// immediately do not keep a processor busy. Shorten a long Backoff to the time that is left
		// for retries.
		shortest := line.Jitter(min(5*time.Millisecond<<min(attempt, 6), c.opts.Timeout/8))
		c.mu.Lock()
		left := c.opts.Timeout - w.line.Outage(w.began)
		c.mu.Unlock()
		d = max(min(d, left), shortest)
	case listens:
		// At random, so that callers that began together do not always ask together.
		d = listenPoll - rand.N(listenPoll/8)
	case c.opts.Backoff == nil: // otherwise d is the result of Backoff
		c.mu.Lock()
		d = w.line.Refused(w.start, &held)
		c.mu.Unlock()
	}

	// Beside shared holds, ask again soon, because each attempt of an exclusive caller keeps out
	// new shared callers only for a while. If the driver is a Waker, it keeps them out for longer.
	if held.Shared && !w.r.shared && !listens {
		d = min(d, backend.SharedRetryEvery)
	}

	// Ask when the holder's term ends, because the key is free then if the holder has died.
	if held.RetryAfter > 0 {
		d = min(d, held.RetryAfter+line.MinSleep)
	}
	return min(d, max(w.untilLastCall(ctx), 0))
}

// listenPoll is the longest time between two polls of a caller that a Waker wakes, and the time
// from a failure of Listen to the next Listen.
const listenPoll = time.Second

// listen calls Listen of a Waker, unless the caller listens already, or a Listen has failed within
// the last listenPoll. If listen returns true, the caller has begun to listen and must ask once
// more. Otherwise nothing has changed for the caller, which sleeps and polls.
func (w *wait) listen(ctx context.Context) bool {
	c := w.c
	if !c.store.driver.Wakes() || w.Wake != nil {
		return false
	}

	// Leave most of Timeout to the attempt that follows.
	bound := min(c.opts.Timeout/3, listenPoll, w.untilLastCall(ctx))
	if bound <= 0 || c.clock.Now() < w.listenAgain {
		return false
	}

	cl := backend.Claim{Key: c.opts.Prefix + w.r.key, Shared: w.r.shared, Timeout: c.opts.Timeout}
	ask := func(ctx context.Context) (calls.Listening, error) {
		return c.store.driver.Listen(ctx, cl)
	}
	stop := func(late calls.Listening, err error) {
		if err == nil {
			late.Stop()
		}
	}
	l, err := calls.Call(&c.store.caller, ctx, bound, ask, stop)
	if err != nil {
		w.listenAgain = c.clock.Now().Add(listenPoll)
		return false
	}
	w.Listening = l
	return true
}

// stopListening ends the listening that the method listen has begun.
func (w *wait) stopListening() {
	w.Stop()
	w.Listening = calls.Listening{}
}

// sleep returns after the duration d, when a Waker wakes the caller, when ctx ends, or when Close
// begins.
func (w *wait) sleep(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case _, ok := <-w.Wake: // the channel keeps a signal that came during the attempt
		if !ok { // the driver has closed the channel, because it cannot listen any more
			w.stopListening()
			w.listenAgain = w.c.clock.Now().Add(listenPoll)
		}
	case <-ctx.Done():
	case <-w.c.closing.Done():
	}
}

// rest returns after the duration d, when ctx ends, or when quit is closed.
func rest(ctx context.Context, quit <-chan struct{}, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	case <-quit:
	}
}
