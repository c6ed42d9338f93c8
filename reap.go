package hasp

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/hasplock/hasp/backend"
)

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
