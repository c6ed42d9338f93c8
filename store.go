package hasp

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/lazyctx"
)

// grace is how long a call may take to return after its context has ended, so that the driver can
// return its own error.
const grace = 10 * time.Millisecond

// errLate is an outage: the grant came too late.
var errLate = fmt.Errorf("the grant came after its term had ended: %w", os.ErrDeadlineExceeded)

// errLeft is run's error if leave was closed before the call ended.
var errLeft = errors.New("left")

// store calls the driver. It bounds each call, so that the call ends even if the store does not
// answer.
type store struct {
	*core
	driver backend.Driver
	waiter backend.Waiter // driver, or nil if it is no Waiter
	waker  backend.Waker  // driver, or nil if it is no Waker
}

// call runs f, which makes one call to the store, with the values of ctx. It returns when f
// returns, when bound has passed, or when ctx ends, whichever is first. If late is not nil, call
// also returns when Close begins. If call returns before f does, late receives the outcome of f.
//
// The Traits decide how. If Reach is Process, nothing interrupts f, so direct runs it and waits. If
// the driver's calls end with their context (Cancellation), direct runs f on the caller's goroutine,
// and the context of f ends when call must return. Otherwise the function run starts f on a
// goroutine of its own. If call must return before f does, it leaves that goroutine behind.
func call[T any](s *store, ctx context.Context, bound time.Duration,
	f func(context.Context) (T, error), late func(T, error)) (T, error) {
	var closing context.Context
	var quit <-chan struct{}
	if late != nil {
		closing, quit = s.closing, s.closing.Done()
	}
	if s.prompt(ctx) {
		return direct(s, ctx, closing, bound, f)
	}

	v, err := run(s, context.WithoutCancel(ctx), bound, ctx.Done(), quit, func(ctx context.Context) (T, error) {
		v, err := f(ctx)
		return v, plain(err, bound)
	}, late)
	switch err {
	case errLeft:
		err = ctx.Err()
	case context.DeadlineExceeded:
		err = noAnswer(bound)
	}
	return v, err
}

// prompt reports whether direct can make a call of the driver: the call ends with its context, if
// that is ctx with a deadline, or the store is in this process.
func (s *store) prompt(ctx context.Context) bool {
	ends := s.traits.Cancellation
	return ends == backend.CancelPrompt || ends == backend.CancelByDeadline && ctx.Done() == nil || s.traits.Reach == backend.Process
}

// direct runs f on the caller's goroutine. The context of f ends with ctx, after bound, or with
// quit, which may be nil. With CancelByDeadline, f may go on after quit. If Reach is Process, the
// context of f does not end.
func direct[T any](s *store, ctx, quit context.Context, bound time.Duration, f func(context.Context) (T, error)) (T, error) {
	if s.traits.Reach == backend.Process {
		if ctx.Done() != nil {
			ctx = context.WithoutCancel(ctx)
		}
		return f(ctx)
	}
	within := lazyctx.WithTimeout(ctx, quit, bound)
	defer within.End()
	v, err := f(within)

	// If a context caused the error, say whether it was the caller's.
	switch {
	case err == nil || backend.Definite(err):
	case ctx.Err() != nil:
		err = ctx.Err()
	case within.Err() != nil && !errors.Is(err, os.ErrDeadlineExceeded):
		err = fmt.Errorf("%v: %w", err, noAnswer(bound))
	default:
		err = plain(err, bound)
	}
	return v, err
}

// run calls f on a goroutine of its own, with a context that ends with ctx and after bound, if
// bound is above 0. It returns when f has returned, when leave or quit is closed, or a moment after
// the context has ended. If f returns after run, late receives its outcome, unless late is nil. If
// Close has stopped waiting, run returns ErrClosed instead.
//
// If Cancellation is CancelPrompt, or Reach is Process, run calls f on the caller's goroutine and
// waits until f returns. Then it never calls late.
func run[T any](s *store, ctx context.Context, bound time.Duration, leave, quit <-chan struct{},
	f func(context.Context) (T, error), late func(T, error)) (v T, err error) {
	end := func() {}
	if bound > 0 {
		ctx, end = context.WithTimeout(ctx, bound)
	}
	if s.traits.Reach == backend.Process || s.traits.Cancellation == backend.CancelPrompt {
		defer end()
		return f(ctx)
	}

	// The caller swaps decided when it stops waiting, and the call swaps it when it ends. Whichever
	// swaps second handles the outcome.
	var decided atomic.Bool
	var answer T
	var failure error
	done := make(chan struct{}) // closed when answer and failure are set
	if !s.spawn(func() {
		answer, failure = f(ctx)
		// If the caller has left, the outcome is handled here.
		if decided.Swap(true) && late != nil {
			late(answer, failure)
		}
		close(done)
		end() // only now, because the caller takes the end of ctx for the end of bound
	}) {
		end()
		return v, ErrClosed
	}

	select {
	case <-done:
	case <-leave:
		err = errLeft
	case <-quit:
		err = ErrClosed
	case <-ctx.Done():
		// Give the call, which has the same context, a moment to return.
		err = ctx.Err()
		timer := time.NewTimer(grace)
		defer timer.Stop()
		select {
		case <-done:
		case <-leave:
		case <-timer.C:
		}
	}

	// The call may have returned at the same moment. If it swapped first, its answer counts.
	if decided.Swap(true) {
		<-done
		return answer, failure
	}
	return v, err
}

