package calls

import (
	"context"
	"errors"

	"github.com/hasplock/hasp/backend"
)

// Driver is a driver as the engine sees it. Each call that takes a context passes through a method
// of Driver, or through the function OwnEnd, so that OwnEnd sees its error.
type Driver struct {
	backend.Driver
	waiter backend.Waiter // the driver, or nil if it is no Waiter
	waker  backend.Waker  // the driver, or nil if it is no Waker or is a Waiter
}

// NewDriver returns d as the engine sees it.
func NewDriver(d backend.Driver) Driver {
	own := Driver{Driver: d}
	own.waiter, _ = d.(backend.Waiter)
	if own.waiter == nil {
		own.waker, _ = d.(backend.Waker)
	}
	return own
}

// Waits reports whether the driver is a Waiter, so that the method Wait may be called.
func (d *Driver) Waits() bool { return d.waiter != nil }

// Wakes reports whether the driver is a Waker and no Waiter, so that the method Listen may be
// called.
func (d *Driver) Wakes() bool { return d.waker != nil }

// OwnEnd returns err, or the error of ctx if err is the cause of ctx's end. A driver on net/http
// returns that cause, which may match a definite error, such as the loss of another lease. The
// engine would take it for the store's answer.
func OwnEnd(ctx context.Context, err error) error {
	if err == nil || ctx.Err() == nil {
		return err
	}
	cause := context.Cause(ctx)
	if cause != ctx.Err() && errors.Is(err, cause) {
		return ctx.Err()
	}
	return err
}

// Acquire calls the driver's Acquire.
func (d *Driver) Acquire(ctx context.Context, cl backend.Claim) (backend.Grant, error) {
	g, err := d.Driver.Acquire(ctx, cl)
	return g, OwnEnd(ctx, err)
}

// Wait calls the Wait of a Waiter.
func (d *Driver) Wait(ctx context.Context, cl backend.Claim) (backend.Grant, error) {
	g, err := d.waiter.Wait(ctx, cl)
	return g, OwnEnd(ctx, err)
}

// Listening is what a Waker's Listen returns.
type Listening struct {
	Wake <-chan struct{}
	Stop func()
}

// Listen calls the Listen of a Waker.
func (d *Driver) Listen(ctx context.Context, cl backend.Claim) (Listening, error) {
	wake, stop, err := d.waker.Listen(ctx, cl)
	return Listening{wake, stop}, OwnEnd(ctx, err)
}

// Renew calls the driver's Renew.
func (d *Driver) Renew(ctx context.Context, cs []backend.Claim,
	done func(int, backend.Grant, error)) {
	d.Driver.Renew(ctx, cs, func(i int, g backend.Grant, err error) {
		done(i, g, OwnEnd(ctx, err))
	})
}

// Release calls the driver's Release.
func (d *Driver) Release(ctx context.Context, cl backend.Claim) error {
	return OwnEnd(ctx, d.Driver.Release(ctx, cl))
}
