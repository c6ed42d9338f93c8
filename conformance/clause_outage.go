package conformance

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

// linkClauses disturb the link to the store.
var linkClauses = []clause{
	{
		name:  "link-outage",
		why:   "An outage is not reported as ErrHeld, ErrLost or ErrInvalid. The driver works again after it.",
		says:  saysOutage,
		need:  link,
		alone: true,
		check: linkOutage,
	},
	{
		name:  "link-sent-once",
		why:   "If the reply is lost, the call was sent once and reports an unknown outcome. A Release with its token undoes it.",
		says:  saysOnce,
		need:  link,
		alone: true,
		check: linkSentOnce,
	},
	{
		name:  "link-wait-reply",
		why:   "If the reply is lost, a Wait still gets the key or reports an unknown outcome. A Release with its token undoes it.",
		says:  saysWaitUnknown,
		need:  all(link, waiter),
		alone: true,
		check: linkWaitReply,
	},
	{
		name:  "link-late-release",
		why:   "If a Release arrives after its hold has ended, it does not affect the successor, even if the hold was alive when the call began.",
		says:  saysOneStep,
		need:  link,
		alone: true,
		check: linkLateRelease,
	},
	{
		name:  "link-late-renew",
		why:   "If a renewal arrives after its hold has ended, it neither ends nor prolongs the successor's hold, even if the hold was alive when the call began.",
		says:  saysOneStep,
		need:  link,
		alone: true,
		check: linkLateRenew,
	},
	{
		name:  "link-deadline",
		why:   "A deadline counts from the moment before the call was sent, not from its reply.",
		says:  saysCallBegan,
		need:  link,
		alone: true,
		check: linkDeadline,
	},
	{
		name:  "link-hung-store",
		why:   "If the store hangs, every call of a Client ends within its timeout or with its context, and a lease ends at its deadline.",
		says:  saysHasp,
		need:  link,
		alone: true,
		check: linkHungStore,
	},
	{
		name:  "link-ends",
		why:   "If Traits.Ends says so, a call to a store that hangs ends shortly after its context.",
		says:  saysEndsInTime,
		need:  all(link, ends),
		alone: true,
		check: linkEnds,
	},
	{
		name:  "link-cut-waiter",
		why:   "A waiter that is cut off does not keep the others from the key. It still waits when its connection works again.",
		says:  saysDeadWaiter,
		need:  all(link, waiter),
		alone: true,
		check: linkCutWaiter,
	},
}

// cable makes a link. The end of the try first makes it work again, and closes it
// after its drivers.
func (e *env) cable() *Link {
	l, err := e.h.Link(e.ctx, e.store)
	hooked(err)
	e.onEnd(l.Close)
	e.mu.Lock()
	e.mends = append(e.mends, func() { l.Set(Up) })
	e.mu.Unlock()
	return l
}

// unknown returns an error if err is a definite answer.
func unknown(what string, err error) error {
	for _, d := range []error{nil, backend.ErrHeld, backend.ErrLost, backend.ErrInvalid, errors.ErrUnsupported} {
		if errors.Is(err, d) {
			return fmt.Errorf("%s: %v, want an error of unknown outcome", what, err)
		}
	}
	return nil
}

func linkOutage(e *env) error {
	l := e.cable()
	d := e.openAt(l.Store)
	b := e.open()
	held, other := e.claim(e.h.Long), e.claim(e.h.Long)
	d.take(held)
	b.take(other)
	for _, state := range []LinkState{Down, Hung} {
		l.Set(state)
		ctx, cancel := context.WithTimeout(e.ctx, 2*e.term)
		calls := map[string]func() error{
			"Acquire of a free key": func() error { _, err := d.Acquire(ctx, e.claim(e.h.Long)); return err },
			"Acquire of a held key": func() error { _, err := d.Acquire(ctx, e.claimOf(other.Key, e.h.Long)); return err },
			"Release":               func() error { return d.Release(ctx, e.claimOf(held.Key, e.h.Long)) },
			"Renew": func() error {
				err := errUnanswered
				d.Renew(ctx, []backend.Claim{held}, func(_ int, _ backend.Grant, e error) { err = e })
				return err
			},
		}
		if e.waiter {
			calls["Wait"] = func() error {
				c := e.claim(e.h.Long)
				c.Timeout = e.term
				_, err := d.Driver.(backend.Waiter).Wait(ctx, c)
				return err
			}
		}
		for what, call := range calls {
			what = fmt.Sprintf("%s over a link that is %v", what, state)
			if err := unknown(what, e.within(what, call)); err != nil {
				cancel()
				return err
			}
		}
		cancel()
		l.Set(Up)
		must(e.recovers(d))
	}
	must(b.refused(held.Key))
	return d.release(held)
}

