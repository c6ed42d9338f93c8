package conformance

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/hasplock/hasp/backend"
)

// driver is a driver under test, with the steps of clauses as methods.
type driver struct {
	backend.Driver
	e       *env
	once    sync.Once      // closes Driver
	due     sync.WaitGroup // counts the second releases of the method abandon
	handles sync.Map       // the handle of each token, even after its hold has ended
}

// note stores the handle of the grant g, so that later calls with the token of c can pass it.
func (d *driver) note(c backend.Claim, g backend.Grant) {
	if g.Handle != nil {
		d.handles.Store(c.Token, g.Handle)
	}
}

// noted returns c with the handle, if any, that the method note has stored for the token of c.
func (d *driver) noted(c backend.Claim) backend.Claim {
	c.Handle, _ = d.handles.Load(c.Token)
	return c
}

// opener is the type of Harness.Open.
type opener = func(ctx context.Context, store string) (backend.Driver, error)

// open opens a driver. The end of the try closes the driver.
func (e *env) open() *driver { return e.openBy(e.h.Open, e.store) }

func (e *env) drivers() []*driver { return []*driver{e.open(), e.open(), e.open()} }

func (e *env) openAt(store string) *driver { return e.openBy(e.h.Open, store) }

// openBy does the same as the method open, for any strategy and any address of the store.
func (e *env) openBy(open opener, store string) *driver {
	d := &driver{Driver: e.openOwn(open, store), e: e}
	e.onEnd(func() { d.Close() })
	return d
}

// openOwn opens a driver that the caller must close, as a Client does.
func (e *env) openOwn(open opener, store string) backend.Driver {
	ctx, cancel := context.WithTimeout(e.ctx, e.patience)
	defer cancel()

	d, err := open(ctx, store)
	mustf(err, "open a driver")
	require(d != nil, "open a driver: nil driver")
	return d
}

// Close closes the driver after the second releases of the method abandon. A repeated Close does
// nothing.
func (d *driver) Close() (err error) {
	d.once.Do(func() {
		d.due.Wait()
		err = d.Driver.Close()
	})
	return err
}

// soon returns a context for one call. It ends only if the call hangs, so it ends later than a
// context of the engine would.
func (d *driver) soon() (context.Context, context.CancelFunc) {
	return context.WithTimeout(d.e.ctx, d.e.patience)
}

// acquire makes one attempt. If it is granted, the end of the try releases the hold.
func (d *driver) acquire(c backend.Claim) (backend.Grant, error) {
	ctx, cancel := d.soon()
	defer cancel()

	began := time.Now()
	g, err := d.Acquire(ctx, c)
	late := time.Since(began) >= c.TTL-backend.Drift(c.TTL)
	switch {
	case err == nil:
		d.mine(c)
		d.note(c, g)
	case late && !errors.Is(err, backend.ErrHeld):
		// A slow machine may have caused err, because a driver may return an error instead of a
		// grant whose term has ended.
		err = slow("%w", err)
	}
	return g, err
}

// mine registers c, so that the end of the try releases c.
func (d *driver) mine(c backend.Claim) {
	d.e.mu.Lock()
	defer d.e.mu.Unlock()
	d.e.held[c.Token] = func(ctx context.Context) { d.Driver.Release(ctx, c) }
}

// take acquires c, whose key must be free, or ends the try.
func (d *driver) take(c backend.Claim) backend.Grant {
	g, err := d.acquire(c)
	mustf(err, "acquire %.60q, which is free", c.Key)
	return g
}

// hold acquires a new key for ttl, or ends the try.
func (d *driver) hold(ttl time.Duration) backend.Claim {
	c := d.e.claim(ttl)
	d.take(c)
	return c
}

func (d *driver) holdMany(n int, ttl time.Duration) []backend.Claim {
	cs := make([]backend.Claim, n)
	for i := range cs {
		cs[i] = d.hold(ttl)
	}
	return cs
}

