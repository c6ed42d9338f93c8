package hasp

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/hasplock/hasp/backend"
)

// wait is one caller's way to a hold.
type wait struct {
	c       *Client
	r       request
	line    *line
	start   instant
	once    bool    // one attempt and no more
	end     instant // of WithMaxWait
	tries   int
	said    error          // why the caller does not have the key, as far as is known
	refused bool           // the last answer of the store to this caller was ErrHeld
	place   *backend.Claim // in the driver's queue, which is kept though the driver does not wait
}

// waits are for reuse: nobody refers to a wait that is over.
var waits = sync.Pool{New: func() any { return new(wait) }}

// lock is Lock and TryLock.
func (c *Client) lock(ctx context.Context, op, key string, opts []Option) (*Lease, error) {
	w := waits.Get().(*wait)
	defer func() {
		*w = wait{}
		waits.Put(w)
	}()
	w.c, w.start, w.end = c, c.clock.now(), never
	l, err := w.take(ctx, op, key, opts)
	if err != nil {
		err = &Error{op, key, err}
		c.observe(Event{Kind: EventRefused, Key: key, Wait: c.clock.now().sub(w.start), Tries: w.tries, Err: err})
		return nil, err
	}
	if c.opts.Observe != nil {
		c.observe(Event{Kind: EventAcquired, Key: key, Fence: l.Fence(), Wait: l.since.sub(w.start), Tries: w.tries})
	}
	return l, nil
}

func (w *wait) take(ctx context.Context, op, key string, opts []Option) (*Lease, error) {
	c, r := w.c, &w.r
	if err := c.request(r, op, key, opts); err != nil {
		return nil, err
	}
	if ctx.Err() != nil {
		return nil, ended(ctx, nil)
	}
	r.around, _ = ctx.Value(leaseKey).(*Lease)
	if outer := c.innermost(r.around, r.key); outer != nil {
		if l, err := c.reenter(ctx, r, outer); l != nil || err != nil {
			return l, err
		}
	}
	w.once = r.op == "trylock" || r.bounded && r.maxWait == 0
	if r.bounded && !w.once {
		w.end = w.start.add(r.maxWait)
	}

	c.mu.Lock()
	if c.closing.Err() != nil {
		c.mu.Unlock()
		return nil, ErrClosed
	}
	ln := c.enter(r.key)
	w.line = ln
	switch {
	case !c.lined && (!w.once || ln.callers == 1), c.lined && !ln.talking:
		ln.talking = true
		c.mu.Unlock()
	case w.once:
		err := c.why(ln)
		c.leave(ln)
		c.mu.Unlock()
		return nil, err
	default:
		if l, err := w.stand(ctx); l != nil || err != nil {
			return l, err
		}
	}
	h, err := w.talk(ctx)
	c.mu.Lock()
	defer c.mu.Unlock()
	if err == nil && c.closing.Err() != nil {
		// Close has looked for holders already.
		c.reapLocked(h.claim, reapOnce)
		err = ErrClosed
	}
	if err != nil {
		if c.lined {
			c.pass(ln, w.place)
		}
		c.leave(ln)
		return nil, err
	}
	return c.hold(ctx, r, ln, h), nil
}

// stand waits in line until it gets the key, an error, or neither, which is
// the head. It is called with mu held and returns without.
func (w *wait) stand(ctx context.Context) (*Lease, error) {
	c, ln := w.c, w.line
	t := turn{r: &w.r, ctx: ctx, since: w.start, ready: make(chan ticket, 1)}
	ln.waiting = append(ln.waiting, t)
	c.mu.Unlock()
	var timeout <-chan time.Time
	if w.end != never {
		timer := time.NewTimer(w.end.sub(c.clock.now()))
		defer timer.Stop()
		timeout = timer.C
	}
	var err error
	select {
	case tk := <-t.ready:
		return w.turnCame(ctx, tk)
	case <-ctx.Done():
	case <-timeout:
	case <-c.closing.Done():
		err = ErrClosed
	}
	c.mu.Lock()
	refusal := c.why(ln)
	var handed *Lease
	if ln.drop(t) {
		c.leave(ln)
	} else if tk := <-t.ready; tk.lease != nil {
		handed = tk.lease
	} else {
		if tk.err == nil {
			c.yield(ln, tk.place)
		}
		c.leave(ln)
	}
	c.mu.Unlock()
	if handed != nil {
		c.spawn(func() { handed.Unlock(ctx) })
	}
	if err != nil {
		return nil, err
	}
	return nil, ended(ctx, refusal) // not under mu: ctx may be a lease's
}

