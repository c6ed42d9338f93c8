package conformance

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hasplock/hasp"
)

// leaseClauses use the driver through package hasp, from the grant of a lease on.
var leaseClauses = []clause{
	{
		name:  "lease-renewed",
		why:   "A lease is renewed past many terms, and no other caller gets the key.",
		says:  saysHasp,
		check: func(e *env) error { return leaseRenewed(e, false) },
	},
	{
		name:  "lease-rides-out-outage",
		why:   "A lease survives an outage that is shorter than the rest of its term.",
		says:  saysHasp,
		check: func(e *env) error { return leaseRenewed(e, true) },
	},
	{
		name:  "lease-renewal-stops",
		why:   "No hold is renewed after Unlock or after Close.",
		says:  saysHasp,
		check: leaseRenewalStops,
	},
	{
		name:  "lease-loss-before-others",
		why:   "A lease that cannot be renewed ends with cause ErrLost before another caller holds the key, for its context and for Err.",
		says:  saysHasp,
		check: leaseLossBeforeOthers,
	},
	{
		name:  "lease-loss-once",
		why:   "A loss is reported once. A normal Unlock is not a loss.",
		says:  saysHasp,
		check: leaseLossOnce,
	},
	{
		name:  "lease-loss-taken",
		why:   "If the hold is gone from the store, the lease is lost at the next renewal.",
		says:  saysHasp,
		check: leaseLossTaken,
	},
	{
		name:  "lease-extend",
		why:   "After Extend the lease lasts at least that long, also in the store.",
		says:  saysHasp,
		check: leaseExtend,
	},
	{
		name:  "lease-context",
		why:   "When Lock's context ends, the lease's context ends. The key stays locked until Unlock.",
		says:  saysHasp,
		check: leaseContextEnds,
	},
}

func leaseRenewed(e *env, outage bool) error {
	c, t := e.tapped(hasp.Options{})
	b := e.open()
	key := e.key()
	lease, err := c.Lock(e.ctx, key, hasp.WithTTL(e.term))
	if err != nil {
		return err
	}
	if outage {
		t.cutRenewals(true)
		time.AfterFunc(e.term/2, func() { t.cutRenewals(false) })
	}
	for range 4 {
		b.outlast(e.term)
		if err := lease.Err(); err != nil {
			return slow("a lease that is renewed: %w", err)
		}
		if err := b.refused(key); err != nil {
			if lease.Err() != nil {
				return slow("no renewal for a term of %v", e.term)
			}
			return fmt.Errorf("while a lease is renewed: %w", err)
		}
	}
	if outage && len(t.eventsOf(hasp.EventRenewFailed)) == 0 {
		return slow("the outage was over before a renewal was due")
	}
	if err := context.Cause(lease.Context()); err != nil {
		return slow("the context of a lease that is renewed: %w", err)
	}
	return unlockShort(e, lease)
}

// unlockShort unlocks a lease with a short term or a short timeout. A slow machine
// may make that fail.
func unlockShort(e *env, lease *hasp.Lease) error {
	if err := lease.Unlock(e.ctx); err != nil {
		return slow("Unlock: %w", err)
	}
	return nil
}

// leaseRenewalStops checks that no token is renewed after its end, and that no key
// stays locked.
func leaseRenewalStops(e *env) error {
	c, t := e.tapped(hasp.Options{Timeout: e.term})
	b := e.open()
	err := e.each(20, func(int) error {
		lease, err := c.Lock(e.ctx, e.key(), hasp.WithTTL(e.term))
		if err != nil {
			return slow("Lock: %w", err)
		}
		e.sleep(e.term / 2)
		if err := lease.Unlock(e.ctx); err != nil && !errors.Is(err, hasp.ErrLost) {
			return slow("Unlock: %w", err)
		}
		return nil
	})
	must(err)
	if t.renewals() == 0 {
		return slow("no renewal in half a term")
	}
	key := e.key()
	if _, err := c.Lock(e.ctx, key, hasp.WithTTL(e.term)); err != nil {
		return slow("Lock: %w", err)
	}
	e.sleep(e.term / 2)
	must(c.Close())
	b.outlast(e.term) // for renewals on their way
	before := t.renewals()
	b.outlast(e.term)
	if n := t.renewals() - before; n > 0 {
		return fmt.Errorf("%d renewals in a term after Unlock and Close", n)
	}
	mustf(b.grantedAtLast(key), "a lease that was held at Close")
	return nil
}

