package hasp

// maxUnobserved is how many events may wait for Observe. Beyond it, events of
// failed renewals are dropped, since such events repeat.
const maxUnobserved = 4096

// observer calls Options.Observe for events that no caller waits for. It does so
// on its own goroutine, which exists while there are such events. An Observe
// that blocks must delay neither renewals nor the end of a context.
type observer struct {
	// Guarded by Client.mu.
	running bool
	queue   []Event
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
		for _, e := range events {
			c.observe(e)
		}
	}
}

// observeAcquired reports that a caller was given l. If the lease has ended
// already, observeAcquired reports that end after it.
func (c *Client) observeAcquired(l *Lease, e Event) {
	c.observe(e)
	c.mu.Lock()
	defer c.mu.Unlock()
	l.observed = true
	if l.unseen != nil {
		c.observeLaterLocked(*l.unseen)
		l.unseen = nil
	}
}

// observeEnd reports how a lease has ended. It does so at once on the goroutine
// of an Unlock, and otherwise later. If the caller had left before it was given
// the lease, observeEnd reports nothing.
func (c *Client) observeEnd(l *Lease, kind EventKind, err error) {
	if c.opts.Observe == nil {
		return
	}
	e := Event{Kind: kind, Key: l.key, Fence: l.hold.fence, Hold: c.clock.now().sub(l.since), Err: err}
	c.mu.Lock()
	switch {
	case !l.observed:
		l.unseen = &e
	case kind == EventReleased:
		defer c.observe(e) // without mu
	default:
		c.observeLaterLocked(e)
	}
	c.mu.Unlock()
}