func (w *wait) turnCame(ctx context.Context, tk ticket) (*Lease, error) {
	if tk.err != nil {
		w.c.mu.Lock()
		w.c.leave(w.line)
		w.c.mu.Unlock()
		return nil, tk.err
	}
	if tk.lease == nil {
		w.said = &backend.HeldError{} // until now, by this Client
		w.refused = w.c.traits.Ordered
		w.place = tk.place
		if d := min(tk.after, w.left(ctx)-w.margin()); d > 0 {
			w.sleep(ctx, d)
		}
	}
	return tk.lease, nil
}

// talk asks the store until it has the key or the wait is over.
func (w *wait) talk(ctx context.Context) (*hold, error) {
	for attempt := 1; ; attempt++ {
		if ctx.Err() != nil || w.c.closing.Err() != nil {
			return nil, w.why(ctx)
		}
		last := w.once || w.lastCall(ctx)
		waits := w.waits()
		asked := w.start
		if attempt > 1 || w.said != nil {
			asked = w.c.clock.now()
		}
		h, err := w.ask(ctx, asked, waits)
		if err == nil {
			return h, nil
		}
		if waits {
			asked = w.c.outageOf(err) // the wait itself may have begun long before
		}
		if over, why := w.over(ctx, err, asked, last); over {
			return nil, why
		}
		if !waits && w.waits() {
			continue // the driver knows better than to sleep
		}
		if !w.sleep(ctx, w.pause(ctx, attempt, err)) {
			return nil, w.why(ctx)
		}
	}
}

// waits reports whether the driver is to wait rather than to make one attempt:
// it can, and an attempt was in vain or would be, since others of this Client
// want the key too, or others of other Clients did a moment ago.
func (w *wait) waits() bool {
	if w.c.waiter == nil || w.once {
		return false
	}
	if w.refused || !w.c.traits.Ordered {
		return w.refused
	}
	w.c.mu.Lock()
	defer w.c.mu.Unlock()
	return w.line.callers > 1 || w.c.sought.lately(w.line.key, w.c.clock.now())
}

// ask makes one call to the store: an attempt, or a Waiter's wait.
func (w *wait) ask(ctx context.Context, asked instant, waits bool) (*hold, error) {
	c := w.c
	w.tries++
	if waits {
		return w.await(ctx)
	}
	return c.acquire(ctx, c.claim(&w.r, newToken()), w.bound(), asked)
}

// bound is how long a call may take: Timeout, less what an outage has used of
// it, and not past the end of the wait, but long enough for an answer from a
// store that is well.
func (w *wait) bound() time.Duration {
	c, ln := w.c, w.line
	if c.traits.Reach == backend.Process {
		return c.opts.Timeout // its calls do not block
	}
	least := min(max(4*c.roundTrip(), 50*time.Millisecond), c.opts.Timeout)
	now := c.clock.now()
	d := min(c.opts.Timeout, w.end.sub(now))
	c.mu.Lock()
	defer c.mu.Unlock()
	if ln.sick {
		d = min(d, c.opts.Timeout-now.sub(max(ln.ailing, w.start)))
	}
	return max(d, least)
}

// await has the driver wait, for as long as this caller may, in the place that
// it has or in a new one.
func (w *wait) await(ctx context.Context) (*hold, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(w.c.closing, cancel)()
	if w.end != never {
		var stop context.CancelFunc
		ctx, stop = context.WithDeadline(ctx, w.c.clock.time(w.end))
		defer stop()
	}
	cl := w.c.claim(&w.r, "")
	cl.Stays = w.c.traits.Ordered && w.c.lined
	if w.place != nil {
		cl.Token = w.place.Token
	} else {
		cl.Token = newToken()
	}
	h, err := w.c.await(ctx, cl)
	w.place = nil
	if cl.Stays && errors.Is(err, ErrHeld) {
		place := cl // not cl itself, which would be allocated for every wait
		w.place = &place
	}
	return h, err
}

