package conformance

import (
	"context"
	"errors"
	"fmt"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

// restartClauses restart the store, or make it drop its scripts or its connections.
var restartClauses = alone([]clause{
	{name: "flush-unnoticed", need: flush, says: saysSpeed, check: flushUnnoticed,
		why: "If the store drops what it keeps only for speed, every call still works."},
	{name: "kick-ridden-out", need: kick, says: saysAgain, check: pair(kickRiddenOut),
		why: "If the store ends its connections, holds and leases stay, and waiters get the key. " +
			"Calls in flight succeed or are of unknown outcome."},
	{name: "restart-with-data", need: restarts, optional: true, says: saysKeepsData,
		check: pair(restartWithData),
		why:   "Holds survive a restart of a store that keeps its data: no other caller gets the key."},
	{name: "restart-without-data", need: restarts, says: saysLostData,
		check: pair(restartWithoutData),
		why:   "If the store has lost its data, the holder gets ErrLost. Others get the key."},
	{name: "restart-waiter", need: all(restarts, waiter), says: saysRides,
		check: pair(restartWaiter),
		why:   "A waiter goes on after a restart that is shorter than its timeout, or reports the outage."},
	{name: "fence-restart", need: all(restarts, fenced), optional: true, says: saysFenceRestart,
		check: func(e *env) { e.fenceOver(true) },
		why:   "Fences still grow after a restart of a store that keeps its data."},
	{name: "fence-data-loss", need: all(restarts, fenced), optional: true, says: saysFenceRestart,
		check: func(e *env) { e.fenceOver(false) },
		why:   "Fences still grow after a restart of a store that has lost its data."},
})

// down stops the store. A call of the function up starts the store again, with its data or without.
// Without such a call, the end of the try starts the store, with its data if the hook can do that.
func (e *env) down() (up func(data bool)) {
	hooked(e.h.Stop(e.ctx, e.store))
	stopped := true
	e.onEnd(func() {
		if !stopped {
			return
		}
		ctx := context.WithoutCancel(e.ctx)
		if e.h.Start(ctx, e.store, true) != nil {
			e.h.Start(ctx, e.store, false)
		}
	})

	return func(data bool) { hooked(e.h.Start(e.ctx, e.store, data)); stopped = false }
}

// restart stops the store, and starts it again with its data or without.
func (e *env) restart(data bool) { e.down()(data) }

// restartWithData checks that a hold lasts over a restart of a store that keeps its data.
func restartWithData(e *env, a, b *driver) {
	c := a.hold(e.long)

	e.restart(true)
	e.recovers(a, b)
	mustf(b.refused(c.Key), "after a restart")
	mustf(a.renews(c), "renewal by the holder after a restart")
	a.give(c)
}

func restartWithoutData(e *env, a, b *driver) {
	c := a.hold(e.long)

	e.restart(false)
	e.recovers(a, b)
	a.lost(c, "a hold whose store has lost its data")
	mustf(b.grantedAtLast(c.Key), "after the store has lost its data")
}

// restartWaiter restarts the store, with its data if the hook can do that, while a caller waits.
// The Wait must get the key or report an unknown outcome.
func restartWaiter(e *env, a, b *driver) {
	c := a.hold(e.long)
	w := e.queue(c.Key, 1, a, b)[0]

	// Keep the outage shorter than the timeout of the Wait.
	up := e.down()
	e.sleep(e.term)
	err := e.try(func() { up(true) })
	var skip *skipError
	if errors.As(err, &skip) { // the hook cannot keep the data
		err = e.try(func() { up(false) })
	}

	must(err)
	e.recovers(a)

	// If the restart kept the data, the token of c still holds the key. From here on, only the
	// waiter's token may hold the key.
	a.giveIfHeld(c, "after a restart")
	w.servedOrUnknown("Wait during a restart")
	must(a.grantedAtLast(c.Key))
}

// fenceOver restarts the store, with its data or without. The next fence must be larger than those
// before the restart.
func (e *env) fenceOver(data bool) {
	d := e.open()
	f := e.fences()
	for range 3 {
		d.give(f.take("before", d))
	}

	e.restart(data)
	e.recovers(d)
	f.take(fmt.Sprintf("after a restart, data kept: %v", data), d)
}

// flushUnnoticed makes the store drop its scripts before each call. Each call must still work. If
// the driver has fences, claims with a fence follow, because these may need other scripts.
func flushUnnoticed(e *env) {
	d := e.open()
	drop := func() { hooked(e.h.Flush(e.ctx, e.store)) }
	for _, fenced := range []bool{false, e.traits.Fenced} {
		c := e.claim(e.long)
		c.Fenced = fenced

		drop()
		d.take(c)
		drop()
		d.keep(c)
		drop()
		must(d.refused(c.Key))
		drop()
		require(!e.inspector || d.inspect(c.Key).Held, "inspect: a key that is held is free")

		if e.waiter {
			drop()
			next := e.claimOf(c.Key, e.long)
			next.Fenced = fenced
			w := d.want(next)
			e.queued(d, c.Key, 1)
			drop()
			d.give(c)
			w.granted("Wait")
			c = next // the hold of the Wait
		}

		drop()
		if e.inspector {
			d.breakKey(c.Key)
		} else {
			d.give(c)
		}

		must(d.granted(c.Key))
	}
}

// kickRiddenOut ends the drivers' connections. Some of these are idle. Others are in use by a Wait,
// by a Lock that waits, and by the renewals of a lease.
func kickRiddenOut(e *env, a, b *driver) {
	holder := e.newClient()
	waiting := e.newClient()
	lease := e.lock(holder, e.key(), hasp.WithTTL(e.term))

	for range 3 {
		c := a.hold(e.long)
		k := a.hold(e.long)
		var w *pendingWait
		if e.waiter {
			w = e.queue(c.Key, 1, a, b)[0]
		}

		locked := e.locks(waiting, k.Key)
		e.sleep(e.term / 8) // so that the Lock has asked for the key

		hooked(e.h.Kick(e.ctx, e.store))
		e.recovers(a, b)
		for _, claim := range []backend.Claim{c, k} {
			mustf(b.refused(claim.Key), "after the end of all connections")
			a.keep(claim)
			a.give(claim)
		}

		mustf(e.arrives("Lock whose connection ended", locked), "Lock whose connection ended")

		if w != nil {
			if err := w.servedOrUnknown("Wait whose connection ended"); err != nil {
				e.undone(b, a, w.c, err)
			}
		}
	}

	// On a slow machine the lease may end before its renewal, because its term is short.
	mustInTime(lease.Err(), "a lease whose Client's connections ended")
	mustInTime(lease.Unlock(e.ctx), "Unlock")
}
