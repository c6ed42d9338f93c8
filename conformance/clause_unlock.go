package conformance

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

var unlockClauses = []clause{
	{
		name:  "unlock-lost",
		why:   "Unlock of a lease that was lost says ErrLost and spares the successor.",
		says:  saysHasp,
		check: unlockLost,
	},
	{
		name:  "unlock-dead-context",
		why:   "Unlock works with a context that has ended.",
		says:  saysHasp,
		check: unlockDeadContext,
	},
	{
		name:  "unlock-twice",
		why:   "A second Unlock says ErrReleased.",
		says:  saysHasp,
		check: unlockTwice,
	},
	{
		name:  "unlock-again",
		why:   "An Unlock of unknown outcome says so and may be called again until it succeeds; the key is freed.",
		says:  saysHasp,
		check: unlockAgain,
	},
}

func unlockLost(e *env) error {
	c, t := e.tapped(hasp.Options{})
	b := e.open()
	t.cutRenewals(true)
	key := e.key()
	lease, err := c.Lock(e.ctx, key, hasp.WithTTL(e.term))
	if err != nil {
		return err
	}
	next, _, err := b.seize(key, e.h.Long)
	if err != nil {
		return err
	}
	for range 2 {
		if err := is("Unlock of a lease that was lost", lease.Unlock(e.ctx), hasp.ErrLost); err != nil {
			return err
		}
	}
	if err := is("Extend of a lease that was lost", lease.Extend(e.ctx, e.h.Long), hasp.ErrLost); err != nil {
		return err
	}
	b.outlast(e.term) // for what goes on in the background
	if _, err := b.renew(next); err != nil {
		return fmt.Errorf("renewal by the successor after the Unlock of a lost lease: %w", err)
	}
	return b.release(next)
}

func unlockDeadContext(e *env) error {
	c, b := e.newClient(), e.open()
	ctx, cancel := context.WithCancel(e.ctx)
	defer cancel()
	key := e.key()
	lease, err := c.Lock(e.ctx, key)
	if err != nil {
		return err
	}
	cancel()
	if err := lease.Unlock(ctx); err != nil {
		return fmt.Errorf("unlock with a context that has ended: %w", err)
	}
	return b.granted(key)
}

func unlockTwice(e *env) error {
	c := e.newClient()
	lease, err := c.Lock(e.ctx, e.key())
	if err != nil {
		return err
	}
	if err := lease.Unlock(e.ctx); err != nil {
		return err
	}
	if err := is("second Unlock", lease.Unlock(e.ctx), hasp.ErrReleased); err != nil {
		return err
	}
	return is("Err after Unlock", lease.Err(), hasp.ErrReleased)
}

// unlockAgain loses the first command of a release, or the reply to it.
func unlockAgain(e *env) error {
	for _, lost := range []string{"command", "reply"} {
		c, t := e.tapped(hasp.Options{})
		b := e.open()
		var failed atomic.Bool
		t.release = func(_ backend.Claim, next func() error) error {
			switch {
			case failed.Swap(true):
				return next()
			case lost == "reply":
				if err := next(); err != nil {
					return err
				}
			}
			return errCut
		}
		key := e.key()
		lease, err := c.Lock(e.ctx, key)
		if err != nil {
			return err
		}
		if err := is("Unlock whose "+lost+" is lost", lease.Unlock(e.ctx), errCut); err != nil {
			return err
		}
		if lease.Context().Err() == nil {
			return errors.New("the context of a lease goes on after an Unlock of unknown outcome")
		}
		if err := lease.Unlock(e.ctx); err != nil {
			return fmt.Errorf("unlock again, after one whose %s was lost: %w", lost, err)
		}
		if err := is("Unlock after one that succeeded", lease.Unlock(e.ctx), hasp.ErrReleased); err != nil {
			return err
		}
		if err := b.granted(key); err != nil {
			return fmt.Errorf("after an Unlock whose %s was lost, and another: %w", lost, err)
		}
	}
	return nil
}
