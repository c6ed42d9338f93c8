package hasp

import (
	"cmp"
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/hasplock/hasp/backend"
)

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
			sent = w.c.outageOf(err, sent) // Wait may have begun long before the outage
		}
		if over, why := w.over(ctx, err, sent, last); over {
			return nil, why
		}
		if !useWait && mayWait && w.shouldWait() {
			continue // wait in the driver instead of a sleep
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

	// Allow for an answer one and a half round trips, because now and then one takes so long.
	trip := w.c.roundTrip()
	return left - trip - max(trip/2, time.Millisecond)
}

// attempt makes one attempt. If its outcome is unknown, the reaper releases the token. With a
// driver of Reach Process, the outcome is always known. Last says that no attempt follows.
func (w *wait) attempt(ctx context.Context, last bool) (*hold, error) {
	c, start := w.c, w.asked
	cl, bound := w.claim(), w.beginAttempt()
	cl.WillRetry = !last
	if c.queue.polls {
		c.mu.Lock()
		cl.Waited = w.waitedLocked(start)
		c.mu.Unlock()
	}
	slept := c.clock.slept.Load()
	var g backend.Grant
	var err error
	if c.traits.Reach == backend.Process {
		g, err = c.store.driver.Acquire(endless(ctx), cl)
	} else {
		// Read the clock again, so that a suspend before the call does not count as a part of the
		// term.
		start, slept = c.clock.read()
		if c.store.prompt(ctx) { // as call does, without closures on the heap
			g, err = direct(ctx, c.closing, bound, func(ctx context.Context) (backend.Grant, error) {
				return c.reaper.acquire(ctx, cl, c.store.driver.Acquire)
			})
		} else {
			g, err = call(&c.store, ctx, bound, c.reaper.after(cl, c.store.driver.Acquire), c.reaper.late(cl))
		}
	}

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

// claim returns the claim of a new attempt.
func (w *wait) claim() backend.Claim {
	cl := w.c.store.claim(&w.r)
	if w.r.linger > 0 {
		cl.Token = w.c.recalls.mark(cl.Token)
	}
	return cl
}

// beginAttempt records that an attempt begins, and returns how long it may take: min(Timeout, in an
// outage the rest of Timeout, rest of the wait), but at least as long as a healthy store may take
// to answer.
func (w *wait) beginAttempt() time.Duration {
	c, ln := w.c, w.line
	// Without a max wait, end is never, and Timeout is the bound.
	now := c.clock.now()
	d := min(c.opts.Timeout, w.end.sub(now))

	c.mu.Lock()
	defer c.mu.Unlock()
	ln.unanswered = cmp.Or(ln.unanswered, c.clock.withoutSleep(now))
	d = min(d, c.opts.Timeout-ln.outageLocked(w.began))
	if d < c.opts.Timeout {
		d = max(d, w.c.answerTime())
	}
	return d
}

// shouldWait reports whether to call the Wait of a Waiter instead of Acquire, because Acquire would
// probably be refused: the store has just refused this caller. With an Ordered Waiter there are two
// more reasons: other callers of this Client want the key, or the driver has refused the key
// lately.
func (w *wait) shouldWait() bool {
	if w.refused || !w.c.traits.Ordered {
		return w.refused
	}
	if w.end != never && w.end.sub(w.c.clock.now()) < w.c.answerTime() {
		return false // there is time only for one attempt
	}

	w.c.mu.Lock()
	defer w.c.mu.Unlock()
	// In an outage make an attempt first, because the answer ends the outage. A Wait may return
	// much later.
	if w.line.outage != 0 {
		return false
	}
	return w.line.callers > 1 || w.c.queue.contended.lately(w.line.key, w.c.clock.now())
}

// waitInStore calls the driver's Wait for as long as this caller may wait. If its outcome is
// unknown, the reaper releases the token.
func (w *wait) waitInStore(ctx context.Context) (*hold, error) {
	c := w.c
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(c.closing, cancel)()
	if w.end != never {
		var stop context.CancelFunc
		ctx, stop = context.WithDeadline(ctx, c.clock.time(w.end))
		defer stop()
	}

	cl := w.claim()
	start, slept := c.clock.read() // before the driver reads its clock for Grant.Until
	g, err := run(&c.store, ctx, 0, nil, nil, c.reaper.after(cl, c.store.waiter.Wait), c.reaper.late(cl))
	switch {
	case err == nil:
		now, _ := c.clock.read()
		return newHold(c, cl, g, start, now, slept)
	case ctx.Err() == nil:
		err = plainDated(err, cl.Timeout)
	case errors.Is(err, ErrHeld) && isContextError(err):
		// Report only that the key was held, because ctx may have ended by WithMaxWait. The reaper
		// or the driver releases the place in the queue.
		var held *backend.HeldError
		if errors.As(err, &held) {
			return nil, held
		}
		err = ErrHeld
	}
	return nil, err
}

// over records the outcome of a call that returned err, and reports whether the wait is over, and
// with which error. Sent is the start of the call, by clock.awake, or for a driver's Wait the
// result of outageOf. Last says that the call was begun as the last one.
func (w *wait) over(ctx context.Context, err error, sent instant, last bool) (bool, error) {
	outage, final := w.note(err, sent, last)

	// Check ctx before the outage: if ctx has ended, the error must say so, and give the last
	// answer as well.
	switch {
	case final:
		return true, err
	case ctx.Err() != nil, w.c.closing.Err() != nil:
		return true, w.endErr(ctx)
	case w.once, outage >= w.c.opts.Timeout:
		return true, err
	case last && w.untilLastCall(ctx) <= 0, w.c.clock.now() >= w.end:
		w.awaitEnd(ctx)
		return true, w.endErr(ctx)
	}
	return false, nil
}

// note records the outcome of a call, for the line and for this caller. It returns how long the
// caller has waited during an outage, and whether err is final:
//
//	ErrHeld                    the store answers: there is no outage
//	another definite error     it is final, and so is ErrClosed
//	the end of the context     there was no answer, which may become an outage
//	any other                  an outage; after a last call, w.lastAnswer stays an earlier ErrHeld
func (w *wait) note(err error, sent instant, last bool) (outage time.Duration, final bool) {
	c, ln := w.c, w.line
	held := errors.Is(err, ErrHeld)
	if !held && (backend.Definite(err) || errors.Is(err, ErrClosed)) {
		return 0, true
	}

	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case held:
		ln.answeredLocked(err, sent)
		w.lastAnswer, w.refused = err, true
	case isContextError(err):
		ln.unansweredLocked(sent)
		if ln.staleLocked(w.lastAnswer) {
			w.lastAnswer = nil
		}
	default:
		ln.answeredLocked(err, sent)
		if !last || !errors.Is(w.lastAnswer, ErrHeld) {
			w.lastAnswer, w.refused = err, false
		}
		outage = ln.outageLocked(w.began)
	}
	return outage, false
}

