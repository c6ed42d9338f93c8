package conformance

import (
	"context"
	"errors"
	"fmt"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

// restartClauses stop the store and start it again, or make it drop its scripts
// or its connections.
var restartClauses = []clause{
	{
		name:  "flush-unnoticed",
		why:   "If the store drops what it keeps only for speed, every call still works.",
		says:  saysSpeed,
		need:  flush,
		alone: true,
		check: flushUnnoticed,
	},
	{
		name:  "kick-ridden-out",
		why:   "If the store ends its connections, holds and leases stay, and waiters get the key. Calls in flight succeed or are of unknown outcome.",
		says:  saysAgain,
		need:  kick,
		alone: true,
		check: kickRiddenOut,
	},
	{
		name:  "restart-outage",
		why:   "While the store is stopped, calls report an outage. When it runs again, the same drivers work.",
		says:  saysAgain,
		need:  restarts,
		alone: true,
		check: restartOutage,
	},
	{
		name:     "restart-with-data",
		why:      "Holds survive a restart of a store that keeps its data: no other caller gets the key.",
		says:     saysKeepsData,
		need:     restarts,
		alone:    true,
		optional: yes,
		check:    restartWithData,
	},
	{
		name:  "restart-without-data",
		why:   "If the store has lost its data, the holder gets ErrLost. The next lock works and is renewed.",
		says:  saysLostData,
		need:  restarts,
		alone: true,
		check: restartWithoutData,
	},
	{
		name:  "restart-waiter",
		why:   "A waiter rides out a restart that is shorter than its timeout, or reports the outage.",
		says:  saysRides,
		need:  all(restarts, waiter),
		alone: true,
		check: restartWaiter,
	},
	{
		name:     "fence-restart",
		why:      "Fences still grow after a restart of a store that keeps its data.",
		says:     saysFenceRestart,
		need:     all(restarts, fenced),
		alone:    true,
		optional: yes,
		check:    func(e *env) error { return e.fenceOver(true) },
	},
	{
		name:     "fence-data-loss",
		why:      "Fences still grow after a restart of a store that has lost its data.",
		says:     saysFenceRestart,
		need:     all(restarts, fenced),
		alone:    true,
		optional: yes,
		check:    func(e *env) error { return e.fenceOver(false) },
	},
}

// down stops the store. The end of the try starts it again unless up was called.
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
	return func(data bool) {
		hooked(e.h.Start(e.ctx, e.store, data))
		stopped = false
	}
}

// restart stops the store and starts it.
func (e *env) restart(data bool) { e.down()(data) }

func restartOutage(e *env) error {
	d := e.open()
	held := d.hold(e.h.Long)
	up := e.down()
	ctx, cancel := context.WithTimeout(e.ctx, 2*e.term)
	defer cancel()
	for what, call := range map[string]func() error{
		"Acquire of a free key": func() error { _, err := d.Acquire(ctx, e.claim(e.h.Long)); return err },
		"Acquire of a held key": func() error { _, err := d.Acquire(ctx, e.claimOf(held.Key, e.h.Long)); return err },
		"Release":               func() error { return d.Release(ctx, held) },
	} {
		must(unknown(what+" while the store is stopped", e.within(what, call)))
	}
	e.upAgain(up, true)
	return e.recovers(d)
}

// upAgain starts the store, with its data if the hook supports that.
func (e *env) upAgain(up func(bool), data bool) {
	err := e.try(func() error { up(data); return nil })
	var skip *skipError
	if errors.As(err, &skip) {
		up(!data)
		return
	}
	must(err)
}

func restartWithData(e *env) error {
	a, b := e.open(), e.open()
	c := a.hold(e.h.Long)
	e.restart(true)
	must(errors.Join(e.recovers(a), e.recovers(b)))
	mustf(b.refused(c.Key), "after a restart")
	mustf(a.renews(c), "renewal by the holder after a restart")
	return a.release(c)
}

func restartWithoutData(e *env) error {
	c, t := e.tapped(hasp.Options{})
	b := e.open()
	key := e.key()
	lease := e.lock(c, key, hasp.WithTTL(e.term))
	ended := lease.Context()
	e.restart(false)
	done := make(chan error, 1)
	go func() { <-ended.Done(); done <- nil }()
	must(e.arrives("the context of a lease whose store has lost its data", done))
	must(reportsLoss(lease))
	must(is("Unlock of a lease whose store has lost its data", lease.Unlock(e.ctx), hasp.ErrLost))
	var last error
	if err := e.poll("Lock after the store has lost its data", func() (bool, error) {
		lease, last = c.Lock(e.ctx, key, hasp.WithTTL(e.term))
		return last == nil, nil
	}); err != nil {
		return fmt.Errorf("%w: %w", err, last)
	}
	must(e.recovers(b))
	for range 2 {
		b.outlast(e.term)
	}
	if err := lease.Err(); err != nil || t.renewals() == 0 {
		return slow("a lease locked after the store has lost its data: %v, %d renewals", err, t.renewals())
	}
	if err := b.refused(key); err != nil {
		if lease.Err() != nil {
			return slow("no renewal for a term of %v", e.term)
		}
		return err
	}
	return unlockShort(e, lease)
}

