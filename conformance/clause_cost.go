package conformance

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

// costClauses count the calls to the store.
var costClauses = []clause{
	{
		name:  "commands-per-operation",
		why:   "Acquire, Renew and Release take as many commands as documented, also through the engine.",
		says:  saysCommands,
		need:  commands,
		alone: true,
		check: commandsPerOperation,
	},
	{
		name:  "commands-reentry",
		why:   "Re-entry, and a TryLock that a caller of the same Client excludes, take no command.",
		says:  saysHasp,
		need:  commands,
		alone: true,
		check: commandsReentry,
	},
	{
		name:  "commands-waiting",
		why:   "Callers that wait do not keep the store busy, however many wait in one Client.",
		says:  saysBusy,
		need:  commands,
		alone: true,
		check: commandsWaiting,
	},
}

// used returns the number of calls during f, those of the background included.
func (e *env) used(f func() error) (int64, error) {
	count := func() int64 {
		n, err := e.h.Commands(e.ctx, e.store)
		hooked(err)
		return n
	}
	// Commands itself may take calls.
	first := count()
	own := count() - first
	before := count()
	err := f()
	return count() - before - own, err
}

// costs checks the number of calls of n times f.
func (e *env) costs(what string, n int, each float64, f func() error) error {
	began := time.Now()
	got, err := e.used(func() error {
		for range n {
			if err := f(); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	// Drivers also make calls that keep their connections alive.
	spare := 2 + 2*time.Since(began).Seconds() + 0.05*float64(n)*each
	if float64(got) > float64(n)*each+spare {
		return fmt.Errorf("%d × %s: %d calls to the store, want %g", n, what, got, float64(n)*each)
	}
	return nil
}

func commandsPerOperation(e *env) error {
	const n = 40
	d, c := e.open(), e.newClient()
	cost := e.h.Cost
	warm := e.claim(e.h.Long)
	d.take(warm) // scripts are loaded, connections made
	d.keep(warm)
	d.give(warm)
	cs := make([]backend.Claim, n)
	for i := range cs {
		cs[i] = e.claim(e.h.Long)
	}
	next := func(f func(backend.Claim)) func() error {
		i := 0
		return func() error { f(cs[i]); i++; return nil }
	}
	err := e.costs("Acquire", n, cost.Acquire, next(func(c backend.Claim) { d.take(c) }))
	must(err)
	err = e.costs(fmt.Sprintf("Renew of %d holds", n), 1, n*cost.Renew, func() error {
		return renewAll(e.ctx, d, cs).check()
	})
	must(err)
	must(e.costs("Release", n, cost.Release, next(d.give)))
	lockUnlock := func() error {
		lease, err := c.Lock(e.ctx, e.key())
		if err != nil {
			return err
		}
		return lease.Unlock(e.ctx)
	}
	must(lockUnlock())
	return e.costs("Lock and Unlock", n, cost.Acquire+cost.Release, lockUnlock)
}

func commandsReentry(e *env) error {
	c := e.newClient()
	key := e.key()
	outer := e.lock(c, key)
	must(e.costs("re-entry and TryLock of a key that the Client holds", 40, 0.01, func() error {
		inner, err := c.Lock(outer.Context(), key)
		if err != nil {
			return err
		}
		if _, err := c.TryLock(e.ctx, key); !errors.Is(err, hasp.ErrHeld) {
			return is("TryLock of a key that the Client holds", err, hasp.ErrHeld)
		}
		return inner.Unlock(e.ctx)
	}))
	return outer.Unlock(e.ctx)
}

func commandsWaiting(e *env) error {
	d := e.open()
	c := e.newClient()
	held := d.hold(e.h.Long)
	// Connections are made, scripts are loaded.
	if _, err := c.Lock(e.ctx, held.Key, hasp.WithMaxWait(e.term)); err == nil {
		return fmt.Errorf("lock %.60q, which is held: granted", held.Key)
	}
	// An ordered driver makes one call for each waiter.
	const n = 8
	ctx, cancel := context.WithTimeout(e.ctx, 2*time.Second)
	defer cancel()
	return e.costs(fmt.Sprintf("%d callers waiting for 2 s", n), 1, 2*e.h.Cost.Waiting+2*n, func() error {
		return e.each(n, func(int) error {
			_, err := c.Lock(ctx, held.Key)
			return is("Lock of a held key until its context ends", err, context.DeadlineExceeded)
		})
	})
}
