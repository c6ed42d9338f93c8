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
		why:   "A store may drop at any time what it keeps only for speed: every call works as before.",
		says:  saysSpeed,
		need:  flush,
		alone: true,
		check: flushUnnoticed,
	},
	{
		name:  "kick-ridden-out",
		why:   "When the store ends its connections, holds and leases stay, waiters get the key, and calls in flight at that moment are at worst of unknown outcome.",
		says:  saysAgain,
		need:  kick,
		alone: true,
		check: kickRiddenOut,
	},
	{
		name:  "restart-outage",
		why:   "While the store is stopped, calls say so; when it runs again, drivers work without being opened anew.",
		says:  saysAgain,
		need:  restarts,
		alone: true,
		check: restartOutage,
	},
	{
		name:     "restart-with-data",
		why:      "Holds survive a restart of the store that keeps its data: nobody else gets the key.",
		says:     saysKeepsData,
		need:     restarts,
		alone:    true,
		optional: yes,
		check:    restartWithData,
	},
	{
		name:  "restart-without-data",
		why:   "When the store has lost its data, loss is told to the holder, and the next lock works and is renewed.",
		says:  saysLostData,
		need:  restarts,
		alone: true,
		check: restartWithoutData,
	},
	{
		name:  "restart-waiter",
		why:   "A waiter rides out a restart that is shorter than its timeout, or says that the store was out.",
		says:  saysRides,
		need:  all(restarts, waiter),
		alone: true,
		check: restartWaiter,
	},
	{
		name:     "fence-restart",
		why:      "Fences grow over a restart of the store that keeps its data.",
		says:     saysFenceRestart,
		need:     all(restarts, fenced),
		alone:    true,
		optional: yes,
		check:    func(e *env) error { return e.fenceOver(true) },
	},
	{
		name:     "fence-data-loss",
		why:      "Fences grow over a restart of the store that loses its data.",
		says:     saysFenceRestart,
		need:     all(restarts, fenced),
		alone:    true,
		optional: yes,
		check:    func(e *env) error { return e.fenceOver(false) },
	},
}

// down stops the store. It is started again when the try ends, if up is not
// called before.
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
	held := e.claim(e.h.Long)
	d.take(held)
	up := e.down()
	ctx, cancel := context.WithTimeout(e.ctx, 2*e.term)
	defer cancel()
	for what, call := range map[string]func() error{
		"Acquire of a free key": func() error { _, err := d.Acquire(ctx, e.claim(e.h.Long)); return err },
		"Acquire of a held key": func() error { _, err := d.Acquire(ctx, e.claimOf(held.Key, e.h.Long)); return err },
		"Release":               func() error { return d.Release(ctx, held) },
	} {
		if err := unknown(what+" while the store is stopped", e.within(what, call)); err != nil {
			return err
		}
	}
	e.upAgain(up, true)
	return e.recovers(d)
}

// upAgain starts the store, with its data if it can.
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
	c := e.claim(e.h.Long)
	a.take(c)
	e.restart(true)
	if err := errors.Join(e.recovers(a), e.recovers(b)); err != nil {
		return err
	}
	if err := b.refused(c.Key); err != nil {
		return fmt.Errorf("after a restart: %w", err)
	}
	if _, err := a.renew(c); err != nil {
		return fmt.Errorf("renewal by the holder after a restart: %w", err)
	}
	return a.release(c)
}

func restartWithoutData(e *env) error {
	c, t := e.tapped(hasp.Options{})
	b := e.open()
	key := e.key()
	lease, err := c.Lock(e.ctx, key, hasp.WithTTL(e.term))
	if err != nil {
		return err
	}
	ended := lease.Context()
	e.restart(false)
	done := make(chan error, 1)
	go func() { <-ended.Done(); done <- nil }()
	if err := e.arrives("the context of a lease whose store has lost its data", done); err != nil {
		return err
	}
	if err := hearLost(lease); err != nil {
		return err
	}
	if err := is("Unlock of a lease whose store has lost its data", lease.Unlock(e.ctx), hasp.ErrLost); err != nil {
		return err
	}
	var last error
	if err := e.poll("Lock after the store has lost its data", func() (bool, error) {
		lease, last = c.Lock(e.ctx, key, hasp.WithTTL(e.term))
		return last == nil, nil
	}); err != nil {
		return fmt.Errorf("%w: %w", err, last)
	}
	if err := e.recovers(b); err != nil {
		return err
	}
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
	c := e.claim(e.h.Long)
	a.take(c)
	w := b.want(e.claimOf(c.Key, e.h.Long))
	e.queued(a, c.Key, 1)
	up := e.down()
	e.sleep(e.term)
	e.upAgain(up, true)
	if err := e.recovers(a); err != nil {
		return err
	}
	// With its data or without: after this nobody holds the key but the waiter.
	if err := a.release(c); err != nil && !errors.Is(err, backend.ErrLost) {
		return fmt.Errorf("release after a restart: %w", err)
	}
	switch err := e.arrives("Wait over a restart", w.done); {
	case err == nil:
		b.keep(w.c)
		b.give(w.c)
	default:
		if err := unknown("Wait over a restart", err); err != nil {
			return err
		}
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
		if err := d.refused(c.Key); err != nil {
			return err
		}
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
			if err := e.arrives("Wait", w.done); err != nil {
				return err
			}
			c = next
		}
		drop()
		if e.inspector {
			d.breakKey(c.Key)
		} else {
			d.give(c)
		}
		if err := d.granted(c.Key); err != nil {
			return err
		}
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
		if err := errors.Join(e.recovers(a), e.recovers(b)); err != nil {
			return err
		}
		for _, claim := range []backend.Claim{c, k} {
			if err := b.refused(claim.Key); err != nil {
				return fmt.Errorf("after the end of all connections: %w", err)
			}
			a.keep(claim)
			a.give(claim)
		}
		if err := e.arrives("Lock over the end of its connection", locked); err != nil {
			return fmt.Errorf("lock over the end of its connection: %w", err)
		}
		if w == nil {
			continue
		}
		if err := e.arrives("Wait over the end of its connection", w.done); err == nil {
			b.keep(w.c)
			b.give(w.c)
		} else if err := unknown("Wait over the end of its connection", err); err != nil {
			return err
		} else if err := e.undone(b, a, w.c); err != nil {
			return err
		}
	}
	if err := lease.Err(); err != nil {
		return slow("a lease over the end of its Client's connections: %w", err)
	}
	return unlockShort(e, lease)
}
