package hasp

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/hasplock/hasp/backend"
)

// Bounds of clean-up. If the queue is full, a token is not released, and expires.
const (
	maxReaps   = 1 << 16 // tokens in the queue
	maxReaping = 512     // calls in flight: while a part of the store hangs, releases for the other parts must go on
	maxRepeats = 64      // a token whose last release was not answered waits while so many calls are in flight

	firstRetry = 50 * time.Millisecond
)

// How often a token is released. If its grant came late, the store has carried out
// the command, so one release is enough. If the outcome is unknown, the store may
// carry out the command after the first release. So there is a second one, a Timeout
// later. By then the command has arrived, or its connection is dead.
const (
	reapOnce  = 1
	reapTwice = 2
)

// reaper releases tokens that may be in the store although no caller uses them: after
// calls of unknown outcome, late grants, lost holds, and places that were given up. It is
// one goroutine, which runs while there is work, and one more for each release in flight.
//
// Its times are by clock.awake. A machine may send a command only when it wakes up, so a
// suspend must not make the reaper drop a token sooner.
type reaper struct {
	wake chan struct{} // signals a change of the queue; has room for one

	// All below is guarded by Client.mu.
	running bool    // its goroutine exists
	queue   []*reap // by the time of the next try
	active  int     // calls in flight
}

// reap is one token to be released.
type reap struct {
	claim  backend.Claim
	keep   instant // until when the release leaves the key taken, for WithMinHold; 0 if it does not
	at     instant // of the next try, by clock.awake
	until  instant // by clock.awake: the token has expired in the store by then
	times  int     // releases that are still to be answered
	failed int     // releases that were not answered, since the last answer
}

// backoff returns how long to wait before the next try.
func (x *reap) backoff(most time.Duration) time.Duration {
	return jitter(min(firstRetry<<min(x.failed, 10), most))
}

// insert puts x into the queue.
func (r *reaper) insert(x *reap) {
	i, _ := slices.BinarySearchFunc(r.queue, x, func(a, x *reap) int {
		if a.at <= x.at {
			return -1
		}
		return 1
	})
	r.queue = slices.Insert(r.queue, i, x)
}

// reap releases the token of cl in the background, as often as times says. No caller
// uses the token again.
func (c *Client) reap(cl backend.Claim, times int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.reapLocked(&reap{claim: cl, times: times}, cl.TTL)
}

// reapHoldLocked releases the token of a hold that has ended. Keep is h.keep if the store
// may still have the hold, and 0 if the store has answered that it is lost. Failed is how many
// releases were not answered.
func (c *Client) reapHoldLocked(h *hold, keep instant, failed int) {
	kept := max(h.kept.sub(c.clock.now()), 0)
	c.reapLocked(&reap{claim: h.claim, keep: keep, times: reapOnce, failed: failed}, kept)
}

// reapLocked queues x, whose token the store may keep for as long as kept says.
func (c *Client) reapLocked(x *reap, kept time.Duration) {
	r := &c.reaper
	if len(r.queue) >= maxReaps {
		return
	}

	x.at = c.clock.awake()
	x.until = x.at.add(kept + c.opts.Timeout)
	if x.failed > 0 {
		x.at = x.at.add(jitter(firstRetry))
	}
	r.insert(x)
	if !r.running {
		r.running = c.spawnLocked(c.runReaper)
	} else {
		poke(r.wake)
	}
}

// runReaper serves the queue until it is empty. After Close has begun, it releases each
// token once, at once. But it drops a token whose last release was not answered: that
// token expires.
func (c *Client) runReaper() {
	r := &c.reaper
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		now := c.clock.awake()
		closing := c.closing.Err() != nil
		c.mu.Lock()
		wait := c.startReapsLocked(now, closing)
		if len(r.queue) == 0 && r.active == 0 {
			r.running = false
			c.mu.Unlock()
			return
		}
		c.mu.Unlock()

		done := c.closing.Done()
		if closing {
			done = nil // once, or the loop would never block again
		}
		timer.Reset(wait)
		select {
		case <-timer.C:
		case <-r.wake:
		case <-done:
		}
	}
}

// startReapsLocked starts the releases that are due, within the bounds. It returns
// how long to wait for the next one.
func (c *Client) startReapsLocked(now instant, closing bool) time.Duration {
	r := &c.reaper
	for len(r.queue) > 0 && r.active < maxReaping {
		// A token that has expired needs no release. After Close has begun, a release that
		// was not answered is not tried again.
		x := r.queue[0]
		drop := closing && x.failed > 0 || now >= x.until
		if x.at > now && !closing && !drop {
			return x.at.sub(now)
		}
		r.queue[0], r.queue = nil, r.queue[1:]
		if drop {
			continue
		}
		if x.failed > 0 && r.active >= maxRepeats {
			// While a part of the store hangs, repeats for that part must not delay
			// releases that were not tried yet.
			x.at = now.add(x.backoff(c.opts.Timeout))
			r.insert(x)
			continue
		}

		if c.spawnLocked(func() { c.release(x) }) {
			r.active++
		}
	}
	return time.Hour // a release that ends, or a new token, wakes the reaper
}

// release makes one try for x.
func (c *Client) release(x *reap) {
	ctx, cancel := context.WithTimeout(context.Background(), c.opts.Timeout)
	err := c.driver.Release(ctx, c.keeping(x.claim, x.keep))
	cancel()
	settled := err == nil || errors.Is(err, ErrLost)

	// The try has ended. If another one must follow, x is queued again.
	c.mu.Lock()
	defer c.mu.Unlock()
	r := &c.reaper
	defer poke(r.wake)
	r.active--

	// After an answer the next release, if times asks for one, comes a Timeout later.
	// Without an answer the release does not count.
	now := c.clock.awake()
	if settled {
		x.times--
		x.failed = 0
		x.at = now.add(c.opts.Timeout)
	} else {
		x.at = now.add(x.backoff(c.opts.Timeout))
		x.failed++
	}
	if x.times > 0 && c.closing.Err() == nil {
		r.insert(x)
	}
}
