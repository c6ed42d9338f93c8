package conformance

import (
	"context"
	"fmt"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

// costClauses count the calls to the store.
var costClauses = alone(given(commands, []clause{
	{name: "commands-per-operation", says: saysCommands, check: commandsPerOperation,
		why: "Acquire, Renew and Release take as many commands as documented, also through the engine."},
	{name: "commands-reentry", says: saysHasp, check: commandsReentry,
		why: "Re-entry, and a TryLock that a caller of the same Client excludes, take no command."},
	{name: "commands-waiting", says: saysBusy, check: commandsWaiting,
		why: "Callers that wait do not keep the store busy, however many wait in one Client."},
}))

// used returns the number of calls during f, those of the background included.
func (e *env) used(f func()) int64 {
	count := func() int64 {
		n, err := e.h.Commands(e.ctx, e.store)
		hooked(err)
		return n
	}

	// Commands itself may take calls.
	first := count()
	own := count() - first
	before := count()
	f()
	return count() - before - own
}

// costs checks the number of calls of n times f.
func (e *env) costs(what string, n int, each float64, f func(i int)) {
	began := time.Now()

	got := e.used(func() {
		for i := range n {
			f(i)
		}
	})

	// Drivers also make calls that keep their connections alive.
	spare := 2 + 2*time.Since(began).Seconds() + 0.05*float64(n)*each
	require(float64(got) <= float64(n)*each+spare, "%d × %s: %d calls to the store, want %g", n, what, got, float64(n)*each)
}

func commandsPerOperation(e *env) {
	const n = 40
	d, c := e.open(), e.newClient()
	cost := e.h.Cost
	warm := d.hold(e.long) // scripts are loaded, connections made
	d.keep(warm)
	d.give(warm)

	cs := make([]backend.Claim, n)
	for i := range cs {
		cs[i] = e.claim(e.long)
	}
	e.costs("Acquire", n, cost.Acquire, func(i int) { d.take(cs[i]) })
	e.costs(fmt.Sprintf("Renew of %d holds", n), 1, n*cost.Renew, func(int) { renewAll(e.ctx, d, cs).check() })
	e.costs("Release", n, cost.Release, func(i int) { d.give(cs[i]) })

	must(e.lockOnce(c, e.key()))
	e.costs("Lock and Unlock", n, cost.Acquire+cost.Release, func(int) { must(e.lockOnce(c, e.key())) })
}

func commandsReentry(e *env) {
	c, key := e.newClient(), e.key()
	outer := e.lock(c, key)
	e.costs("re-entry and TryLock of a key that the Client holds", 40, 0.01, func(int) {
		inner, err := c.Lock(outer.Context(), key)
		must(err)
		must(is("TryLock of a key that the Client holds", errOf(c.TryLock(e.ctx, key)), hasp.ErrHeld))
		must(inner.Unlock(e.ctx))
	})
	must(outer.Unlock(e.ctx))
}

func commandsWaiting(e *env) {
	d, c := e.open(), e.newClient()
	held := d.hold(e.long)

	// Connections are made, scripts are loaded.
	err := errOf(c.Lock(e.ctx, held.Key, hasp.WithMaxWait(e.term)))
	require(err != nil, "lock %.60q, which is held: granted", held.Key)

	// An ordered driver makes one call for each waiter.
	const n = 8
	ctx := e.endingAfter(2 * time.Second)
	e.costs(fmt.Sprintf("%d callers waiting for 2 s", n), 1, 2*e.h.Cost.Waiting+2*n, func(int) {
		must(e.each(n, func(int) {
			must(is("Lock of a held key until its context ends", errOf(c.Lock(ctx, held.Key)), context.DeadlineExceeded))
		}))
	})
}
