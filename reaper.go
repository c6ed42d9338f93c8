package hasp

import (
	"container/heap"
	"context"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"time"

	"github.com/hasplock/hasp/backend"
)

// Bounds of clean-up. What does not fit ends with its term.
const (
	maxReaps   = 1 << 16 // waiting
	maxReaping = 16      // calls in flight
	firstRetry = 50 * time.Millisecond
)

// How often a token is released that may hold a key without anybody's
// knowing: a grant that came late is known to have landed; a command of
// unknown outcome may land after the first release, but not a Timeout later,
// when its connection is dead.
const (
	reapOnce  = 1
	reapTwice = 2
)

// newToken returns a token of 128 random bits. None is used twice.
func newToken() string {
	var b [16]byte
	var text [22]byte
	rand.Read(b[:])
	base64.RawURLEncoding.Encode(text[:], b[:])
	return string(text[:])
}

// reaper releases, in the background, what calls of unknown outcome may have
// left in the store. One goroutine, which exists while there is work.
type reaper struct {
	// Guarded by Client.mu, but for wake.
	running bool
	queue   reapHeap
	active  int
	wake    chan struct{}
}

func (r *reaper) poke() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// reap is one token to be released.
type reap struct {
	claim  backend.Claim
	lease  *Lease  // whose Unlock this repeats, or nil
	at     instant // of the next try
	until  instant // when the store has forgotten the token anyway
	times  int
	failed int
}

type reapHeap []*reap

func (q reapHeap) Len() int           { return len(q) }
func (q reapHeap) Less(i, j int) bool { return q[i].at < q[j].at }
func (q reapHeap) Swap(i, j int)      { q[i], q[j] = q[j], q[i] }

// Push is for container/heap.
func (q *reapHeap) Push(x any) { *q = append(*q, x.(*reap)) }

// Pop is for container/heap.
func (q *reapHeap) Pop() any {
	old := *q
	r := old[len(old)-1]
	old[len(old)-1] = nil
	*q = old[:len(old)-1]
	return r
}

// reap has the token of cl released. The token is never used again.
func (c *Client) reap(cl backend.Claim, times int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.reapLocked(cl, times)
}

func (c *Client) reapLocked(cl backend.Claim, times int) {
	now := c.clock.now()
	c.addReap(&reap{claim: cl, at: now, until: now.add(cl.TTL + c.opts.Timeout), times: times})
}

// reapLease has the Unlock of l repeated, which had no answer just now.
func (c *Client) reapLease(l *Lease) {
	now := c.clock.now()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.addReap(&reap{claim: l.hold.claim, lease: l, at: now.add(jitter(firstRetry)),
		until: max(now, instant(l.hold.deadline.Load())).add(c.opts.Timeout), times: reapOnce, failed: 1})
}

func (c *Client) addReap(x *reap) {
	r := &c.reaper
	if len(r.queue) >= maxReaps {
		return
	}
	heap.Push(&r.queue, x)
	if !r.running {
		r.running = c.spawnLocked(c.runReaper)
	} else {
		r.poke()
	}
}

// runReaper serves the queue until it is empty. Once Close has begun, what
// was tried already is left to its term.
func (c *Client) runReaper() {
	r := &c.reaper
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		now := c.clock.now()
		closing := c.closing.Err() != nil
		wait := time.Hour
		c.mu.Lock()
		for len(r.queue) > 0 && r.active < maxReaping {
			x := r.queue[0]
			if closing && x.failed > 0 || now >= x.until {
				heap.Pop(&r.queue)
				continue
			}
			if x.at > now && !closing {
				wait = x.at.sub(now)
				break
			}
			heap.Pop(&r.queue)
			if c.spawnLocked(func() { c.release(x) }) {
				r.active++
			}
		}
		if len(r.queue) == 0 && r.active == 0 {
			r.running = false
			c.mu.Unlock()
			return
		}
		c.mu.Unlock()
		timer.Reset(wait)
		select {
		case <-timer.C:
		case <-r.wake:
		case <-ifOpen(c.closing, closing):
		}
	}
}

// ifOpen is ctx's end, to be heard once.
func ifOpen(ctx context.Context, heard bool) <-chan struct{} {
	if heard {
		return nil
	}
	return ctx.Done()
}

// release makes one try.
func (c *Client) release(x *reap) {
	ctx, cancel := context.WithTimeout(context.Background(), c.opts.Timeout)
	err := c.driver.Release(ctx, x.claim)
	cancel()
	settled := err == nil || errors.Is(err, ErrLost)
	if settled && x.lease != nil {
		x.lease.settle(err)
	}
	now := c.clock.now()
	c.mu.Lock()
	defer c.mu.Unlock()
	r := &c.reaper
	r.active--
	defer r.poke()
	switch {
	case settled:
		if x.times--; x.times == 0 {
			return
		}
		x.at = now.add(c.opts.Timeout)
	default:
		x.at = now.add(jitter(min(firstRetry<<min(x.failed, 10), c.opts.Timeout)))
		x.failed++
	}
	if c.closing.Err() == nil {
		heap.Push(&r.queue, x)
	}
}
