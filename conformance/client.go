package conformance

import (
	"context"

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
