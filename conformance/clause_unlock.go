package conformance

import (
	"context"
	"errors"
	"sync/atomic"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

var unlockClauses = []clause{
	{
		name:  "unlock-lost",
		why:   "Unlock of a lost lease returns ErrLost and does not affect the successor.",
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
		why:   "A second Unlock returns ErrReleased.",
		says:  saysHasp,
		check: unlockTwice,
	},
	{
		name:  "unlock-again",
		why:   "An Unlock of unknown outcome returns an error, and may be called again until it succeeds. The key is then free.",
		says:  saysHasp,
		check: unlockAgain,
	},
}

func unlockLost(e *env) error {
	c, t := e.tapped(hasp.Options{})
	b := e.open()
	t.cutRenewals(true)
	key := e.key()
	lease := e.lock(c, key, hasp.WithTTL(e.term))
	next, _, err := b.seize(key, e.h.Long)
	must(err)
	for range 2 {
		must(is("Unlock of a lease that was lost", lease.Unlock(e.ctx), hasp.ErrLost))
	}
	must(is("Extend of a lease that was lost", lease.Extend(e.ctx, e.h.Long), hasp.ErrLost))
	b.outlast(e.term) // for what goes on in the background
	mustf(b.renews(next), "renewal by the successor after the Unlock of a lost lease")
	return b.release(next)
}

func unlockDeadContext(e *env) error {
	c, b := e.newClient(), e.open()
	ctx, cancel := context.WithCancel(e.ctx)
	defer cancel()
	key := e.key()
	lease := e.lock(c, key)
	cancel()
	mustf(lease.Unlock(ctx), "unlock with a context that has ended")
	return b.granted(key)
}

func unlockTwice(e *env) error {
	c := e.newClient()
	lease := e.lock(c, e.key())
	must(lease.Unlock(e.ctx))
	must(is("second Unlock", lease.Unlock(e.ctx), hasp.ErrReleased))
	return is("Err after Unlock", lease.Err(), hasp.ErrReleased)
}

// unlockAgain loses the first command of a release, or its reply.
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
		lease := e.lock(c, key)
		must(is("Unlock whose "+lost+" is lost", lease.Unlock(e.ctx), errCut))
		if lease.Context().Err() == nil {
			return errors.New("the context of a lease goes on after an Unlock of unknown outcome")
		}
		mustf(lease.Unlock(e.ctx), "unlock again, after one whose %s was lost", lost)
		must(is("Unlock after one that succeeded", lease.Unlock(e.ctx), hasp.ErrReleased))
		mustf(b.granted(key), "after an Unlock whose %s was lost, and another", lost)
	}
	return nil
}
