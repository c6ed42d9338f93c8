package conformance

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

// client makes a Client that the end of the try closes.
func (e *env) client(d backend.Driver, o hasp.Options) *hasp.Client {
	if o.TTL == 0 {
		o.TTL = e.long
	}
	if o.Timeout == 0 {
		o.Timeout = e.timeout
	}
	c := hasp.New(d, &o)
	e.onEnd(func() { c.Close() })
	return c
}

// newClient returns a Client over a new driver, without a tap.
func (e *env) newClient() *hasp.Client { return e.clientBy(e.h.Open) }

// clients returns three Clients over drivers of their own.
func (e *env) clients() []*hasp.Client {
	return []*hasp.Client{e.newClient(), e.newClient(), e.newClient()}
}

// clientBy returns a Client over a new driver of any strategy.
func (e *env) clientBy(open opener) *hasp.Client {
	return e.client(e.openOwn(open, e.store), hasp.Options{})
}

// lock locks key. It ends the try if that fails.
func (e *env) lock(c *hasp.Client, key string, opts ...hasp.Option) *hasp.Lease {
	lease, err := c.Lock(e.ctx, key, opts...)
	must(err)
	return lease
}

// lockInTime is lock with a short term or a short timeout. A slow machine may make
// that fail.
func (e *env) lockInTime(c *hasp.Client, key string, opts ...hasp.Option) *hasp.Lease {
	lease, err := c.Lock(e.ctx, key, opts...)
	mustInTime(err, "Lock")
	return lease
}

// unlockInTime unlocks a lease with a short term or a short timeout.
func (e *env) unlockInTime(lease *hasp.Lease) { mustInTime(lease.Unlock(e.ctx), "Unlock") }

// lockOnce locks key and unlocks it.
func (e *env) lockOnce(c *hasp.Client, key string, opts ...hasp.Option) error {
	lease, err := c.Lock(e.ctx, key, opts...)
	if err != nil {
		return err
	}
	return lease.Unlock(e.ctx)
}

// locks begins lockOnce and returns the channel of its error.
func (e *env) locks(c *hasp.Client, key string, opts ...hasp.Option) <-chan error {
	return e.begin(func() error { return e.lockOnce(c, key, opts...) })
}

// isLost ends the try unless lease reports its loss, which has happened.
func isLost(lease *hasp.Lease, when string) {
	must(is("Err of a lease that is lost, "+when, lease.Err(), hasp.ErrLost))
	require(lease.Context().Err() != nil, "the context of a lease that is lost goes on, %s", when)
	must(is("the cause of the context of a lease that is lost, "+when, context.Cause(lease.Context()), hasp.ErrLost))
}

// tap is a driver between the engine and the driver under test. It records every
// call. It can change the outcome of a call for the caller but not for the store. It
// is a Waiter if the driver is one.
type tap struct {
	backend.Driver
	e      *env
	client *hasp.Client // whose calls go through the tap

	// Set before use. If they are not nil, they stand in for a call, and next
	// executes it.
	acquire func(c backend.Claim, next func() (backend.Grant, error)) (backend.Grant, error)
	release func(c backend.Claim, next func() error) error

	cut     atomic.Bool  // renewals do not reach the store
	renewed atomic.Int64 // renewals begun, of all tokens

	mu     sync.Mutex // guards all below
	claims []backend.Claim
	events []hasp.Event
}

var errCut = errors.New("cut off by the suite")

// tapped returns a Client over a new driver, and the tap between them.
func (e *env) tapped(o hasp.Options) (*hasp.Client, *tap) { return e.tappedAt(e.store, o) }

// tappedAt is tapped for the store at another address.
func (e *env) tappedAt(store string, o hasp.Options) (*hasp.Client, *tap) {
	t := &tap{Driver: e.openOwn(e.h.Open, store), e: e}

	o.Observe = func(_ context.Context, ev hasp.Event) {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.events = append(t.events, ev)
	}

	var under backend.Driver = t
	if e.waiter {
		under = &tapWaiter{t}
	}
	t.client = e.client(under, o)
	return t.client, t
}

// Traits returns the driver's traits with two changes. The engine must not rely on
// calls that never block, so the reach is at least the host.
func (t *tap) Traits() backend.Traits {
	traits := t.Driver.Traits()
	traits.Reach = max(traits.Reach, backend.Host)
	traits.Ends = backend.EndsSometime // the functions of a tap ignore the context
	traits.Cleans = false              // they may lose the reply to a call that has succeeded
	return traits
}

func (t *tap) Acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	t.saw(c)
	next := func() (backend.Grant, error) { return t.Driver.Acquire(ctx, c) }
	if t.acquire != nil {
		return t.acquire(c, next)
	}
	return next()
}

func (t *tap) saw(c backend.Claim) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.claims = append(t.claims, c)
}

func (t *tap) Renew(ctx context.Context, cs []backend.Claim, done func(int, backend.Grant, error)) {
	t.renewed.Add(int64(len(cs)))
	if t.cut.Load() {
		for i := range cs {
			done(i, backend.Grant{}, errCut)
		}
		return
	}
	t.Driver.Renew(ctx, cs, done)
}

func (t *tap) Release(ctx context.Context, c backend.Claim) error {
	next := func() error { return t.Driver.Release(ctx, c) }
	if t.release != nil {
		return t.release(c, next)
	}
	return next()
}

// last returns the newest claim of the engine.
func (t *tap) last() backend.Claim {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.claims[len(t.claims)-1]
}

// asked returns the number of attempts and waits so far.
func (t *tap) asked() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.claims)
}

// askedNothing ends the try if the engine has asked the store for these callers.
func (t *tap) askedNothing(callers string) {
	n := t.asked()
	require(n == 0, "the store was asked %d times for %s", n, callers)
}

// attempts begins f, waits until it has asked the store, and returns the channel of
// its error.
func (t *tap) attempts(f func() error) <-chan error {
	asked := t.asked() // before f begins
	done := t.e.begin(f)
	t.e.until("an attempt of Lock", func() bool { return t.asked() > asked })
	return done
}

// eventsOf returns the events of a kind that the engine has reported.
func (t *tap) eventsOf(kind hasp.EventKind) []hasp.Event {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(t.events), func(ev hasp.Event) bool { return ev.Kind != kind })
}

// tapWaiter is a tap of a Waiter. It does not change a Wait, because a fault
// between the engine and a Wait would break the contract of Wait.
type tapWaiter struct{ *tap }

func (t *tapWaiter) Wait(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	t.saw(c)
	return t.Driver.(backend.Waiter).Wait(ctx, c)
}
