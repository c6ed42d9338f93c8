package conformance

import (
	"sync/atomic"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

var unlockClauses = []clause{
	{name: "unlock-lost", says: saysHasp, check: unlockLost,
		why: "Unlock of a lost lease returns ErrLost and does not affect the successor."},
	{name: "unlock-dead-context", says: saysHasp, check: unlockDeadContext,
		why: "Unlock works with a context that has ended."},
	{name: "unlock-twice", says: saysHasp, check: unlockTwice,
		why: "A second Unlock returns ErrReleased."},
	{name: "unlock-again", says: saysHasp, check: unlockAgain,
		why: "An Unlock of unknown outcome returns an error, and may be called again until it succeeds. The key is then free."},
}

func unlockLost(e *env) {
	c, t := e.tapped(hasp.Options{})
	b, key := e.open(), e.key()
	t.cutRenewals(true)
	lease := e.lock(c, key, hasp.WithTTL(e.term))

	next := b.succeed(key, e.long)
	for range 2 {
		must(is("Unlock of a lease that was lost", lease.Unlock(e.ctx), hasp.ErrLost))
	}
	must(is("Extend of a lease that was lost", lease.Extend(e.ctx, e.long), hasp.ErrLost))

	b.outlast(e.term) // for what goes on in the background
	mustf(b.renews(next), "renewal by the successor after the Unlock of a lost lease")
	b.give(next)
}

func unlockDeadContext(e *env) {
	c, b, key := e.newClient(), e.open(), e.key()
	mustf(e.lock(c, key).Unlock(e.deadContext()), "unlock with a context that has ended")
	must(b.granted(key))
}

func unlockTwice(e *env) {
	lease := e.lock(e.newClient(), e.key())
	must(lease.Unlock(e.ctx))
	must(is("second Unlock", lease.Unlock(e.ctx), hasp.ErrReleased))
	must(is("Err after Unlock", lease.Err(), hasp.ErrReleased))
}

// unlockAgain loses the first command of a release, or its reply.
func unlockAgain(e *env) {
	for _, lost := range []string{"command", "reply"} {
		c, t := e.tapped(hasp.Options{})
		b, key := e.open(), e.key()
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

		lease := e.lock(c, key)
		must(is("Unlock whose "+lost+" is lost", lease.Unlock(e.ctx), errCut))
		require(lease.Context().Err() != nil, "the context of a lease goes on after an Unlock of unknown outcome")
		mustf(lease.Unlock(e.ctx), "unlock again, after one whose %s was lost", lost)
		must(is("Unlock after one that succeeded", lease.Unlock(e.ctx), hasp.ErrReleased))
		mustf(b.granted(key), "after an Unlock whose %s was lost, and another", lost)
	}
}
