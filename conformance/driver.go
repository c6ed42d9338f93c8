package conformance

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hasplock/hasp/backend"
)

// driver is a driver under test, with the steps of clauses as methods.
type driver struct {
	backend.Driver
	e *env
}

// open opens a driver that the end of the try closes.
func (e *env) open() *driver { return e.openAt(e.store) }

func (e *env) openAt(store string) *driver {
	d := e.openOwn(store)
	e.onEnd(func() { d.Close() })
	return d
}

// openOwn opens a driver that the caller closes.
func (e *env) openOwn(store string) *driver { return e.openBy(e.h.Open, store) }

func (e *env) openBy(open func(context.Context, string) (backend.Driver, error), store string) *driver {
	ctx, cancel := context.WithTimeout(e.ctx, patience)
	defer cancel()
	d, err := open(ctx, store)
	if err == nil && d == nil {
		err = errors.New("nil driver")
	}
	if err != nil {
		must(fmt.Errorf("open a driver: %w", err))
	}
	return &driver{d, e}
}

// acquire makes one attempt, with more time than the engine gives it. A driver may
// refuse a grant that arrives after the end of its term, so such an error is slow.
func (d *driver) acquire(c backend.Claim) (backend.Grant, error) {
	ctx, cancel := context.WithTimeout(d.e.ctx, patience)
	defer cancel()
	began := time.Now()
	g, err := d.Acquire(ctx, c)
	switch {
	case err == nil:
		d.mine(c)
	case !errors.Is(err, backend.ErrHeld) && time.Since(began) >= c.TTL-backend.Drift(c.TTL):
		err = slow("%w", err)
	}
	return g, err
}

// mine registers c, so that the end of the try releases it.
func (d *driver) mine(c backend.Claim) {
	d.e.mu.Lock()
	defer d.e.mu.Unlock()
	d.e.held[c.Token] = holding{d, c}
}

// take acquires a free key. It ends the try if the key is not granted.
func (d *driver) take(c backend.Claim) backend.Grant {
	g, err := d.acquire(c)
	if err != nil {
		must(fmt.Errorf("acquire %.60q, which is free: %w", c.Key, err))
	}
	return g
}

// hold acquires a new key for ttl.
func (d *driver) hold(ttl time.Duration) backend.Claim {
	c := d.e.claim(ttl)
	d.take(c)
	return c
}

func (d *driver) release(c backend.Claim) error {
	ctx, cancel := context.WithTimeout(d.e.ctx, patience)
	defer cancel()
	err := d.Release(ctx, c)
	if err == nil {
		d.e.mu.Lock()
		delete(d.e.held, c.Token)
		d.e.mu.Unlock()
	}
	return err
}

// give releases a hold. It ends the try if that fails.
func (d *driver) give(c backend.Claim) {
	if err := d.release(c); err != nil {
		must(fmt.Errorf("release %.60q by its holder: %w", c.Key, err))
	}
}

var errUnanswered = errors.New("renew returned without an answer")

// renew renews one hold.
func (d *driver) renew(c backend.Claim) (g backend.Grant, err error) {
	ctx, cancel := context.WithTimeout(d.e.ctx, patience)
	defer cancel()
	err = errUnanswered
	d.Renew(ctx, []backend.Claim{c}, func(_ int, got backend.Grant, e error) { g, err = got, e })
	return g, err
}

// renews is renew for callers that need no grant.
func (d *driver) renews(c backend.Claim) error {
	_, err := d.renew(c)
	return err
}

// keep renews a hold. It ends the try if that fails.
func (d *driver) keep(c backend.Claim) backend.Grant {
	g, err := d.renew(c)
	if err != nil {
		must(fmt.Errorf("renew %.60q by its holder: %w", c.Key, err))
	}
	return g
}

// refused returns an error unless an attempt at key returns ErrHeld.
func (d *driver) refused(key string) error {
	c := d.e.claimOf(key, d.e.h.Long)
	switch _, err := d.acquire(c); {
	case err == nil:
		d.release(c)
		return fmt.Errorf("acquire %.60q, which is held: granted, want ErrHeld", key)
	case !errors.Is(err, backend.ErrHeld):
		return fmt.Errorf("acquire %.60q, which is held: %q, want ErrHeld", key, err)
	}
	return nil
}

