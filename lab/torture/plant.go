package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/hasplock/hasp/backend"
)

// oneTooMany is the bug "slots": the callers ask for one slot too many. It is no bug of a driver.
const oneTooMany = "slots"

// plant puts a bug into a driver. A run with this driver shows whether the harness finds the bug.
func plant(bug string, d backend.Driver) (backend.Driver, error) {
	b := buggy{Driver: d, bug: bug}
	switch bug {
	case "", oneTooMany:
		return d, nil
	case "release", "wake-up", "reply":
		return b, nil
	}
	return nil, fmt.Errorf("unknown bug %q", bug)
}

// buggy is a driver with a bug.
type buggy struct {
	backend.Driver
	bug string
}

// Acquire counts the term from the reply if the bug is "reply".
func (b buggy) Acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	began := time.Now()
	g, err := b.Driver.Acquire(ctx, c)
	return b.late(g, c, began), err
}

func (b buggy) Renew(ctx context.Context, cs []backend.Claim, done func(int, backend.Grant, error)) {
	began := time.Now()
	b.Driver.Renew(ctx, cs, func(i int, g backend.Grant, err error) { done(i, b.late(g, cs[i], began), err) })
}

// late returns the grant g. If the bug is "reply", it counts the term of g from the reply, although
// the request was sent earlier, at the time began.
func (b buggy) late(g backend.Grant, c backend.Claim, began time.Time) backend.Grant {
	if b.bug != "reply" {
		return g
	}
	if g.Until.IsZero() {
		g.Until = began.Add(c.TTL - backend.Drift(c.TTL))
	}
	g.Until = g.Until.Add(time.Since(began))
	return g
}

// Release frees the key of any holder if the bug is "release".
func (b buggy) Release(ctx context.Context, c backend.Claim) error {
	err := b.Driver.Release(ctx, c)
	if b.bug == "release" && errors.Is(err, backend.ErrLost) {
		err = b.Driver.(backend.Inspector).Break(ctx, c.Key)
	}
	return err
}

func (b buggy) Traits() backend.Traits {
	t := b.Driver.Traits()
	t.Cancellation = backend.CancelNone
	return t
}

// Wait asks for the key until the key is granted. With the bug "wake-up", it sometimes stops
// asking, like a waiter that misses a release between its check and its subscription.
func (b buggy) Wait(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	for {
		again := time.After(5 * time.Millisecond)
		if b.bug == "wake-up" && rand.IntN(100) == 0 {
			again = nil
		}
		g, err := b.Acquire(ctx, c)
		if err == nil {
			return g, nil
		}
		select {
		case <-ctx.Done():
			return g, err
		case <-again:
		}
	}
}