// awaitEnd waits until ctx has ended, if its deadline is before the end of the wait, so that the
// error can say so.
func (w *wait) awaitEnd(ctx context.Context) {
	if d, ok := ctx.Deadline(); ok && w.c.clock.time(w.end).After(d) {
		rest(ctx, w.c.closing.Done(), time.Until(d)+grace)
	}
}

// waitedLocked returns how long the Client has waited for the key, or 0 if the first attempt got
// it, without a gap.
func (w *wait) waitedLocked(now instant) time.Duration {
	if w.tries > 1 || w.stood {
		return min(max(now.sub(max(w.line.pace.ended, w.start)), 1), longestWait)
	}
	return 0
}

// outageOf returns when the outage that a Waiter's err reports began, by clock.awake:
//   - Since of a [backend.UnavailableError], if err is one and knows;
//   - began, if err is only that of the context: the Wait had no answer since then;
//   - otherwise now.
func (c *core) outageOf(err error, began instant) instant {
	now := c.clock.awake()
	var dated *backend.UnavailableError
	switch {
	case errors.As(err, &dated) && !dated.Since.IsZero():
		return min(c.clock.at(dated.Since, 0), now)
	case isContextError(err):
		return began
	}
	return now
}

// endErr returns the error of a wait that was ended by ctx, by WithMaxWait, or by Close.
func (w *wait) endErr(ctx context.Context) error {
	if w.c.closing.Err() != nil {
		return ErrClosed
	}
	if w.lastAnswer == nil {
		// If this Client itself holds the key, the store need not have answered.
		w.c.mu.Lock()
		if w.line.hold != nil {
			w.lastAnswer = w.line.refusalLocked()
		}
		w.c.mu.Unlock()
	}
	if err := withContextEnd(ctx, w.lastAnswer); err != nil {
		return err
	}
	return noAnswer(w.c.clock.now().sub(w.start))
}

