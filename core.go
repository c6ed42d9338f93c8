package hasp

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/clock"
	"github.com/hasplock/hasp/internal/lazyctx"
)

// This file contains the bottom of the engine: the core, and the calls to the driver.

// core is what the parts of a Client share: the settings that never change, the mutex, and the
// count of the goroutines that Close waits for.
type core struct {
	opts   Options
	traits backend.Traits
	clock  *clock.Clock
	trip   atomic.Int64 // moving average of how long one call to the store takes, as a time.Duration

	closing context.Context // ends with ErrClosed when Close begins
	close   context.CancelCauseFunc
	closed  chan struct{} // closed when Close has ended

	// mu guards the state of all parts, and those fields of line, hold and Lease whose comments say
	// so. One mutex guards everything, because an Unlock or a loss changes most parts at once. It
	// is not held across I/O. A function whose name ends in Locked is called with mu held, and does
	// not unlock mu.
	mu      sync.Mutex
	calls   int        // number of this Client's goroutines, plus its calls in flight except Lock and TryLock
	stopped bool       // Close has stopped waiting and closes the driver, so no goroutine may start
	changed *sync.Cond // signals each change that Close or an Unlock may wait for
}

func newCore(opts Options, traits backend.Traits) *core {
	c := &core{
		opts:   opts,
		traits: traits,
		clock:  clock.New(clock.Suspended, traits.Reach == backend.Process),
		closed: make(chan struct{}),
	}
	c.changed = sync.NewCond(&c.mu)
	c.closing, c.close = context.WithCancelCause(context.Background())
	return c
}

// enter begins a call on the caller's goroutine. Close waits until the method leave ends the call.
// If Close has stopped waiting, enter returns ErrClosed.
func (c *core) enter() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stopped {
		return ErrClosed
	}
	c.calls++
	return nil
}

func (c *core) leave() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls--
	c.changed.Broadcast()
}

// spawn runs f on a goroutine that Close waits for. It returns false if Close has stopped waiting.
func (c *core) spawn(f func()) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.spawnLocked(f)
}

func (c *core) spawnLocked(f func()) bool {
	if c.stopped {
		return false
	}
	c.calls++
	go func() {
		defer c.leave()
		f()
	}()
	return true
}

// noteTrip records d, which is how long an answered call took.
func (c *core) noteTrip(d time.Duration) {
	// Ignore a call longer than Timeout, because the machine or the process was stopped.
	if d > c.opts.Timeout {
		return
	}
	trip, old := int64(d), c.trip.Load()
	if old > 0 && old <= 2*trip { // replace a mean above 2*trip, because the first call also dials, and is slow
		trip = old + (trip-old)/8
	}
	c.trip.Store(trip)
}

// roundTrip returns the approximate time of one call, or 0 if no call was answered yet.
func (c *core) roundTrip() time.Duration { return time.Duration(c.trip.Load()) }

// answerTime returns how long a healthy store may take to answer.
func (c *core) answerTime() time.Duration {
	return min(max(4*c.roundTrip(), 50*time.Millisecond), c.opts.Timeout)
}

// settle waits until cond returns true, or until the deadline end. It calls cond with mu held.
func (c *core) settle(end time.Time, cond func() bool) {
	timer := time.AfterFunc(time.Until(end), func() {
		// Hold mu, so that the signal cannot come between the check of the time and the Wait.
		c.mu.Lock()
		defer c.mu.Unlock()
		c.changed.Broadcast()
	})
	defer timer.Stop()

	c.mu.Lock()
	defer c.mu.Unlock()
	for !cond() && time.Now().Before(end) {
		c.changed.Wait()
	}
}

// poke wakes the goroutine that receives from the channel wake, which has room for one signal.
func poke(wake chan<- struct{}) {
	select {
	case wake <- struct{}{}:
	default:
	}
}

func isClosed(ch <-chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}

// minSleep is the shortest sleep between two attempts, before the random variation.
const minSleep = 100 * time.Microsecond

// jitter returns a random duration between d/2 and d.
func jitter(d time.Duration) time.Duration {
	return d - rand.N(d/2+1)
}

// grace is how long a call may take to return after its context has ended, so that the driver can
// return its own error.
const grace = 10 * time.Millisecond

// errLeft is what the function run returns if the channel leave is closed before the call ends.
var errLeft = errors.New("left")

// errNoReturn is the outcome of a call that panicked or ended its goroutine. It is unknown whether
// the store has carried the call out.
var errNoReturn = errors.New("the call did not return, because code that it ran panicked or ended the goroutine")

// store calls the driver. It bounds each call, so that the call ends even if no answer comes.
type store struct {
	*core
	driver boundary
}

// boundary is the driver as the engine sees it. Each call that takes a context passes through a
// method of boundary, or through the functions inspect and list, so that ownEnd sees its error.
type boundary struct {
	backend.Driver
	waiter backend.Waiter // the driver, or nil if it is no Waiter
	waker  backend.Waker  // the driver, or nil if it is no Waker or is a Waiter
}