// release releases c with the handle that was noted for its token. After a success, the end of the
// try need not release c again.
func (d *driver) release(c backend.Claim) error {
	ctx, cancel := d.soon()
	defer cancel()

	err := d.Release(ctx, d.noted(c))
	if err == nil {
		d.e.mu.Lock()
		delete(d.e.held, c.Token)
		d.e.mu.Unlock()
	}

	return err
}

// give releases holds, or ends the try.
func (d *driver) give(cs ...backend.Claim) {
	for _, c := range cs {
		mustf(d.release(c), "release %.60q by its holder", c.Key)
	}
}

// giveIfHeld releases c, and accepts ErrLost. It repeats a release of unknown outcome. For example,
// of two releases at the same time, each may find the hold on too few nodes of a quorum.
func (d *driver) giveIfHeld(c backend.Claim, what string) {
	d.e.retry("release "+what, func() error {
		err := d.release(c)
		if errors.Is(err, backend.ErrLost) {
			return nil
		}
		return err
	})
}

// errUnanswered takes the place of an answer if Renew has not called done for a claim.
var errUnanswered = errors.New("renew returned without an answer")

// renewBy renews c alone. It returns the answer for c, or errUnanswered.
func renewBy(ctx context.Context, d backend.Driver, c backend.Claim) (g backend.Grant, err error) {
	err = errUnanswered
	d.Renew(ctx, []backend.Claim{c}, func(_ int, got backend.Grant, e error) { g, err = got, e })
	return g, err
}

// renew renews c with the handle that was noted for its token, and notes the new handle.
func (d *driver) renew(c backend.Claim) (backend.Grant, error) {
	ctx, cancel := d.soon()
	defer cancel()
	g, err := renewBy(ctx, d.Driver, d.noted(c))
	if err == nil {
		d.note(c, g)
	}
	return g, err
}

// renews does the same as the method renew, but returns no grant.
func (d *driver) renews(c backend.Claim) error { return errOf(d.renew(c)) }

// keep renews a hold, or ends the try.
func (d *driver) keep(c backend.Claim) backend.Grant {
	g, err := d.renew(c)
	mustf(err, "renew %.60q by its holder", c.Key)
	return g
}

// lost renews and releases c. It ends the try unless both calls return ErrLost.
func (d *driver) lost(c backend.Claim, what string) {
	must(is("renewal of "+what, d.renews(c), backend.ErrLost))
	must(is("release of "+what, d.release(c), backend.ErrLost))
}

// refused returns an error unless an attempt at key returns ErrHeld.
func (d *driver) refused(key string) error { return d.refuses(d.e.claimOf(key, d.e.long)) }

// refuses returns an error unless an attempt of c returns ErrHeld.
func (d *driver) refuses(c backend.Claim) error {
	return is(fmt.Sprintf("acquire %.60q, which is held", c.Key), errOf(d.acquire(c)),
		backend.ErrHeld)
}

// refusal makes an attempt at key, which must be refused, and returns the details of the refusal,
// if there are any. The present term must not run for longer than the argument rest.
func (d *driver) refusal(key string, rest time.Duration) (held backend.HeldError) {
	_, err := d.acquire(d.e.claimOf(key, d.e.long))
	must(is("acquire a key that is held", err, backend.ErrHeld))
	var details *backend.HeldError
	if errors.As(err, &details) {
		held = *details
	}

	// Allow a second, because a store may count terms in whole seconds.
	require(held.RetryAfter >= 0 && held.RetryAfter <= rest+time.Second,
		"a refusal for %v, want %v at most", held.RetryAfter, rest)
	return held
}

// granted makes one attempt at key, and releases the hold. It returns an error if one of these
// calls fails.
func (d *driver) granted(key string) error {
	c := d.e.claimOf(key, d.e.long)
	if _, err := d.acquire(c); err != nil {
		return fmt.Errorf("acquire %.60q, which is free: %w", key, err)
	}
	return d.release(c)
}