// over decides after a failed call whether the wait is over, and with what.
// asked is when it began, and last says that there is no time for another.
func (w *wait) over(ctx context.Context, err error, asked instant, last bool) (bool, error) {
	var sick time.Duration
	switch {
	case errors.Is(err, ErrHeld):
		w.said, w.refused = err, true
		w.health(err, asked)
		w.seek()
	case definite(err), errors.Is(err, ErrClosed):
		return true, err
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		// Not the store's word: this wait has ended.
	default:
		sick = w.health(err, asked)
		if !last || !errors.Is(w.said, ErrHeld) {
			w.said, w.refused = err, false
		}
	}
	switch {
	case ctx.Err() != nil, w.c.closing.Err() != nil:
		return true, w.why(ctx)
	case w.once, sick >= w.c.opts.Timeout:
		return true, err
	case last && w.lastCall(ctx), w.c.clock.now() >= w.end:
		w.outlast(ctx)
		return true, w.why(ctx)
	}
	return false, nil
}

// outlast waits for the end of ctx, if that is what leaves no time for
// another call, so that the error can name it.
func (w *wait) outlast(ctx context.Context) {
	d, ok := ctx.Deadline()
	if !ok || !w.c.clock.time(w.end).After(d) {
		return
	}
	timer := time.NewTimer(time.Until(d) + grace)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	case <-w.c.closing.Done():
	}
}

// health notes what a call said that began at asked, and returns for how long
// the store has not answered while this caller waited.
func (w *wait) health(said error, asked instant) time.Duration {
	c, ln := w.c, w.line
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.clock.now()
	ln.said = said
	if errors.Is(said, ErrHeld) {
		ln.sick = false
		return 0
	}
	if !ln.sick {
		ln.sick, ln.ailing = true, asked
	}
	return now.sub(max(ln.ailing, w.start))
}

// outageOf is when an outage began that a Waiter reports with err: when it
// says so, and else a moment ago.
func (c *Client) outageOf(err error) instant {
	now := c.clock.now()
	var dated interface{ Since() time.Time }
	if !errors.As(err, &dated) {
		return now
	}
	return min(c.clock.at(dated.Since(), c.clock.slept.Load()), now)
}

// seek notes that others have the key that this caller wants.
func (w *wait) seek() {
	if !w.c.traits.Ordered {
		return
	}
	w.c.mu.Lock()
	defer w.c.mu.Unlock()
	w.c.sought.note(w.line.key, w.c.clock.now())
}

// sought is the keys that an ordered driver has refused lately, and when it
// did so first: a caller that took one attempt to find them held once more
// would come later to its place in the queue, and pay a round trip for that.
type sought map[string]instant

const (
	soughtFor = time.Second
	maxSought = 256 // keys; what is forgotten costs a round trip
)

func (s *sought) note(key string, now instant) {
	if *s == nil || len(*s) >= maxSought {
		*s = sought{}
	}
	if !s.lately(key, now) {
		(*s)[key] = now
	}
}

func (s *sought) lately(key string, now instant) bool {
	at, ok := (*s)[key]
	if ok && now.sub(at) >= soughtFor {
		delete(*s, key)
		ok = false
	}
	return ok
}

// why is the error of a wait that its own bounds have ended.
func (w *wait) why(ctx context.Context) error {
	if w.c.closing.Err() != nil {
		return ErrClosed
	}
	if w.said == nil {
		w.said = w.here()
	}
	if err := ended(ctx, w.said); err != nil {
		return err
	}
	return noAnswer(w.c.clock.now().sub(w.start))
}

// here is ErrHeld if this Client itself holds the key, which it knows without
// an answer of the store.
func (w *wait) here() error {
	w.c.mu.Lock()
	defer w.c.mu.Unlock()
	if w.line.hold == nil {
		return nil
	}
	return w.c.why(w.line)
}

// ended is err as the error of a wait, with the end of ctx if it has ended.
func ended(ctx context.Context, err error) error {
	end := ctx.Err() // first: a lease's context looks at the clock
	cause := context.Cause(ctx)
	if end == nil {
		d, ok := ctx.Deadline()
		if !ok || time.Now().Before(d) {
			return err
		}
		end = context.DeadlineExceeded // whose timer is late
		cause = end
	}
	if cause != end && !errors.Is(cause, end) {
		cause = &waitError{end, cause}
	}
	if err == nil {
		return cause
	}
	return &waitError{err, cause}
}