// pause returns how long to sleep after an attempt that failed with err. If the key is held,
// Options.Backoff decides, or without it the pace of the line; a caller that listens polls seldom,
// because it is woken. In an outage the number of attempts decides, and Backoff may make the sleep
// longer. The sleep ends with the holder's term, and in time for a last attempt before the wait
// ends.
func (w *wait) pause(ctx context.Context, attempt int, err error) time.Duration {
	c := w.c
	var held backend.HeldError
	if he := (*backend.HeldError)(nil); errors.As(err, &he) {
		held = *he
	}

	var d time.Duration
	if c.opts.Backoff != nil && (w.wake == nil || !errors.Is(err, ErrHeld)) {
		d = jitter(max(c.opts.Backoff(attempt), minSleep))
	}
	switch {
	case !errors.Is(err, ErrHeld):
		// An outage. Sleep for least, so that calls that fail at once do not keep a processor busy,
		// but end a long Backoff with the time for which Lock retries.
		least := jitter(min(5*time.Millisecond<<min(attempt, 6), c.opts.Timeout/8))
		c.mu.Lock()
		rest := c.opts.Timeout - w.line.outageLocked(w.began)
		c.mu.Unlock()
		d = max(min(d, rest), least)
	case w.wake != nil:
		d = listenPoll - rand.N(listenPoll/8) // so that callers that began together do not always ask together
	case c.opts.Backoff == nil:
		c.mu.Lock()
		now := c.clock.now()
		d = w.line.pace.refused(now, now.sub(max(w.line.pace.ended, w.start)), held.Waited)
		c.mu.Unlock()
	}
	// Ask again soon, because each attempt keeps out new shared callers only for a while.
	if held.Shared && !w.r.shared && w.wake == nil {
		d = min(d, backend.SharedRetryEvery)
	}
	// Ask at the end of the term, when the key is free if the holder has died.
	if held.RetryAfter > 0 {
		d = min(d, held.RetryAfter+minSleep)
	}
	return min(d, max(w.untilLastCall(ctx), 0))
}

// listenPoll is the longest time between two polls of a caller that a Waker wakes, and the time
// from a failure of Listen to the next Listen.
const listenPoll = time.Second

// listening is what a Waker's Listen returns.
type listening struct {
	wake <-chan struct{}
	stop func()
}

// listen calls Listen of a Waker, unless the caller listens already, or a Listen has failed just
// now. If it returns true, the caller has begun to listen and must ask once more. Otherwise the
// caller sleeps.
func (w *wait) listen(ctx context.Context) bool {
	c := w.c
	// Leave most of the time to the attempt that follows.
	bound := min(c.opts.Timeout/3, listenPoll, w.untilLastCall(ctx))
	if c.store.waker == nil || w.wake != nil || bound <= 0 || c.clock.now() < w.listenAgain {
		return false
	}

	cl := backend.Claim{Key: c.opts.Prefix + w.r.key, Shared: w.r.shared, Timeout: c.opts.Timeout}
	l, err := call(&c.store, ctx, bound, func(ctx context.Context) (listening, error) {
		wake, stop, err := c.store.waker.Listen(ctx, cl)
		return listening{wake, stop}, err
	}, func(late listening, err error) {
		if err == nil {
			late.stop()
		}
	})
	if err != nil {
		w.listenAgain = c.clock.now().add(listenPoll)
		return false
	}
	w.listening = l
	return true
}

// stopListening ends the listening that listen has begun, if there is any.
func (w *wait) stopListening() {
	if w.wake != nil {
		w.stop()
		w.listening = listening{}
	}
}

// sleep returns true after d, or when a Waker wakes the caller. It returns false as soon as
// ctx ends or Close begins.
func (w *wait) sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case _, ok := <-w.wake: // wake keeps a signal that came during the attempt
		if !ok {
			w.stopListening()
			w.listenAgain = w.c.clock.now().add(listenPoll)
		}
	case <-ctx.Done():
		return false
	case <-w.c.closing.Done():
		return false
	}
	return true
}

// rest returns true after d, or false as soon as ctx ends or quit is closed.
func rest(ctx context.Context, quit <-chan struct{}, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
	case <-quit:
	}
	return false
}