// grantedAtLast is like the method granted, but repeats a refused attempt until key is free.
func (d *driver) grantedAtLast(key string) error { return d.givesBack(d.seizes(key, d.e.long)) }

// givesBack releases c if err, the error of its attempt, is nil. Otherwise it returns err.
func (d *driver) givesBack(c backend.Claim, err error) error {
	if err != nil {
		return err
	}
	return d.release(c)
}

// seize makes attempts until one is granted. The function claim returns the claim of each attempt.
// The results are the claim and the grant of the last attempt, and an error if seize has given up:
// the attempt failed with an error other than ErrHeld, or was still refused after e.patience.
func (d *driver) seize(claim func() backend.Claim) (c backend.Claim, g backend.Grant, err error) {
	err = d.e.try(func() {
		d.e.retry(fmt.Sprintf("acquire %.60q", claim().Key), func() (refusal error) {
			c = claim()
			g, refusal = d.acquire(c)
			if !errors.Is(refusal, backend.ErrHeld) {
				must(refusal) // not a refusal, so do not repeat the attempt
			}
			return refusal
		})
	})

	return c, g, err
}

// seizes makes attempts at key until one is granted.
func (d *driver) seizes(key string, ttl time.Duration) (backend.Claim, error) {
	c, _, err := d.seize(func() backend.Claim { return d.e.claimOf(key, ttl) })
	return c, err
}

// succeed calls the method seizes, and ends the try if that method returns an error.
func (d *driver) succeed(key string, ttl time.Duration) backend.Claim {
	c, err := d.seizes(key, ttl)
	must(err)
	return c
}

// outlast waits until, by the store's clock, all older holds with the term ttl have expired. To
// find out, it takes a new key for the term ttl, and waits until another token gets that key.
func (d *driver) outlast(ttl time.Duration) {
	c := d.hold(ttl)
	d.e.sleep(ttl * 9 / 10) // most of the term, in which attempts would be refused
	next, err := d.seizes(c.Key, d.e.long)
	mustf(err, "wait for the end of a term of %v", ttl)
	d.give(next)
}

// inspect returns the status of key, or ends the try.
func (d *driver) inspect(key string) backend.Status {
	ctx, cancel := d.soon()
	defer cancel()
	s, err := d.Driver.(backend.Inspector).Inspect(ctx, key)
	mustf(err, "inspect %.60q", key)
	return s
}

// shows ends the try unless Inspect reports the hold of c.
func (d *driver) shows(c backend.Claim, fence uint64) {
	matches("inspect", d.inspect(c.Key), c, fence)
}

// matches ends the try unless s, which a call has returned, is the status of a key that c holds.
// The status may lack the owner and the fence.
func matches(call string, s backend.Status, c backend.Claim, fence uint64) {
	what := call + " " + brief(c.Key)
	require(s.Held, "%s, which is held: %+v", what, s)
	require(s.Owner == "" || s.Owner == c.Owner, "%s: owner %q, want %q", what, s.Owner, c.Owner)
	require(s.Fence == 0 || s.Fence == fence, "%s: fence %d, want %d", what, s.Fence, fence)

	// Allow a second, because a store may count terms in whole seconds.
	require(s.TTL > 0 && s.TTL <= c.TTL+time.Second, "%s: %v left of a term of %v", what, s.TTL,
		c.TTL)
}

// breakKey breaks key, or ends the try.
func (d *driver) breakKey(key string) {
	ctx, cancel := d.soon()
	defer cancel()
	mustf(d.Driver.(backend.Inspector).Break(ctx, key), "break %.60q", key)
}

// deadlineOf returns the deadline of a hold, after which the holder must not rely on the hold. The
// grant g is the result of the last call that prolonged the hold. That call began at the time
// called.
func deadlineOf(g backend.Grant, c backend.Claim, called time.Time) time.Time {
	if g.Until.IsZero() {
		return called.Add(c.TTL - backend.Drift(c.TTL))
	}
	return g.Until
}