func restartWaiter(e *env) error {
	a, b := e.open(), e.open()
	c := a.hold(e.h.Long)
	w := b.want(e.claimOf(c.Key, e.h.Long))
	e.queued(a, c.Key, 1)
	up := e.down()
	e.sleep(e.term)
	e.upAgain(up, true)
	must(e.recovers(a))
	// With or without data, no token but the waiter's holds the key after this.
	if err := a.release(c); err != nil && !errors.Is(err, backend.ErrLost) {
		return fmt.Errorf("release after a restart: %w", err)
	}
	switch err := e.arrives("Wait over a restart", w.done); {
	case err == nil:
		b.keep(w.c)
		b.give(w.c)
	default:
		must(unknown("Wait over a restart", err))
	}
	return a.grantedAtLast(c.Key)
}

func (e *env) fenceOver(data bool) error {
	d := e.open()
	f := fences{key: e.key()}
	c := fencedClaim(e.claimOf(f.key, e.h.Long))
	for range 3 {
		if err := f.add("before", d.take(c)); err != nil {
			return err
		}
		d.give(c)
		c = fencedClaim(e.claimOf(f.key, e.h.Long))
	}
	e.restart(data)
	if err := e.recovers(d); err != nil {
		return err
	}
	return f.add(fmt.Sprintf("after a restart, data kept: %v", data), d.take(c))
}

// flushUnnoticed flushes before every call.
func flushUnnoticed(e *env) error {
	d := e.open()
	drop := func() { hooked(e.h.Flush(e.ctx, e.store)) }
	for _, fenced := range []bool{false, e.traits.Fenced} {
		c := e.claim(e.h.Long)
		c.Fenced = fenced
		drop()
		d.take(c)
		drop()
		d.keep(c)
		drop()
		must(d.refused(c.Key))
		drop()
		if e.inspector && !d.inspect(c.Key).Held {
			return errors.New("inspect: a key that is held is free")
		}
		if e.waiter {
			drop()
			next := e.claimOf(c.Key, e.h.Long)
			next.Fenced = fenced
			w := d.want(next)
			e.queued(d, c.Key, 1)
			drop()
			d.give(c)
			must(e.arrives("Wait", w.done))
			c = next
		}
		drop()
		if e.inspector {
			d.breakKey(c.Key)
		} else {
			d.give(c)
		}
		must(d.granted(c.Key))
	}
	return nil
}

// kickRiddenOut ends idle connections, and connections of waits and renewals.
func kickRiddenOut(e *env) error {
	a, b := e.open(), e.open()
	holder, waiting := e.newClient(), e.newClient()
	lease, err := holder.Lock(e.ctx, e.key(), hasp.WithTTL(e.term))
	if err != nil {
		return slow("Lock: %w", err)
	}
	for range 3 {
		c, k := e.claim(e.h.Long), e.claim(e.h.Long)
		a.take(c)
		a.take(k)
		var w *wanted
		if e.waiter {
			w = b.want(e.claimOf(c.Key, e.h.Long))
			e.queued(a, c.Key, 1)
		}
		locked := e.locks(waiting, k.Key)
		e.sleep(e.term / 8)

		hooked(e.h.Kick(e.ctx, e.store))
		must(errors.Join(e.recovers(a), e.recovers(b)))
		for _, claim := range []backend.Claim{c, k} {
			mustf(b.refused(claim.Key), "after the end of all connections")
			a.keep(claim)
			a.give(claim)
		}
		mustf(e.arrives("Lock over the end of its connection", locked), "lock over the end of its connection")
		if w == nil {
			continue
		}
		if err := e.arrives("Wait over the end of its connection", w.done); err == nil {
			b.keep(w.c)
			b.give(w.c)
		} else {
			must(unknown("Wait over the end of its connection", err))
			must(e.undone(b, a, w.c))
		}
	}
	if err := lease.Err(); err != nil {
		return slow("a lease over the end of its Client's connections: %w", err)
	}
	return unlockShort(e, lease)
}
