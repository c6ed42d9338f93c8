package hasp

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/calls"
	"github.com/hasplock/hasp/internal/clock"
	"github.com/hasplock/hasp/internal/line"
)

// store calls the driver. It bounds each call, so that the call ends even if no answer comes.
type store struct {
	*core
	driver calls.Driver
	caller calls.Caller
}

func newStore(c *core, d backend.Driver) store {
	return store{
		core:   c,
		driver: calls.NewDriver(d),
		caller: calls.Caller{Traits: c.traits, Closing: c.closing, Go: c.spawn},
	}
}

// grantEnds returns the instant at which the term of the grant g for cl ends. The argument start is
// when the call began, and slept is how long the machine had slept at that time.
func (s *store) grantEnds(cl backend.Claim, g backend.Grant, start clock.Instant,
	slept int64) clock.Instant {
	if !g.Until.IsZero() {
		return s.clock.At(g.Until, slept)
	}
	return start.Add(cl.TTL - backend.Drift(cl.TTL))
}

// release calls the driver's Release, even if ctx has ended. The release leaves the key taken until
// the instant keep, unless keep is 0.
func (s *store) release(ctx context.Context, cl backend.Claim, keep clock.Instant) error {
	if ctx.Done() != nil { // if Done returns nil, WithoutCancel would only cost memory
		ctx = context.WithoutCancel(ctx)
	}
	kept := s.keeping(cl, keep)
	if s.caller.Prompt(ctx) {
		// calls.Call would do the same, but its closure would be on the heap.
		_, err := calls.Direct(&s.caller, ctx, nil, s.opts.Timeout,
			func(ctx context.Context) (struct{}, error) {
				return struct{}{}, s.driver.Release(ctx, kept)
			})
		return err
	}

	_, err := calls.Call(&s.caller, ctx, s.opts.Timeout,
		func(ctx context.Context) (struct{}, error) {
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

// Bounds of the reaper. If its queue is full, a further token is not released, but expires.
const (
	maxReaps = 1 << 16 // tokens in the queue

	// maxReaping bounds the calls in flight. It is high, so that releases go on while a part of the
	// store hangs.
	maxReaping = 512

	// While maxRepeats calls are in flight, a token whose last release failed waits.
	maxRepeats = 64

	firstRetry = 50 * time.Millisecond
)

// These constants are how many times the reaper releases a token. If the store has answered the
// Acquire or the Wait, one release is enough. If the outcome is unknown, the store may carry out
// the command after the first release. So the reaper makes a second release a Timeout later. At
// that time the command has arrived, or its connection is dead. See also reapSoon.
const (
	reapOnce  = 1
	reapTwice = 2
)

// reapSoon is how soon a release follows one that has found its token gone, although a call may
// still write it.
const reapSoon = 100 * time.Millisecond

// reaper releases tokens that may be in the store although no caller uses them. Such tokens come
// from calls of unknown outcome, late grants, lost holds, and places in a queue that were given up.
// It has one goroutine, which runs while there is work, and one more for each release in flight.
//
// Its times come from Clock.Awake, because a command may reach the store only after a suspend, and
// its token must still be released then.
type reaper struct {
	*store
	wake chan struct{} // signals a change of the queue; has room for one signal

	// All below is guarded by mu.
	running bool    // the goroutine exists
	queue   []*reap // ordered by the time of the next try
	active  int     // calls in flight
}

// reap is a token to release.
type reap struct {
	claim  backend.Claim
	keep   clock.Instant // end of the min hold, until which the release leaves the key taken; or 0
	at     clock.Instant // the time of Clock.Awake at which the next try is due
	until  clock.Instant // the time of Clock.Awake at which the token has expired in the store
	times  int           // how many more releases must free the token or find it gone
	soon   bool          // a release has found the token gone, and another one followed soon
	failed int           // number of releases in a row that failed in another way

	// freed is closed when the token is not in the store any more. It is nil if no caller waits for
	// that.
	freed chan struct{}
}

// over tells the caller that waits for the release, if there is one, that it need not wait longer.
func (x *reap) over() {
	if x.freed != nil {
		close(x.freed)
		x.freed = nil
	}
}

// settle counts a release that freed the token, or that found it gone, and returns the time until
// the next one. Usually that is a Timeout. But a store that stood still may execute the commands of
// several connections in any order. So if the first of two releases finds the token gone, the
// command that writes it may follow, and an additional release comes soon. Otherwise the token
// could keep the key for a Timeout.
func (x *reap) settle(gone bool, timeout time.Duration) time.Duration {
	soon := min(reapSoon, timeout)
	switch {
	case x.soon: // the additional release was made; the last one comes a Timeout after the first
		timeout -= soon
	case gone && x.times == reapTwice:
		x.soon = true
		return soon
	}
	x.times--
	return timeout
}

// backoff returns how long to wait after a release that failed. It grows with the number of
// failures, up to the duration longest.
func (x *reap) backoff(longest time.Duration) time.Duration {
	return line.Jitter(min(firstRetry<<min(x.failed, 10), longest))
}

// acquire calls the driver's Acquire, which may take at most the duration bound. If the outcome is
// unknown, it has the token released.
func (r *reaper) acquire(ctx context.Context, cl backend.Claim, bound time.Duration) (
	g backend.Grant, err error) {
	if r.caller.Prompt(ctx) {
		// calls.Call would do the same, but its closures would be on the heap.
		err = errNoReturn
		unsent := false
		defer func() { // also if the driver or a method of ctx panics
			// If the driver is in this process, the outcome of a call that returns is known.
			known := r.traits.Reach == backend.Process && err != errNoReturn
			if err != nil && !known && !unsent {
				r.failed(cl, err)
			}
		}()
		g, err = calls.Direct(&r.caller, ctx, r.closing, bound,
			func(ctx context.Context) (g backend.Grant, err error) {
				g, err = r.driver.Acquire(ctx, cl)
				err, unsent = calls.TakeUnsent(err)
				return g, err
			})
		return g, err
	}

	f, late := r.guard(cl, r.driver.Acquire)
	return calls.Call(&r.caller, ctx, bound, f, late)
}

// failed handles the error err of an Acquire or a Wait for cl. If the token may be in the store,
// the reaper releases it. It may be there if the outcome is unknown, unless the driver cleans up.
// After a panic, the driver has not cleaned up.
func (r *reaper) failed(cl backend.Claim, err error) {
	// An error that joins a definite error and the error of a context leaves the outcome unknown.
	known := backend.Definite(err) && !calls.IsContextError(err)
	cleanedUp := r.traits.Cleans && err != errNoReturn
	if !known && !cleanedUp {
		r.add(cl, reapTwice)
	}
}

// guard returns the arguments f and late of calls.Call or calls.Run. The function f calls ask,
// which is the driver's Acquire or Wait, and has the reaper clean up after a failure. The function
// late has the reaper release a grant that comes after the caller has left.
func (r *reaper) guard(cl backend.Claim,
	ask func(context.Context, backend.Claim) (backend.Grant, error)) (
	f func(context.Context) (backend.Grant, error), late func(backend.Grant, error)) {
	f = func(ctx context.Context) (g backend.Grant, err error) {
		err = errNoReturn
		unsent := false
		defer func() { // also if the driver panics
			if err != nil && !unsent {
				r.failed(cl, err)
			}
		}()
		g, err = ask(ctx, cl)
		err, unsent = calls.TakeUnsent(err)
		return g, err
	}

	late = func(g backend.Grant, err error) {
		if err == nil {
			granted := cl // a change of cl itself would move cl to the heap
			granted.Handle = g.Handle
			r.add(granted, reapOnce)
		}
	}
	return f, late
}

// insert puts x into the queue, after the tokens that are due at the same time or earlier.
func (r *reaper) insert(x *reap) {
	i, _ := slices.BinarySearchFunc(r.queue, x, func(a, x *reap) int {
		if a.at <= x.at {
			return -1
		}
		return 1
	})
	r.queue = slices.Insert(r.queue, i, x)
}

// add has the reaper release the token of cl. The parameter times is reapOnce or reapTwice. No
// caller may use the token again.
func (r *reaper) add(cl backend.Claim, times int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.addLocked(&reap{claim: cl, times: times}, cl.TTL)
}

// addLocked queues x. The parameter kept is how long the store may still keep the token.
func (r *reaper) addLocked(x *reap, kept time.Duration) {
	if len(r.queue) >= maxReaps {
		x.over()
		return // the token expires
	}

	// A command that is still on its way may begin the term up to a Timeout later.
	x.at = r.clock.Awake()
	x.until = x.at.Add(kept + r.opts.Timeout)
	if x.failed > 0 { // the caller's own release has just failed
		x.at = x.at.Add(line.Jitter(firstRetry))
	}
	r.insert(x)
	if !r.running {
		r.running = r.spawnLocked(r.run)
	} else {
		poke(r.wake)
	}
}

// run serves the queue until it is empty. After Close has begun, it releases each token once,
// without delay, and drops tokens whose last release failed.
func (r *reaper) run() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		now := r.clock.Awake()
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
			done = nil // the loop has noticed Close already, and must be able to block again
		}
		timer.Reset(wait)
		select {
		case <-timer.C:
		case <-r.wake:
		case <-done:
		}
	}
}