// granted returns an error unless one attempt gets key. It releases key again.
func (d *driver) granted(key string) error {
	c := d.e.claimOf(key, d.e.h.Long)
	if _, err := d.acquire(c); err != nil {
		return fmt.Errorf("acquire %.60q, which is free: %w", key, err)
	}
	return d.release(c)
}

// grantedAtLast is granted for a key that may become free only later.
func (d *driver) grantedAtLast(key string) error {
	c, _, err := d.seize(key, d.e.h.Long)
	if err != nil {
		return err
	}
	return d.release(c)
}

// seize tries to acquire key until it is granted, and returns the time after the
// grant.
func (d *driver) seize(key string, ttl time.Duration) (c backend.Claim, at time.Time, err error) {
	err = d.e.poll(fmt.Sprintf("acquire %.60q", key), func() (bool, error) {
		c = d.e.claimOf(key, ttl)
		_, err := d.acquire(c)
		at = time.Now()
		if errors.Is(err, backend.ErrHeld) {
			return false, nil
		}
		return err == nil, err
	})
	return c, at, err
}

// outlast waits for the end of a term that begins now. It takes a key of its own
// and does not renew it. When that hold has expired by the store's clock, every
// older hold of the same term has as well.
func (d *driver) outlast(ttl time.Duration) {
	c := d.e.claim(ttl)
	d.take(c)
	s, _, err := d.seize(c.Key, d.e.h.Long)
	if err != nil {
		must(fmt.Errorf("wait for the end of a term of %v: %w", ttl, err))
	}
	d.give(s)
}

// wait calls Wait of a driver that is a Waiter.
func (d *driver) wait(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	g, err := d.Driver.(backend.Waiter).Wait(ctx, c)
	if err == nil {
		d.mine(c)
	}
	return g, err
}

// wanted is a Wait in flight.
type wanted struct {
	c     backend.Claim
	done  chan error
	grant backend.Grant // after done
	ended chan struct{}
	stop  context.CancelFunc
}

// want begins a Wait for c. The channel done gets its outcome.
func (d *driver) want(c backend.Claim) *wanted {
	ctx, stop := context.WithCancel(d.e.ctx)
	w := &wanted{c: c, done: make(chan error, 1), ended: make(chan struct{}), stop: stop}
	d.e.mu.Lock()
	d.e.wants = append(d.e.wants, w)
	d.e.mu.Unlock()
	go func() {
		defer close(w.ended)
		g, err := d.wait(ctx, c)
		w.grant = g
		w.done <- err
	}()
	return w
}

// abandon does what the engine does after a Wait that returned err. If the
// outcome is unknown, it releases c at once, and again after c.Timeout.
func (d *driver) abandon(c backend.Claim, err error) {
	cancelled := errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
	if err == nil || !cancelled && unknown("wait", err) != nil {
		return
	}

	_ = d.release(c)
	again := time.AfterFunc(c.Timeout, func() { _ = d.release(c) })
	d.e.onEnd(func() { again.Stop() })
}

// inspect returns the status of key. It ends the try if that fails.
func (d *driver) inspect(key string) backend.Status {
	ctx, cancel := context.WithTimeout(d.e.ctx, patience)
	defer cancel()
	s, err := d.Driver.(backend.Inspector).Inspect(ctx, key)
	if err != nil {
		must(fmt.Errorf("inspect %.60q: %w", key, err))
	}
	return s
}

func (d *driver) breakKey(key string) {
	ctx, cancel := context.WithTimeout(d.e.ctx, patience)
	defer cancel()
	if err := d.Driver.(backend.Inspector).Break(ctx, key); err != nil {
		must(fmt.Errorf("break %.60q: %w", key, err))
	}
}

// until returns the time until which a holder may rely on its hold.
func until(g backend.Grant, c backend.Claim, called time.Time) time.Time {
	if g.Until.IsZero() {
		return called.Add(c.TTL - backend.Drift(c.TTL))
	}
	return g.Until
}