// release calls the driver's Release, even if ctx has ended. The release leaves the key taken until
// keep, unless keep is 0.
func (s *store) release(ctx context.Context, cl backend.Claim, keep instant) error {
	if ctx.Done() != nil { // otherwise WithoutCancel would only cost memory
		ctx = context.WithoutCancel(ctx)
	}
	kept := s.keeping(cl, keep)
	if s.prompt(ctx) { // the same choice as in call, without a closure on the heap
		_, err := direct(s, ctx, nil, s.opts.Timeout, func(ctx context.Context) (struct{}, error) {
			return struct{}{}, s.driver.Release(ctx, kept)
		})
		return err
	}
	_, err := call(s, ctx, s.opts.Timeout, func(ctx context.Context) (struct{}, error) {
		return struct{}{}, s.driver.Release(ctx, kept)
	}, nil)
	return err
}

// keeping returns cl for a release that begins now, with KeepUntil if keep has not passed. Each
// release computes KeepUntil anew, because the machine may have slept since the last one.
func (s *store) keeping(cl backend.Claim, keep instant) backend.Claim {
	if keep == 0 {
		return cl
	}
	if now, _ := s.clock.read(); now < keep {
		cl.KeepUntil = s.clock.time(keep)
	}
	return cl
}

// Bounds of clean-up. If the queue is full, a further token is not released, and its hold expires.
const (
	maxReaps   = 1 << 16 // tokens in the queue
	maxReaping = 512     // calls in flight: many, so that releases go on while a part of the store hangs
	maxRepeats = 64      // while this many calls are in flight, a token whose last release was not answered waits

	firstRetry = 50 * time.Millisecond
)

// How often a token is released. After a late grant, one release is enough, because the store has
// carried out the command. If the outcome is unknown, the store may carry out the command after the
// first release. So the reaper makes a second one, a Timeout later, when the command has arrived or
// its connection is dead.
const (
	reapOnce  = 1
	reapTwice = 2
)

// reaper releases tokens that may be in the store although no caller uses them. Such tokens come
// from calls of unknown outcome, late grants, lost holds, and places in a queue that were given up.
// It is one goroutine, which runs while there is work, and one more for each release in flight.
//
// Its times are by clock.awake, because a command may reach the store only after a suspend, and
// must still be cleaned up then.
type reaper struct {
	*store
	wake chan struct{} // signals a change of the queue; has room for one signal

	// All below is guarded by mu.
	running bool    // the goroutine exists
	queue   []*reap // by the time of the next try
	active  int     // calls in flight
}

type reap struct {
	claim  backend.Claim
	keep   instant       // end of the min hold, until which the release leaves the key taken; or 0
	at     instant       // when the next try is due, by clock.awake
	until  instant       // when the token has expired in the store, by clock.awake
	times  int           // number of answered releases that are still needed
	failed int           // number of releases without an answer, since the last answer
	freed  chan struct{} // closed when the token is not in the store any more; nil if no caller waits for that
}

// over closes freed, if a caller waits for it.
func (x *reap) over() {
	if x.freed != nil {
		close(x.freed)
		x.freed = nil
	}
}

func (x *reap) backoff(most time.Duration) time.Duration {
	return jitter(min(firstRetry<<min(x.failed, 10), most))
}

func (r *reaper) insert(x *reap) {
	i, _ := slices.BinarySearchFunc(r.queue, x, func(a, x *reap) int {
		if a.at <= x.at {
			return -1
		}
		return 1
	})
	r.queue = slices.Insert(r.queue, i, x)
}

// add has the reaper release the token of cl: times is reapOnce or reapTwice. No caller may use the
// token again.
func (r *reaper) add(cl backend.Claim, times int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.addLocked(&reap{claim: cl, times: times}, cl.TTL)
}

// addHoldLocked has the reaper release the token of a hold that has ended. keep is h.keep if the
// store may still have the hold, and 0 if the store has reported its loss. failed is the number of
// releases that got no answer.
func (r *reaper) addHoldLocked(h *hold, keep instant, failed int) {
	kept := max(time.Duration(h.kept-r.clock.now()), 0)
	r.addLocked(&reap{claim: h.claim, keep: keep, times: reapOnce, failed: failed}, kept)
}

