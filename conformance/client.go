package conformance

import (
	"context"
	"errors"
	"sync/atomic"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

// client makes a Client over d. The end of the try closes it.
func (e *env) client(d backend.Driver, o hasp.Options) *hasp.Client {
	if o.TTL == 0 {
		o.TTL = e.long
	}
	if o.Timeout == 0 {
		o.Timeout = e.timeout
	}
	c, err := hasp.New(d, &o)
	must(err)
	e.onEnd(func() { c.Close() })
	return c
}

func (e *env) newClient() *hasp.Client { return e.clientBy(e.h.Open) }

func (e *env) clients() []*hasp.Client {
	return []*hasp.Client{e.newClient(), e.newClient(), e.newClient()}
}

func (e *env) clientBy(open opener) *hasp.Client {
	return e.client(e.openOwn(open, e.store), hasp.Options{})
}

// lock locks key, or ends the try. A slow machine may cause a failure, if the Lock has a short term
// or timeout.
func (e *env) lock(c *hasp.Client, key string, opts ...hasp.Option) *hasp.Lease {
	lease, err := c.Lock(e.ctx, key, opts...)
	mustInTime(err, "Lock")
	return lease
}

// unlockInTime unlocks a lease with a short term or a short timeout.
func (e *env) unlockInTime(lease *hasp.Lease) { mustInTime(lease.Unlock(e.ctx), "Unlock") }

func (e *env) lockOnce(c *hasp.Client, key string, opts ...hasp.Option) error {
	lease, err := c.Lock(e.ctx, key, opts...)
	if err != nil {
		return err
	}
	return lease.Unlock(e.ctx)
}

// locks begins lockOnce. The channel receives its error.
func (e *env) locks(c *hasp.Client, key string, opts ...hasp.Option) <-chan error {
	return e.begin(func() error { return e.lockOnce(c, key, opts...) })
}

// isLost ends the try unless lease reports that it is lost.
func isLost(lease *hasp.Lease, when string) {
	must(is("Err of a lease that is lost, "+when, lease.Err(), hasp.ErrLost))
	require(lease.Context().Err() != nil, "the context of a lease that is lost goes on, %s", when)
	must(is("the cause of the context of a lease that is lost, "+when, context.Cause(lease.Context()), hasp.ErrLost))
}

// tap is a driver between the engine and the driver under test. It counts calls, and can keep
// renewals from the store. If the driver is a Waiter or a Waker, the tap is one as well.
type tap struct {
	backend.Driver

	cut     atomic.Bool  // renewals do not reach the store
	renewed atomic.Int64 // renewals begun, for all tokens together
}

var errCut = errors.New("cut off by the suite")

// tapped returns a Client over a tap of a new driver, and the tap.
func (e *env) tapped(o hasp.Options) (*hasp.Client, *tap) {
	t := &tap{Driver: e.openOwn(e.h.Open, e.store)}
	var under backend.Driver = t
	switch t.Driver.(type) {
	case backend.Waiter:
		under = &tapWaiter{t}
	case backend.Waker:
		under = &tapWaker{t}
	}
	return e.client(under, o), t
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

type tapWaiter struct{ *tap }

func (t *tapWaiter) Wait(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	return t.Driver.(backend.Waiter).Wait(ctx, c)
}

type tapWaker struct{ *tap }

func (t *tapWaker) Listen(ctx context.Context, c backend.Claim) (<-chan struct{}, func(), error) {
	return t.Driver.(backend.Waker).Listen(ctx, c)
}
