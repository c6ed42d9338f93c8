package main

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/hasplock/hasp/backend"
)

// plant puts a bug into a driver. A run with this driver shows whether the harness finds the bug.
func plant(bug string, d backend.Driver) backend.Driver {
	if bug == "" {
		return d
	}

	return buggy{d, bug}
}

// buggy is a driver with a bug.
type buggy struct {
	backend.Driver
	bug string
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