// reportsLoss checks that lease now reports its loss.
func reportsLoss(lease *hasp.Lease) error {
	if err := is("Err of a lease that is lost", lease.Err(), hasp.ErrLost); err != nil {
		return err
	}
	if lease.Context().Err() == nil {
		return errors.New("the context of a lease that is lost goes on")
	}
	return is("the cause of the context's end", context.Cause(lease.Context()), hasp.ErrLost)
}

func leaseLossBeforeOthers(e *env) error {
	c, t := e.tapped(hasp.Options{})
	b := e.open()
	t.cutRenewals(true)
	key := e.key()
	lease := e.lock(c, key, hasp.WithTTL(e.term))
	ctx := lease.Context()
	if _, _, err := b.seize(key, e.h.Long); err != nil {
		return err
	}
	// Even the first check after the other's grant must see the loss.
	if ctx.Err() == nil {
		return errors.New("another holds the key, and the lease's context goes on")
	}
	mustf(reportsLoss(lease), "when another holds the key")
	child, cancel := context.WithCancel(ctx)
	defer cancel()
	if child.Err() == nil {
		return errors.New("a context derived from that of a lost lease goes on")
	}
	return nil
}

func leaseLossOnce(e *env) error {
	c, t := e.tapped(hasp.Options{})
	key := e.key()
	lease := e.lock(c, key)
	ctx := lease.Context()
	must(lease.Unlock(e.ctx))
	must(is("the cause of a context's end by Unlock", context.Cause(ctx), hasp.ErrReleased))
	if lost := t.eventsOf(hasp.EventLost); len(lost) > 0 {
		return fmt.Errorf("a normal Unlock was reported as a loss: %v", lost[0].Err)
	}
	t.cutRenewals(true)
	lease = e.lock(c, key, hasp.WithTTL(e.term))
	must(e.poll("the end of a lease that is not renewed", func() (bool, error) {
		select {
		case <-lease.Context().Done():
			return true, nil
		default:
			return false, nil
		}
	}))
	must(reportsLoss(lease))
	must(is("Unlock of a lease that was lost", lease.Unlock(e.ctx), hasp.ErrLost))
	must(e.poll("the event of a loss", func() (bool, error) { return len(t.eventsOf(hasp.EventLost)) > 0, nil }))
	t.driver.outlast(e.term)
	if lost := t.eventsOf(hasp.EventLost); len(lost) != 1 || lost[0].Key != key || !errors.Is(lost[0].Err, hasp.ErrLost) {
		return fmt.Errorf("a loss was reported as %+v, want one event", lost)
	}
	return nil
}

func leaseLossTaken(e *env) error {
	c, t := e.tapped(hasp.Options{})
	b := e.open()
	key := e.key()
	lease := e.lock(c, key, hasp.WithTTL(e.term))
	// This is as if the store had lost the hold.
	if err := b.release(t.last()); err != nil {
		return slow("release with the lease's own token: %w", err)
	}
	done := make(chan error, 1)
	go func() { <-lease.Context().Done(); done <- nil }()
	must(e.arrives("the context of a lease whose hold is gone", done))
	must(reportsLoss(lease))
	return is("Unlock of a lease whose hold is gone", lease.Unlock(e.ctx), hasp.ErrLost)
}

func leaseExtend(e *env) error {
	c := e.newClient()
	b := e.open()
	key := e.key()
	lease := e.lock(c, key, hasp.WithTTL(e.term), hasp.WithoutRenewal())
	called := time.Now()
	switch err := lease.Extend(e.ctx, e.h.Long); {
	case errors.Is(err, hasp.ErrLost):
		return slow("Extend right after Lock: %w", err)
	case err != nil: // a try lasts a tenth of the term
		return slow("Extend: %w", err)
	}
	if left := lease.Expires().Sub(called); left < e.h.Long {
		return fmt.Errorf("after Extend by %v the lease lasts %v", e.h.Long, left)
	}
	b.outlast(e.term)
	mustf(lease.Err(), "%v after Extend by %v", e.term, e.h.Long)
	mustf(b.refused(key), "%v after Extend by %v", e.term, e.h.Long)
	return lease.Unlock(e.ctx)
}

func leaseContextEnds(e *env) error {
	c := e.newClient()
	b := e.open()
	ctx, cancel := context.WithCancel(e.ctx)
	defer cancel()
	key := e.key()
	lease, err := c.Lock(ctx, key)
	must(err)
	cancel()
	if lease.Context().Err() == nil {
		return errors.New("the lease's context goes on after the end of Lock's")
	}
	mustf(lease.Err(), "the hold, after the end of Lock's context")
	mustf(b.refused(key), "after the end of Lock's context")
	must(lease.Unlock(ctx))
	return b.granted(key)
}