// startReleasesLocked starts the releases that are due, within the bounds. If Close has begun, all
// are due. It returns how long to wait for the next one.
func (r *reaper) startReleasesLocked(now clock.Instant, closing bool) time.Duration {
	for len(r.queue) > 0 && r.active < maxReaping {
		// Drop a token that has expired. If Close has begun, also drop one whose last release
		// failed.
		x := r.queue[0]
		drop := closing && x.failed > 0 || now >= x.until
		if x.at > now && !closing && !drop {
			return time.Duration(x.at - now)
		}

		r.queue[0] = nil
		r.queue = r.queue[1:]
		if drop {
			x.over()
			continue
		}
		if x.failed > 0 && r.active >= maxRepeats {
			// Delay repeats while many calls are in flight, so that repeats do not delay releases
			// that were not tried yet.
			x.at = now.Add(x.backoff(r.opts.Timeout))
			r.insert(x)
			continue
		}

		if r.spawnLocked(func() { r.try(x) }) { // false if Close has stopped waiting
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
	gone := errors.Is(err, ErrLost) // the store did not have the token

	r.mu.Lock()
	defer r.mu.Unlock()
	defer poke(r.wake)
	r.active--

	now := r.clock.Awake()
	if err == nil || gone {
		x.over()
		x.failed = 0
		x.at = now.Add(x.settle(gone, r.opts.Timeout))
	} else {
		x.at = now.Add(x.backoff(r.opts.Timeout))
		x.failed++
	}

	// After Close has begun, one release of each token must do.
	if x.times > 0 && r.closing.Err() == nil {
		r.insert(x)
	}
}
