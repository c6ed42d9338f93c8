package conformance

import (
	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

// client creates a Client over d. The end of the try closes the Client.
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

// clientBy creates a Client over a new driver of any strategy. The Client closes this driver.
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

// lockOnce locks key, and unlocks it immediately. It returns the error of the call that failed.
func (e *env) lockOnce(c *hasp.Client, key string, opts ...hasp.Option) error {
	lease, err := c.Lock(e.ctx, key, opts...)
	if err != nil {
		return err
	}
	return lease.Unlock(e.ctx)
}

// locks calls lockOnce in the background. The channel receives the error of lockOnce.
func (e *env) locks(c *hasp.Client, key string, opts ...hasp.Option) <-chan error {
	return e.begin(func() error { return e.lockOnce(c, key, opts...) })
}
