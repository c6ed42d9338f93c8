package broken

import (
	"context"
	"errors"
	"time"

	"github.com/hasplock/hasp/backend"
)

// kind is the set of interfaces of a driver.
type kind int

const (
	polls  kind = iota // only a Driver
	waits              // a Waiter and an Inspector, with fences
	orders             // like waits, and keeps the order of arrival
)

// driver is a correct driver until a fault replaces some of its parts.
type driver struct {
	way  *way
	kind kind
	typ  string // the type of its records: their tokens begin with it

	// Parts that faults replace. The first four name keys, compare tokens, choose
	// terms and compute deadlines.
	key      func(key string) string
	mine     func(c backend.Claim, token string) bool
	ttl      func(c backend.Claim) time.Duration
	deadline func(c backend.Claim, called time.Time) time.Time
	traits   func() backend.Traits
	acquire  call
	wait     call
	renewOne call
	renew    func(ctx context.Context, cs []backend.Claim, done func(int, backend.Grant, error))
	release  func(ctx context.Context, c backend.Claim) error
	inspect  func(ctx context.Context, key string) (backend.Status, error)
	breakKey func(ctx context.Context, key string) error
	quit     func(c backend.Claim)
	close    func() error
}

// call is Acquire, Wait, or the renewal of one hold.
type call = func(ctx context.Context, c backend.Claim) (backend.Grant, error)

// asks returns next with other claims.
func asks(next call, f func(c *backend.Claim)) call {
	return func(ctx context.Context, c backend.Claim) (backend.Grant, error) {
		f(&c)
		return next(ctx, c)
	}
}

// answers returns next with other results.
func answers(next call, f func(c backend.Claim, g *backend.Grant, err *error)) call {
	return func(ctx context.Context, c backend.Claim) (backend.Grant, error) {
		g, err := next(ctx, c)
		f(c, &g, &err)
		return g, err
	}
}

// onGrant makes Acquire run f in the store after each grant.
func (d *driver) onGrant(f func(s *store, c backend.Claim, now time.Time)) {
	d.acquire = func(ctx context.Context, c backend.Claim) (backend.Grant, error) {
		g, err := d.soundAcquire(ctx, c)
		if err == nil {
			d.at(ctx, func(s *store, now time.Time) { f(s, c, now) })
		}
		return g, err
	}
}

// claims makes the driver claim other traits.
func (d *driver) claims(f func(t *backend.Traits)) {
	next := d.traits
	d.traits = func() backend.Traits {
		t := next()
		f(&t)
		return t
	}
}

// claimEnds makes the driver claim when its calls end.
func (d *driver) claimEnds(ends backend.Ends) { d.claims(func(t *backend.Traits) { t.Ends = ends }) }

// anyToken takes every token for the right one.
func anyToken(string) bool { return true }

func newDriver(w *way, k kind) *driver {
	d := &driver{way: w, kind: k}
	d.key = func(key string) string { return key }
	d.mine = func(c backend.Claim, token string) bool { return token == d.typ+c.Token }
	d.ttl = func(c backend.Claim) time.Duration { return c.TTL }
	d.deadline = func(c backend.Claim, called time.Time) time.Time { return called.Add(c.TTL - backend.Drift(c.TTL)) }
	d.traits = func() backend.Traits {
		return backend.Traits{Ordered: k == orders, Fenced: k != polls, Reach: backend.Network}
	}
	d.acquire, d.wait, d.renewOne, d.renew = d.soundAcquire, d.soundWait, d.soundRenewOne, d.soundRenew
	d.release, d.inspect, d.breakKey, d.quit = d.soundRelease, d.soundInspect, d.soundBreak, d.soundQuit
	d.close = func() error { return nil }
	return d
}

// as returns d with the interfaces of its kind.
func (d *driver) as() backend.Driver {
	if d.kind == polls {
		return d
	}
	return waiter{d}
}

// Traits returns the claimed traits.
func (d *driver) Traits() backend.Traits { return d.traits() }

// Acquire makes one attempt.
func (d *driver) Acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	return d.acquire(ctx, c)
}

// Renew prolongs terms.
func (d *driver) Renew(ctx context.Context, cs []backend.Claim, done func(int, backend.Grant, error)) {
	d.renew(ctx, cs, done)
}

// Release ends a hold.
func (d *driver) Release(ctx context.Context, c backend.Claim) error { return d.release(ctx, c) }

// Close ends the driver.
func (d *driver) Close() error { return d.close() }

// waiter is a driver with Wait, Inspect and Break.
type waiter struct{ *driver }

