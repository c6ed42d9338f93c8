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

// waitInLine waits behind the head, and returns the ticket that ends that wait.
func (w *wait) waitInLine(ctx context.Context) line.Ticket {
	c := w.c
	w.stood = true
	var timeout <-chan time.Time
	if w.end != clock.Never {
		timer := time.NewTimer(time.Duration(w.end - c.clock.Now()))
		defer timer.Stop()
		timeout = timer.C
	}

	select {
	case tk := <-w.turn.Ready:
		w.turn.Ready = nil
		if tk.Do != line.MayAsk {
			w.line = nil
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
		// The store had no time to answer, so report that other callers of this Client came first.
		refusal = line.ErrHeldHere
	}
	// Do not hold mu here, because ctx may be the context of a lease, whose methods lock mu.
	return line.Ticket{Do: line.GiveUp, Err: cmp.Or(withContextEnd(ctx, refusal), calls.NoAnswer(waited))}
}

// quitLine takes the waiting caller out of the line, and returns why it does not have the key.
func (w *wait) quitLine(ctx context.Context) (refusal error) {
	w.c.mu.Lock()
	refusal = w.line.Refusal()
	handed, _ := w.line.Quit(&w.turn.Turn).(*Lease)
	w.line = nil
	w.c.mu.Unlock()

	if handed != nil {
		// Unlock it without an event, because Lock returns an error and no lease.
		w.c.spawn(func() { handed.unlock(ctx) })
	}
	return refusal
}

// awaitFreed waits, as the head, for the release of a hold that lingered and that the caller cannot
// use. It returns true and an error if the caller's wait ends before the release.
func (w *wait) awaitFreed(ctx context.Context, freed <-chan struct{}) (over bool, err error) {
	c, sent := w.c, w.c.clock.Awake()
	timer := time.NewTimer(min(time.Duration(w.end-c.clock.Now()), c.opts.Timeout))
	defer timer.Stop()
	w.lastAnswer = line.ErrHeldHere
	err = context.Canceled // the wait ends without an answer
	select {
	case <-freed:
		return false, nil
	case <-ctx.Done():
	case <-c.closing.Done():
	case <-timer.C:
		if c.clock.Now() < w.end {
			err = calls.NoAnswer(c.opts.Timeout) // an outage, because the store has not answered the release
		}
	}
	return w.over(ctx, err, sent, false)
}

// giveUpLocked leaves the line after the caller has asked the store and has got no hold.
func (w *wait) giveUpLocked() {
	if w.intent != nil {
		// Release the claim, because it would keep out new shared callers for a while.
		w.c.reaper.addLocked(&reap{claim: *w.intent, times: reapOnce}, w.intent.TTL)
	}
	w.line.LeaveWithoutHold()
	w.line = nil
}

// abandon gives up what the call has acquired. The method lock calls it if Options.Observe,
// Options.Backoff or a method of the context has panicked or has ended the goroutine. The argument
// l is the lease that Lock would have returned, or nil.
func (w *wait) abandon(l *Lease) {
	if l != nil {
		_, _ = l.unlock(context.Background()) // without another event; if the release fails, the Client repeats it
	}
	if w.part != nil {
		w.part.abandon(nil)
	}
	switch {
	case w.line == nil:
	case w.turn.Ready != nil:
		w.quitLine(context.Background())
	default:
		w.c.mu.Lock()
		defer w.c.mu.Unlock()
		w.giveUpLocked()
	}
}

// shouldWait reports whether to call the Wait of a Waiter instead of Acquire. It returns true if
// the store has just refused this caller, so Acquire would probably be refused. With an Ordered
// Waiter, it also does if other callers of this Client want the key, or the key was refused lately.
func (w *wait) shouldWait() bool {
	if w.refused || !w.c.traits.Ordered {
		return w.refused
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

// waitInStore calls the driver's Wait for as long as this caller may wait. If the outcome is
// unknown, the reaper releases the token.
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

	cl := w.claim()
	f, late := c.reaper.guard(cl, c.store.driver.Wait)
	g, err := calls.Run(&c.store.caller, ctx, 0, nil, nil, f, late)
	switch {
	case err == nil:
		now, _ := c.clock.Read()
		return newHold(&c.renewer, cl, g, start, now, slept)
	case ctx.Err() == nil:
		err = calls.PlainDated(err, cl.Timeout)
	case errors.Is(err, ErrHeld) && calls.IsContextError(err):
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

// over records the outcome err of a call. It reports whether the wait has ended, and with which
// error. The argument sent is the time of Clock.Awake at which the call began, or for a driver's
// Wait, the result of outageOf. If last is true, the call was meant to be the last one.
func (w *wait) over(ctx context.Context, err error, sent clock.Instant, last bool) (bool, error) {
	outage, final := w.note(err, sent, last)
	took := time.Duration(w.c.clock.Awake() - sent)

	// Check ctx before the outage: if ctx has ended, the error must say so, and give the last
	// answer as well.
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
		// If the deadline of ctx comes first, wait until then, so that the error reports it.
		if d, ok := ctx.Deadline(); ok && w.c.clock.Time(w.end).After(d) {
			rest(ctx, w.c.closing.Done(), time.Until(d)+calls.Grace)
		}
		return true, w.endErr(ctx)
	}
	return false, nil
}

// repeats reports whether a call that makes only one attempt repeats it. It does if the attempt took
// a third of Timeout or more, so probably nothing answered, and if another one fits into Timeout.
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
	c, ln := w.c, w.line
	held := errors.Is(err, ErrHeld)
	if !held && (backend.Definite(err) || errors.Is(err, ErrClosed)) {
		return 0, true
	}

	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case held:
		ln.Answered(err, sent)
		w.lastAnswer, w.refused = err, true
	case calls.IsContextError(err):
		ln.Unanswered(sent)
		if ln.Stale(w.lastAnswer) {
			w.lastAnswer = nil
		}
	default:
		ln.Answered(err, sent)
		if !last || !errors.Is(w.lastAnswer, ErrHeld) {
			w.lastAnswer, w.refused = err, false
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
func (c *core) outageOf(err error, began clock.Instant) clock.Instant {
	now := c.clock.Awake()
	var dated *backend.UnavailableError
	switch {
	case errors.As(err, &dated) && !dated.Since.IsZero():
		return min(c.clock.At(dated.Since, 0), now)
	case calls.IsContextError(err):
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
	var held backend.HeldError
	if he := (*backend.HeldError)(nil); errors.As(err, &he) {
		held = *he
	}

	var d time.Duration
	if c.opts.Backoff != nil && !w.once && (w.Wake == nil || !errors.Is(err, ErrHeld)) {
		d = line.Jitter(max(c.opts.Backoff(attempt), line.MinSleep))
	}
	switch {
	case !errors.Is(err, ErrHeld):
		// In an outage, no sleep is shorter than least, so that calls that fail immediately do not
		// keep a processor busy. Shorten a long Backoff to the time that is left for retries.
		least := line.Jitter(min(5*time.Millisecond<<min(attempt, 6), c.opts.Timeout/8))
		c.mu.Lock()
		rest := c.opts.Timeout - w.line.Outage(w.began)
		c.mu.Unlock()
		d = max(min(d, rest), least)
	case w.Wake != nil:
		d = listenPoll - rand.N(listenPoll/8) // at random, so that callers that began together do not always ask together
	case c.opts.Backoff == nil:
		c.mu.Lock()
		d = w.line.Refused(w.start, held.Waited)
		c.mu.Unlock()
	}
	// Ask again soon, because each attempt keeps out new shared callers only for a while.
	if held.Shared && !w.r.shared && w.Wake == nil {
		d = min(d, backend.SharedRetryEvery)
	}
	// Ask at the end of the term, because the key is free then if the holder has died.
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
// more. Otherwise the caller sleeps.
func (w *wait) listen(ctx context.Context) bool {
	c := w.c
	// Leave most of the time to the attempt that follows.
	bound := min(c.opts.Timeout/3, listenPoll, w.untilLastCall(ctx))
	if !c.store.driver.Wakes() || w.Wake != nil || bound <= 0 || c.clock.Now() < w.listenAgain {
		return false
	}

	cl := backend.Claim{Key: c.opts.Prefix + w.r.key, Shared: w.r.shared, Timeout: c.opts.Timeout}
	l, err := calls.Call(&c.store.caller, ctx, bound, func(ctx context.Context) (calls.Listening, error) {
		return c.store.driver.Listen(ctx, cl)
	}, func(late calls.Listening, err error) {
		if err == nil {
			late.Stop()
		}
	})
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

// sleep returns true after the duration d, or when a Waker wakes the caller. It returns false as
// soon as ctx ends or Close begins.
func (w *wait) sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case _, ok := <-w.Wake: // the channel keeps a signal that came during the attempt
		if !ok {
			w.stopListening()
			w.listenAgain = w.c.clock.Now().Add(listenPoll)
		}
	case <-ctx.Done():
		return false
	case <-w.c.closing.Done():
		return false
	}
	return true
}

// rest returns true after the duration d, or false once ctx has ended or quit is closed.
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