// addLocked queues x. kept is how long the store may still keep its token.
func (r *reaper) addLocked(x *reap, kept time.Duration) {
	if len(r.queue) >= maxReaps {
		x.over()
		return
	}

	x.at = r.clock.awake()
	x.until = x.at.add(kept + r.opts.Timeout)
	if x.failed > 0 {
		x.at = x.at.add(jitter(firstRetry))
	}
	r.insert(x)
	if !r.running {
		r.running = r.spawnLocked(r.run)
	} else {
		poke(r.wake)
	}
}

// run serves the queue until it is empty. After Close has begun, it releases each token once,
// without delay, and drops those whose last release was not answered.
func (r *reaper) run() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		now := r.clock.awake()
		closing := r.closing.Err() != nil
		r.mu.Lock()
		wait := r.startReleasesLocked(now, closing)
		if len(r.queue) == 0 && r.active == 0 {
			r.running = false
			r.mu.Unlock()
			return
		}
		r.mu.Unlock()

		done := r.closing.Done()
		if closing {
			done = nil // it was handled already; the loop must be able to block again
		}
		timer.Reset(wait)
		select {
		case <-timer.C:
		case <-r.wake:
		case <-done:
		}
	}
}

// startReleasesLocked starts the releases that are due, within the bounds. It returns how long to
// wait for the next one.
func (r *reaper) startReleasesLocked(now instant, closing bool) time.Duration {
	for len(r.queue) > 0 && r.active < maxReaping {
		// Drop a token that has expired. Once Close has begun, also drop a token whose release was
		// not answered.
		x := r.queue[0]
		drop := closing && x.failed > 0 || now >= x.until
		if x.at > now && !closing && !drop {
			return time.Duration(x.at - now)
		}
		r.queue[0], r.queue = nil, r.queue[1:]
		if drop {
			x.over()
			continue
		}
		if x.failed > 0 && r.active >= maxRepeats {
			// Delay repeats while many calls are in flight, so that they do not delay releases that
			// were not tried yet.
			x.at = now.add(x.backoff(r.opts.Timeout))
			r.insert(x)
			continue
		}

		if r.spawnLocked(func() { r.try(x) }) {
			r.active++
		}
	}
	return time.Hour // a release that ends, or a new token, wakes the reaper
}

// try makes one call that releases the token of x.
func (r *reaper) try(x *reap) {
	ctx, cancel := context.WithTimeout(context.Background(), r.opts.Timeout)
	err := r.driver.Release(ctx, r.keeping(x.claim, x.keep))
	cancel()
	settled := err == nil || errors.Is(err, ErrLost)

	r.mu.Lock()
	defer r.mu.Unlock()
	defer poke(r.wake)
	r.active--

	// After an answer, the next release that times asks for comes a Timeout later. A release
	// without an answer does not count.
	now := r.clock.awake()
	if settled {
		x.over()
		x.times--
		x.failed = 0
		x.at = now.add(r.opts.Timeout)
	} else {
		x.at = now.add(x.backoff(r.opts.Timeout))
		x.failed++
	}
	if x.times > 0 && r.closing.Err() == nil {
		r.insert(x)
	}
}

// acquire calls the driver's Acquire, for bound at most.
func (r *reaper) acquire(ctx context.Context, cl backend.Claim, bound time.Duration) (backend.Grant, error) {
	if r.prompt(ctx) { // the same choice as in call, without closures on the heap
		g, err := direct(r.store, ctx, r.closing, bound, func(ctx context.Context) (backend.Grant, error) {
			return r.driver.Acquire(ctx, cl)
		})
		if err != nil && r.traits.Reach != backend.Process {
			r.failed(cl, err)
		}
		return g, err
	}
	f, late := r.guard(cl, r.driver.Acquire)
	return call(r.store, ctx, bound, f, late)
}

// failed is called if an Acquire or a Wait for cl has returned err. If the outcome is unknown and
// the driver does not clean up, the reaper releases the token. The outcome is also unknown if err
// joins a definite error and the error of a context.
func (r *reaper) failed(cl backend.Claim, err error) {
	if !r.traits.Cleans && (!backend.Definite(err) || isContextError(err)) {
		r.add(cl, reapTwice)
	}
}

// guard returns the functions f and late for call or run. f calls ask, which is the driver's
// Acquire or Wait, and has the reaper clean up after a failure. late has the reaper release a grant
// that comes after the caller has left.
func (r *reaper) guard(cl backend.Claim, ask func(context.Context, backend.Claim) (backend.Grant, error)) (f func(context.Context) (backend.Grant, error), late func(backend.Grant, error)) {
	f = func(ctx context.Context) (backend.Grant, error) {
		g, err := ask(ctx, cl)
		if err != nil {
			r.failed(cl, err)
		}
		return g, err
	}
	late = func(g backend.Grant, err error) {
		if err == nil {
			granted := cl // a change of cl itself would move it to the heap
			granted.Handle = g.Handle
			r.add(granted, reapOnce)
		}
	}
	return f, late
}
