package hasp

import (
	"context"
	"errors"
	"sync/atomic"
)

// maxUnobserved is how many events may wait for Observe. Beyond it, events of failed
// renewals are dropped, because such events repeat.
const maxUnobserved = 4096

// lastEventID is the last Event.ID of the process.
var lastEventID atomic.Uint64

// observer calls Options.Observe for events that no caller waits for. It does so on
// a goroutine of its own, so that an Observe that blocks delays neither renewals nor
// the end of a context.
type observer struct {
	// Guarded by Client.mu.
	running bool         // the goroutine exists; it ends when the queue is empty
	queue   []unobserved // in the order in which they happened
}

// unobserved is an event that waits for Observe.
type unobserved struct {
	ctx context.Context // Lock's, which may have ended
	e   Event
}

// observe calls Observe, if there is one, on the caller's goroutine.
func (c *Client) observe(ctx context.Context, e Event) {
	if c.opts.Observe != nil {
		e.Owner = c.opts.Owner
		if _, ok := e.Err.(*Error); !ok { // Lock's own error, which is marked already
			e.Err = marked(e.Err)
		}
		c.opts.Observe(ctx, e)
	}
}

// event returns an event of l with what all of them have.
func (l *Lease) event(kind EventKind, err error) Event {
	return Event{Kind: kind, ID: l.id, Op: l.op, Key: l.key, Shared: l.shared, Reentry: l.reentry, Fence: l.hold.fence, Err: err}
}

// observeLaterLocked queues an event of l for Observe.
func (c *Client) observeLaterLocked(l *Lease, e Event) {
	o := &c.observer
	// The queue keeps the order of events. One goroutine at a time serves it.
	o.queue = append(o.queue, unobserved{l.parent, e})
	if !o.running {
		o.running = c.spawnLocked(c.runObserver)
	}
}

// runObserver serves the queue until it is empty.
func (c *Client) runObserver() {
	o := &c.observer
	for {
		c.mu.Lock()
		events := o.queue
		o.queue = nil
		if len(events) == 0 {
			o.running = false
			c.mu.Unlock()
			return
		}
		c.mu.Unlock()

		// Observe is called without mu, because it is the user's code. So are the
		// methods of the context.
		for _, u := range events {
			c.observe(context.WithoutCancel(u.ctx), u.e)
		}
	}
}

// observeRenewFailedLocked queues the event of a failed renewal of h.
func (c *Client) observeRenewFailedLocked(h *hold, err error) {
	if c.opts.Observe == nil || len(h.leases) == 0 || len(c.observer.queue) >= maxUnobserved {
		return
	}
	// The outermost lease stands for those that have re-entered. If its EventAcquired was
	// not reported yet, the event is dropped: a later renewal reports another.
	if l := h.leases[0]; l.observed {
		c.observeLaterLocked(l, l.event(EventRenewFailed, err))
	}
}

// observeAcquired reports that a caller got l. If the lease has ended already,
// observeAcquired then also reports that end.
func (c *Client) observeAcquired(ctx context.Context, l *Lease, e Event) {
	c.observe(ctx, e)

	// The lease may have ended while Observe ran.
	c.mu.Lock()
	l.observed = true
	end := l.unseen
	l.unseen = nil
	now := end != nil && c.observeLostLocked(l, *end)
	c.mu.Unlock()
	if now {
		c.observe(context.WithoutCancel(l.parent), *end)
	}
}

// observeUnlock reports the end of l by an Unlock that has returned err.
func (c *Client) observeUnlock(ctx context.Context, l *Lease, err error) {
	if errors.Is(err, ErrLost) {
		c.observeLost(l, err)
		return
	}
	e := l.event(EventReleased, err)
	e.Hold = c.clock.now().sub(l.since)
	c.observe(ctx, e)
}

// observeLost reports that l has ended before it was unlocked.
func (c *Client) observeLost(l *Lease, err error) {
	if c.opts.Observe == nil {
		return
	}
	e := l.event(EventLost, err)
	e.Hold = c.clock.now().sub(l.since)
	c.mu.Lock()
	now := c.observeLostLocked(l, e)
	c.mu.Unlock()
	if now {
		c.observe(context.WithoutCancel(l.parent), e)
	}
}

// observeLostLocked queues e, the EventLost of l, or keeps it until EventAcquired was
// reported. If Close waits no longer, no goroutine may report it: then observeLostLocked
// returns true, and the caller reports e after it has released mu.
func (c *Client) observeLostLocked(l *Lease, e Event) (now bool) {
	switch {
	case !l.observed:
		l.unseen = &e
	case c.stopped:
		return true
	default:
		c.observeLaterLocked(l, e)
	}
	return false
}