func (w waiter) Wait(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	return w.wait(ctx, c)
}
func (w waiter) Inspect(ctx context.Context, key string) (backend.Status, error) {
	return w.inspect(ctx, key)
}
func (w waiter) Break(ctx context.Context, key string) error { return w.breakKey(ctx, key) }

// asked returns c in the form that the store gets.
func (d *driver) asked(c backend.Claim) backend.Claim {
	c.Token, c.TTL = d.typ+c.Token, d.ttl(c)
	return c
}

func (d *driver) soundAcquire(ctx context.Context, c backend.Claim) (g backend.Grant, err error) {
	if c.Fenced && d.kind == polls {
		return g, errUnsupported
	}
	called := time.Now()
	if cerr := d.way.call(ctx, func(now time.Time) {
		g.Fence, err = d.way.store.acquire(d.key(c.Key), d.asked(c), now)
	}); cerr != nil {
		return backend.Grant{}, cerr
	}
	if err == nil {
		g.Until = d.deadline(c, called)
	}
	return g, err
}

// soundWait polls at once, when the key may be free, when the holder's term ends,
// and in time to keep its place.
func (d *driver) soundWait(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	if c.Fenced && d.kind == polls {
		return backend.Grant{}, errUnsupported
	}
	var last error
	well := time.Now()
	for {
		changed := d.way.store.watch(d.key(c.Key)) // before the poll
		called := time.Now()
		fence, err := d.lookOnce(ctx, c)
		switch {
		case err == nil:
			return backend.Grant{Fence: fence, Until: d.deadline(c, called)}, nil
		case definite(err):
			last, well = err, called
		case ctx.Err() == nil && time.Since(well) >= c.Timeout:
			d.quit(c)
			return backend.Grant{}, err
		case ctx.Err() == nil:
			last = err
		}
		if ctx.Err() == nil {
			d.await(ctx, changed, last)
		}
		if ctx.Err() != nil {
			if !c.Stays || !errors.Is(last, backend.ErrHeld) {
				d.quit(c)
			}
			if last == nil {
				last = ctx.Err()
			}
			return backend.Grant{}, last
		}
	}
}

// lookOnce polls once, for c.Timeout at most.
func (d *driver) lookOnce(ctx context.Context, c backend.Claim) (fence uint64, err error) {
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	cerr := d.way.call(ctx, func(now time.Time) {
		fence, err = d.way.store.look(d.key(c.Key), d.asked(c), d.kind == orders, now)
	})
	if cerr != nil {
		return 0, cerr
	}
	return fence, err
}

// await sleeps until the next poll is due.
func (d *driver) await(ctx context.Context, changed <-chan struct{}, last error) {
	sleep := window / 3
	if left := retryAfter(last); left > 0 {
		sleep = min(sleep, left)
	} else if !definite(last) {
		sleep = 20 * time.Millisecond
	}
	t := time.NewTimer(sleep)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	case <-changed:
		if !d.way.hears() {
			select {
			case <-t.C:
			case <-ctx.Done():
			}
		}
	}
}

// soundQuit removes the place and the hold of a Wait that did not return a grant.
func (d *driver) soundQuit(c backend.Claim) {
	ctx, cancel := context.WithTimeout(context.Background(), c.Timeout)
	defer cancel()
	d.way.call(ctx, func(now time.Time) { d.way.store.quit(d.key(c.Key), d.asked(c), now) })
}

func (d *driver) soundRenewOne(ctx context.Context, c backend.Claim) (g backend.Grant, err error) {
	called := time.Now()
	if cerr := d.way.call(ctx, func(now time.Time) {
		err = d.way.store.renew(d.key(c.Key), d.ttl(c), func(token string) bool { return d.mine(c, token) }, now)
	}); cerr != nil {
		return backend.Grant{}, cerr
	}
	if err == nil {
		g.Until = d.deadline(c, called)
	}
	return g, err
}

func (d *driver) soundRenew(ctx context.Context, cs []backend.Claim, done func(int, backend.Grant, error)) {
	backend.RenewEach(ctx, cs, done, d.renewOne)
}

func (d *driver) soundRelease(ctx context.Context, c backend.Claim) (err error) {
	if cerr := d.way.call(ctx, func(now time.Time) {
		err = d.way.store.release(d.key(c.Key), func(token string) bool { return d.mine(c, token) }, now)
	}); cerr != nil {
		return cerr
	}
	return err
}

func (d *driver) soundInspect(ctx context.Context, key string) (st backend.Status, err error) {
	err = d.way.call(ctx, func(now time.Time) { st = d.way.store.inspect(d.key(key), now) })
	return st, err
}

func (d *driver) soundBreak(ctx context.Context, key string) error {
	return d.way.call(ctx, func(now time.Time) {
		d.way.store.release(d.key(key), anyToken, now)
	})
}
