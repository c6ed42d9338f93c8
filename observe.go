package hasp

// maxUnobserved is how many events may wait for Observe. Beyond it, events of failed
// renewals are dropped, because such events repeat.
const maxUnobserved = 4096

// observer calls Options.Observe for events that no caller waits for. It does so on
// a goroutine of its own, so that an Observe that blocks delays neither renewals nor
// the end of a context.
type observer struct {
	// Guarded by Client.mu.
	running bool    // the goroutine exists; it ends when the queue is empty
	queue   []Event // in the order in which they happened
}

// observe calls Observe, if there is one, on the caller's goroutine.
func (c *Client) observe(e Event) {
	if c.opts.Observe != nil {
		e.Owner = c.opts.Owner
		c.opts.Observe(e)
	}
}

// observeLater queues e for Observe and returns at once.
func (c *Client) observeLater(e Event) {
	if c.opts.Observe == nil {
		return
	}

	c.mu.Lock()
	defer c.mu.Unlock()
	c.observeLaterLocked(e)
}

// observeLaterLocked is observeLater under mu.
func (c *Client) observeLaterLocked(e Event) {
	o := &c.observer
	if e.Kind == EventRenewFailed && len(o.queue) >= maxUnobserved {
		return
	}
	// The queue keeps the order of events. One goroutine at a time serves it.
	o.queue = append(o.queue, e)
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

		// Observe is called without mu, because it is the user's code.
		for _, e := range events {
			c.observe(e)
		}
	}
}

// observeAcquired reports that a caller got l. If the lease has ended already,
// observeAcquired then also reports that end.
func (c *Client) observeAcquired(l *Lease, e Event) {
	c.observe(e)

	// The lease may have ended while Observe ran.
	c.mu.Lock()
	l.observed = true
	switch end := l.unseen; {
	case end == nil:
	case c.stopped:
		// Close waits no longer, so no goroutine may report it.
		defer c.observe(*end) // after mu was unlocked
	default:
		c.observeLaterLocked(*end)
	}
	l.unseen = nil
	c.mu.Unlock()
}

// observeEnd reports the end of a lease: EventReleased on the caller's goroutine, and
// EventLost on the observer's. If EventAcquired was not reported yet, observeEnd
// only keeps the event, for observeAcquired.
func (c *Client) observeEnd(l *Lease, kind EventKind, err error) {
	if c.opts.Observe == nil {
		return
	}

	e := Event{Kind: kind, Key: l.key, Fence: l.hold.fence, Hold: c.clock.now().sub(l.since), Err: err}
	c.mu.Lock()
	switch {
	case !l.observed:
		l.unseen = &e // EventAcquired comes first
	case kind == EventReleased:
		defer c.observe(e) // after mu was unlocked
	case c.stopped:
		// Close waits no longer, so no goroutine may report it.
		defer c.observe(e) // after mu was unlocked
	default:
		c.observeLaterLocked(e)
	}
	c.mu.Unlock()
}