// pendingWait is a Wait in the background.
type pendingWait struct {
	d     *driver
	c     backend.Claim
	done  chan error    // receives the error of the Wait, for the check
	grant backend.Grant // read it only after a receive from the channel done
	ended chan struct{} // closed when the Wait has returned, for the end of the try
	stop  context.CancelFunc
}

// wait calls the function wait, and registers the hold that this returns.
func (d *driver) wait(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	g, err := wait(ctx, d.Driver, c)
	if err == nil {
		d.mine(c)
		d.note(c, g)
	}
	return g, err
}

// want begins a Wait for c.
func (d *driver) want(c backend.Claim) *pendingWait {
	ctx, stop := context.WithCancel(d.e.ctx)
	w := &pendingWait{d: d, c: c, done: make(chan error, 1), ended: make(chan struct{}), stop: stop}

	// The end of the try stops the Wait, and waits until it has registered the hold that it may
	// have got.
	d.e.beforeReleases(func(end context.Context) {
		stop()
		select {
		case <-w.ended:
		case <-end.Done():
		}
	})

	go func() {
		defer close(w.ended)
		g, err := d.wait(ctx, c)
		w.grant = g
		w.done <- err
	}()

	return w
}

func (d *driver) wants(key string) *pendingWait { return d.want(d.e.claimOf(key, d.e.long)) }

// granted ends the try unless the Wait gets the key.
func (w *pendingWait) granted(what string) { mustf(w.d.e.arrives(what, w.done), "%s", what) }

// use renews and releases the hold that the Wait has got.
func (w *pendingWait) use() { w.d.keep(w.c); w.d.give(w.c) }

// served ends the try unless the Wait gets the key. Then served renews and releases the hold.
func (w *pendingWait) served(what string) { w.granted(what); w.use() }

// servedOrUnknown does the same as the method served, but also accepts an error of unknown outcome,
// and returns that error.
func (w *pendingWait) servedOrUnknown(what string) error {
	err := w.d.e.arrives(what, w.done)
	if err == nil {
		w.use()
		return nil
	}
	must(unknown(what, err))
	return err
}

// cancel ends a Wait for a held key and returns the error of the Wait.
func (w *pendingWait) cancel() error {
	w.stop()
	err := w.d.e.arrives("a cancelled Wait", w.done)
	require(err != nil, "a cancelled Wait for a held key: granted")
	return err
}

// abandon cleans up after a Wait that returned err, as the engine does. If the outcome is unknown,
// abandon releases the claim at once, and again after the timeout. If the Wait was granted the key,
// or if err is definite, abandon does nothing.
func (w *pendingWait) abandon(err error) {
	// An error that matches the error of the context is of unknown outcome, even if it also matches
	// ErrHeld.
	cancelled := errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
	if err == nil || definite(err) && !cancelled {
		return
	}

	_ = w.d.release(w.c)
	w.d.due.Add(1)
	again := time.AfterFunc(w.c.Timeout, func() {
		defer w.d.due.Done()
		_ = w.d.release(w.c)
	})

	// If the try ends sooner, omit the second release, so that Close need not wait for it.
	w.d.e.onEnd(func() {
		if again.Stop() {
			w.d.due.Done()
		}
	})
}

// queued waits until Inspect reports n waiters for key. If the driver has no Inspect, or if it is
// not Ordered and so has no queue to report, queued only sleeps. Then the Waits have probably asked
// for the key.
func (e *env) queued(d *driver, key string, n int) {
	if !e.inspector || !e.traits.Ordered {
		e.sleep(e.term / 8)
		return
	}
	e.until(fmt.Sprintf("%d waiters in the result of Inspect", n), func() bool {
		return len(d.inspect(key).Waiters) >= n
	})
}