func newBoundary(d backend.Driver) boundary {
	b := boundary{Driver: d}
	if b.waiter, _ = d.(backend.Waiter); b.waiter == nil {
		b.waker, _ = d.(backend.Waker)
	}
	return b
}

// ownEnd returns err, or the error of ctx if err is the cause of ctx's end. A driver on net/http
// returns that cause, which may match a definite error, such as the loss of another lease.
func ownEnd(ctx context.Context, err error) error {
	if err == nil || ctx.Err() == nil {
		return err
	}
	if cause := context.Cause(ctx); cause != ctx.Err() && errors.Is(err, cause) {
		return ctx.Err()
	}
	return err
}

func (b boundary) Acquire(ctx context.Context, cl backend.Claim) (backend.Grant, error) {
	g, err := b.Driver.Acquire(ctx, cl)
	return g, ownEnd(ctx, err)
}

func (b boundary) Wait(ctx context.Context, cl backend.Claim) (backend.Grant, error) {
	g, err := b.waiter.Wait(ctx, cl)
	return g, ownEnd(ctx, err)
}

func (b boundary) Listen(ctx context.Context, cl backend.Claim) (listening, error) {
	wake, stop, err := b.waker.Listen(ctx, cl)
	return listening{wake, stop}, ownEnd(ctx, err)
}

func (b boundary) Renew(ctx context.Context, cs []backend.Claim, done func(int, backend.Grant, error)) {
	b.Driver.Renew(ctx, cs, func(i int, g backend.Grant, err error) { done(i, g, ownEnd(ctx, err)) })
}

func (b boundary) Release(ctx context.Context, cl backend.Claim) error {
	return ownEnd(ctx, b.Driver.Release(ctx, cl))
}

// call runs f, which makes one call to the store and receives the values of ctx. It returns when f
// returns, when the duration bound has passed, or when ctx ends. If the function late is not nil,
// call also returns when Close begins. If call returns before f, late receives the outcome of f.
//
// The Traits decide how f runs. If Reach is Process, the function direct runs f to its end. If the
// driver's calls end with their context (see Cancellation), direct runs f with a context that ends
// when call must return. Otherwise the function run starts f on a goroutine of its own, and leaves
// that goroutine behind if call must return before f.
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

// prompt reports whether the function direct can call the driver. It can if the store is in this
// process, if a call ends with its context, or if a call ends at its deadline and ctx cannot end.
func (s *store) prompt(ctx context.Context) bool {
	ends := s.traits.Cancellation
	return ends == backend.CancelPrompt || ends == backend.CancelByDeadline && ctx.Done() == nil || s.traits.Reach == backend.Process
}

// direct runs f on the caller's goroutine. The context of f ends when the context ctx or quit ends,
// or when the duration bound has passed. The argument quit may be nil. With CancelByDeadline, f may
// go on after the end of quit. If Reach is Process, the context of f never ends.
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
	case err == nil:
	case backend.Definite(err):
	case ctx.Err() != nil:
		err = ctx.Err()
	case err == context.DeadlineExceeded:
		err = noAnswer(bound)
	case within.Err() != nil && !errors.Is(err, os.ErrDeadlineExceeded):
		err = fmt.Errorf("%v: %w", err, noAnswer(bound))
	default:
		err = plain(err, bound)
	}
	return v, err
}

// run calls f with a new context that ends with ctx. If bound is above 0, the new context ends
// after that time at the latest. If Cancellation is CancelPrompt, or Reach is Process, f runs on
// the caller's goroutine, and run returns when f returns.
//
// Otherwise f runs on a goroutine of its own. Then run returns when f has returned, when the
// channel leave or quit is closed, or a moment after the new context has ended. If f returns after
// run, the function late receives the outcome, unless late is nil. If Close has stopped waiting,
// run returns ErrClosed without calling f.
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

	// The caller sets decided when it stops waiting, and the goroutine sets decided when f has
	// returned. Whichever comes second handles the outcome.
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
		end() // not earlier, because the caller would take this end of ctx for a timeout
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

	// The call may have ended at the same moment. If it set decided first, use its answer.
	if decided.Swap(true) {
		<-done
		return answer, failure
	}
	return v, err
}

// release calls the driver's Release, even if ctx has ended. The release leaves the key taken until
// the instant keep, unless keep is 0.
func (s *store) release(ctx context.Context, cl backend.Claim, keep clock.Instant) error {
	if ctx.Done() != nil { // if Done returns nil, WithoutCancel would only cost memory
		ctx = context.WithoutCancel(ctx)
	}
	kept := s.keeping(cl, keep)
	if s.prompt(ctx) { // the same choice as the function call makes, without a closure on the heap
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

// keeping returns cl for a release that begins now. It sets KeepUntil unless the instant keep is
// past. Each release computes it anew, because the machine may have slept since the last release.
func (s *store) keeping(cl backend.Claim, keep clock.Instant) backend.Claim {
	if keep == 0 {
		return cl
	}
	if now, _ := s.clock.Read(); now < keep {
		cl.KeepUntil = s.clock.Time(keep)
	}
	return cl
}
