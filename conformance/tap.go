package conformance

import (
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

// tap sits between the engine and the driver under test. It sees every call
// and may put itself in the way of those that have one outcome in the store
// and another for the caller. It is a Waiter if the driver is one.
type tap struct {
	*driver

	// Set before use. next carries the call out.
	acquire func(c backend.Claim, next func() (backend.Grant, error)) (backend.Grant, error)
	release func(c backend.Claim, next func() error) error

	mu      sync.Mutex // guards all below
	cut     bool       // renewals do not reach the store
	claims  []backend.Claim
	renewed map[string]int // renewals begun, by token
	calls   int            // to acquire and wait
	events  []hasp.Event
}

var errCut = errors.New("cut off by the suite")

// tapped returns a Client over a new driver, and what sees its calls.
func (e *env) tapped(o hasp.Options) (*hasp.Client, *tap) {
	return e.tap(e.openOwn(e.store), o)
}

func (e *env) tap(d *driver, o hasp.Options) (*hasp.Client, *tap) {
	t := &tap{driver: d, renewed: map[string]int{}}
	o.Observe = func(ev hasp.Event) {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.events = append(t.events, ev)
	}
	var under backend.Driver = t
	if e.waiter {
		under = &tapWaiter{t}
	}
	return e.client(under, o), t
}

// client makes a Client that is closed when the try ends.
func (e *env) client(d backend.Driver, o hasp.Options) *hasp.Client {
	if o.TTL == 0 {
		o.TTL = e.h.Long
	}
	if o.Timeout == 0 {
		o.Timeout = e.h.Timeout
	}
	c := hasp.New(d, &o)
	e.onEnd(func() { c.Close() })
	return c
}

// newClient is a Client over a new driver, with nothing in between.
func (e *env) newClient() *hasp.Client {
	return e.client(e.openOwn(e.store).Driver, hasp.Options{})
}

// Traits are the driver's, but for its reach: the engine must not count on
// calls that never block.
func (t *tap) Traits() backend.Traits {
	traits := t.Driver.Traits()
	traits.Reach = max(traits.Reach, backend.Host)
	traits.Ends = backend.EndsSometime // what is in the way heeds no context
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
	t.calls++
}

func (t *tap) Renew(ctx context.Context, cs []backend.Claim, done func(int, backend.Grant, error)) {
	t.mu.Lock()
	for _, c := range cs {
		t.renewed[c.Token]++
	}
	cut := t.cut
	t.mu.Unlock()
	if cut {
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

// cutRenewals lets no renewal reach the store, or lets them again.
func (t *tap) cutRenewals(cut bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.cut = cut
}

// last is the newest claim that the engine has asked for.
func (t *tap) last() backend.Claim {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.claims[len(t.claims)-1]
}

// asked counts the attempts and waits so far.
func (t *tap) asked() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.calls
}

// renewals counts those of all tokens.
func (t *tap) renewals() (n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, m := range t.renewed {
		n += m
	}
	return n
}

// told returns the events of a kind.
func (t *tap) told(kind hasp.EventKind) []hasp.Event {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(t.events), func(ev hasp.Event) bool { return ev.Kind != kind })
}

// tapWaiter is a tap of a Waiter. A Wait is let through as it is: what its
// contract promises, a fault in between would break.
type tapWaiter struct{ *tap }

func (t *tapWaiter) Wait(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	t.saw(c)
	return t.Driver.(backend.Waiter).Wait(ctx, c)
}