// recovers checks that a driver works again after an outage.
func (e *env) recovers(d *driver) error {
	var last error
	err := e.poll("a driver works when an outage is over", func() (bool, error) {
		ctx, cancel := context.WithTimeout(e.ctx, e.h.Timeout)
		defer cancel()
		c := e.claim(e.h.Long)
		if _, last = d.Acquire(ctx, c); last == nil {
			last = d.Release(ctx, c)
		}
		return last == nil, nil
	})
	if err != nil {
		return fmt.Errorf("%w: %w", err, last)
	}
	return nil
}

func linkDeadline(e *env) error {
	l := e.cable()
	d := e.openAt(l.Store)
	b := e.open()
	for _, renewed := range []bool{false, true} {
		term := max(e.term, 3*Delay)
		c := e.claim(term)
		if renewed {
			d.take(c)
		}
		l.Set(Slow)
		called := time.Now()
		var g backend.Grant
		var err error
		if renewed {
			g, err = d.renew(c)
		} else {
			g, err = d.acquire(c)
		}
		l.Set(Up)
		if err != nil {
			return slow("a call over a slow link: %w", err)
		}
		s := succession{until: until(g, c, called)}
		if _, s.seized, err = b.seize(c.Key, e.h.Long); err != nil {
			return err
		}
		mustf(s.inTime(), "with a reply that took %v", Delay)
	}
	return nil
}

func linkHungStore(e *env) error {
	l := e.cable()
	b := e.open()
	c, t := e.tap(e.openOwn(l.Store), hasp.Options{Timeout: e.term})
	lease, err := c.Lock(e.ctx, e.key(), hasp.WithTTL(e.term))
	if err != nil {
		return slow("Lock: %w", err)
	}
	other, err := c.Lock(e.ctx, e.key())
	if err != nil {
		return slow("Lock: %w", err)
	}
	l.Set(Hung)
	if _, _, err := b.seize(lease.Key(), e.h.Long); err != nil {
		return err
	}
	mustf(reportsLoss(lease), "cut off, when another holds the key")
	err = e.within("TryLock of a store that hangs", func() error { _, err := c.TryLock(e.ctx, e.key()); return err })
	must(unknown("TryLock of a store that hangs", err))
	err = e.within("Lock of a store that hangs", func() error { _, err := c.Lock(e.ctx, e.key()); return err })
	must(unknown("Lock of a store that hangs", err))
	err = e.within("Unlock over a store that hangs", func() error { return other.Unlock(e.ctx) })
	must(unknown("Unlock over a store that hangs", err))
	best := time.Duration(1<<63 - 1)
	for range 4 {
		ctx, cancel := context.WithCancel(e.ctx)
		done, asked := make(chan error, 1), t.asked()
		go func() { _, err := c.Lock(ctx, e.key()); done <- err }()
		must(e.poll("an attempt of Lock", func() (bool, error) { return t.asked() > asked, nil }))
		began := time.Now()
		cancel()
		err := e.arrives("a cancelled Lock of a store that hangs", done)
		best = min(best, time.Since(began))
		if err := is("a cancelled Lock of a store that hangs", err, context.Canceled); err != nil {
			return slow("%w", err) // its time may have been up before
		}
	}
	if best > promptly {
		return slow("of several cancelled Locks of a store that hangs the fastest took %v", best)
	}
	l.Set(Up)
	var again *hasp.Lease
	err = e.poll("Lock when the store answers again", func() (bool, error) {
		again, err = c.Lock(e.ctx, e.key())
		return err == nil, nil
	})
	must(err)
	return unlockShort(e, again)
}

func linkCutWaiter(e *env) error {
	l := e.cable()
	d := e.openAt(l.Store)
	a, b := e.open(), e.open()
	c := a.hold(e.h.Long)
	cut := d.want(e.claimOf(c.Key, e.h.Long))
	e.queued(a, c.Key, 1)
	w := b.want(e.claimOf(c.Key, e.h.Long))
	e.queued(a, c.Key, 2)
	l.Set(Hung)
	a.give(c)
	must(e.arrives("Wait while another waiter is cut off", w.done))
	b.keep(w.c)
	l.Set(Up)
	b.give(w.c)
	switch err := e.arrives("Wait after its link was mended", cut.done); {
	case err == nil:
		d.keep(cut.c)
		d.give(cut.c)
	default:
		// It may have ended by its timeout. Then it has left nothing.
		must(unknown("Wait that was cut off", err))
	}
	return b.grantedAtLast(c.Key)
}
