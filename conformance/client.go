package conformance

import (
	"context"
	"errors"
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
	c, err := hasp.New(d, &o)
	must(err)
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

// lock locks key, or ends the try. The failure is slow, because a Lock with a short term or timeout
// may fail on a slow machine.
func (e *env) lock(c *hasp.Client, key string, opts ...hasp.Option) *hasp.Lease {
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

// isLost ends the try unless lease, which is lost, reports its loss.
func isLost(lease *hasp.Lease, when string) {
	must(is("Err of a lease that is lost, "+when, lease.Err(), hasp.ErrLost))
	require(lease.Context().Err() != nil, "the context of a lease that is lost goes on, %s", when)
	must(is("the cause of the context of a lease that is lost, "+when, context.Cause(lease.Context()), hasp.ErrLost))
}

// tap is a driver between the engine and the driver under test. It counts calls, and can drop
// renewals. If the driver is a Waiter or a Waker, so is the tap.
type tap struct {
	backend.Driver
	e      *env
	client *hasp.Client // whose calls go through the tap

	// listen, if it is not nil, replaces Listen. It is set before use.
	listen func() (<-chan struct{}, error)

	cut     atomic.Bool  // renewals do not reach the store
	renewed atomic.Int64 // renewals begun, of all tokens
	asked   atomic.Int64 // attempts and waits begun
}

var errCut = errors.New("cut off by the suite")

// tapped returns a Client over a new driver, and the tap between them.
func (e *env) tapped(o hasp.Options) (*hasp.Client, *tap) { return e.tappedAt(e.store, o) }

// tappedAt is tapped for the store at another address.
func (e *env) tappedAt(store string, o hasp.Options) (*hasp.Client, *tap) {
	t := &tap{Driver: e.openOwn(e.h.Open, store), e: e}
	var under backend.Driver = t
	switch t.Driver.(type) {
	case backend.Waiter:
		under = &tapWaiter{t}
	case backend.Waker:
		under = &tapWaker{t}
	}
	t.client = e.client(under, o)
	return t.client, t
}

func (t *tap) Acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	t.asked.Add(1)
	return t.Driver.Acquire(ctx, c)
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

// attempts begins f, waits until it has asked the store, and returns the channel of
// its error.
func (t *tap) attempts(f func() error) <-chan error {
	asked := t.asked.Load() // before f begins
	done := t.e.begin(f)
	t.e.until("an attempt of Lock", func() bool { return t.asked.Load() > asked })
	return done
}

// tapWaiter is a tap of a Waiter.
type tapWaiter struct{ *tap }

func (t *tapWaiter) Wait(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	t.asked.Add(1)
	return t.Driver.(backend.Waiter).Wait(ctx, c)
}

// tapWaker is a tap of a Waker.
type tapWaker struct{ *tap }

func (t *tapWaker) Listen(ctx context.Context, c backend.Claim) (wake <-chan struct{}, stop func(), err error) {
	if t.listen != nil {
		wake, err = t.listen()
		return wake, func() {}, err
	}
	return t.Driver.(backend.Waker).Listen(ctx, c)
}
