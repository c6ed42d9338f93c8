package conformance

import (
	"context"
	"fmt"
	"time"

	"github.com/hasplock/hasp/backend"
)

// linkClauses disturb a link to the store. Each clause creates a link of its own.
var linkClauses = given(link, []clause{
	{name: "link-outage", says: saysOutage, check: linkOutage,
		why: "An outage is not reported as ErrHeld, ErrLost or ErrInvalid. The driver works again after it."},
	{name: "link-sent-once", says: saysOnce, check: linkSentOnce,
		why: "If the reply is lost, the call was sent once and reports an unknown outcome. A " +
			"Release with its token undoes it."},
	{name: "link-wait-reply", need: waiter, says: saysWaitUnknown, check: linkWaitReply,
		why: "If the reply is lost, a Wait still gets the key or reports an unknown outcome. A " +
			"Release with its token undoes it."},
	{name: "link-late-acquire", says: saysNever, check: linkLateAcquire,
		why: "If an attempt began when the key was free, and arrives when another holds and " +
			"renews the key, it is not granted, and the hold goes on."},
	{name: "link-late-release", says: saysOneStep, check: linkLateRelease,
		why: "If a Release arrives after its hold has ended, it does not affect the successor, " +
			"even if the hold was alive when the call began."},
	{name: "link-late-renew", says: saysOneStep, check: linkLateRenew,
		why: "If a renewal arrives after its hold has ended, it neither ends nor prolongs the " +
			"successor's hold, even if the hold was alive when the call began."},
	{name: "link-deadline", says: saysCallBegan, check: linkDeadline,
		why: "A deadline counts from the moment before the call was sent, not from its reply."},
	{name: "link-ends", need: ends, says: saysEndsInTime, check: linkEnds,
		why: "If Traits.Cancellation says so, a call to a store that hangs ends shortly after its context."},
	{name: "link-cut-waiter", need: waiter, says: saysDeadWaiter, check: linkCutWaiter,
		why: "A waiter that is cut off does not keep the others from the key. It still waits " +
			"when its connection works again."},
})

// cable creates a link. When the try ends, these steps follow each other: the link becomes Up, the
// holds are released, the drivers that use the link are closed, and the link is closed.
func (e *env) cable() *Link {
	l, err := e.h.Link(e.ctx, e.store)
	hooked(err)
	e.onEnd(l.Close)
	e.beforeReleases(func(context.Context) { l.Set(Up) })
	return l
}

// linkOutage makes calls over a link that is Down or Hung. No call may then return a definite
// error.
func linkOutage(e *env) {
	l := e.cable()
	d := e.openAt(l.Store)
	b := e.open()
	held := d.hold(e.long)
	other := b.hold(e.long)
	calls := map[string]func(context.Context) error{
		"Acquire of a free key": func(ctx context.Context) error {
			return errOf(d.Acquire(ctx, e.claim(e.long)))
		},
		"Acquire of a held key": func(ctx context.Context) error {
			return errOf(d.Acquire(ctx, e.claimOf(other.Key, e.long)))
		},
		"Release": func(ctx context.Context) error {
			// This is another token, so the hold stays even if the request arrives after all.
			return d.Release(ctx, e.claimOf(held.Key, e.long))
		},
		"Renew": func(ctx context.Context) error {
			return errOf(renewBy(ctx, d, held))
		},
	}

	if e.waiter {
		calls["Wait"] = func(ctx context.Context) error {
			c := e.claim(e.long)
			c.Timeout = e.term // how long the Wait may ride out an outage
			return errOf(wait(ctx, d.Driver, c))
		}
	}

	if e.lister {
		// A List must also end by its own timeout, so it does not get the shared context.
		calls["List"] = func(context.Context) error {
			return errOf(listed(d.Driver.(backend.Lister).List(e.ctx, held.Key, e.term)))
		}
	}

	for _, state := range []LinkState{Down, Hung} {
		// The calls share one context, so that together they take about two terms. A call that
		// begins after its end must also return an error of unknown outcome.
		l.Set(state)
		ctx := e.endingAfter(2 * e.term)
		for what, call := range calls {
			what = fmt.Sprintf("%s over a link that is %v", what, state)
			must(unknown(what, e.within(what, func() error { return call(ctx) })))
		}

		l.Set(Up)
		e.recovers(d)
		if e.lister {
			e.retry("List after an outage", func() error {
				return errOf(listed(d.listing(e.ctx, held.Key)))
			})
		}
	}

	must(b.refused(held.Key))
	d.give(held)
}

// recovers waits until each of the drivers works again after an outage: a call may still fail, or
// take too long, while the driver connects anew.
func (e *env) recovers(ds ...*driver) {
	for _, d := range ds {
		e.retry("a driver works when an outage is over", func() error {
			ctx, cancel := context.WithTimeout(e.ctx, e.timeout)
			defer cancel()
			c := e.claim(e.long)
			if _, err := d.Acquire(ctx, c); err != nil {
				return err
			}
			return d.Release(ctx, c)
		})
	}
}

// linkDeadline makes an Acquire, and then a Renew, over a slow link. If the driver counted the
// deadline of the hold from the late reply, the next grant would come before that deadline.
func linkDeadline(e *env) {
	l := e.cable()
	d := e.openAt(l.Store)
	b := e.open()
	for _, renewed := range []bool{false, true} {
		c := e.claim(max(e.term, 3*Delay)) // the reply must arrive before the term ends
		call := d.acquire
		if renewed {
			d.take(c)
			call = d.renew
		}

		l.Set(Slow)
		called := time.Now()
		g, err := call(c)
		l.Set(Up)
		mustInTime(err, "a call over a slow link")

		_, err = b.succeedsAfter(deadlineOf(g, c, called), c.Key)
		mustf(err, "with a reply that took %v", Delay)
	}
}

// linkCutWaiter cuts off the first of two waiters, and releases the key.
func linkCutWaiter(e *env) {
	l := e.cable()
	d := e.openAt(l.Store)
	a := e.open()
	b := e.open()
	c := a.hold(e.long)

	cut := e.queue(c.Key, 1, a, d)[0]
	w := b.wants(c.Key)
	e.queued(a, c.Key, 2)

	// These calls only take time, so that attempts that were sent before the link hung arrive while
	// the key is held. An attempt that arrived after the release could get the key.
	l.Set(Hung)
	for range 3 {
		must(a.granted(e.key()))
	}

	a.give(c)
	w.granted("Wait while another waiter is cut off")
	b.keep(w.c)
	l.Set(Up)
	b.give(w.c)

	// Either the first waiter gets the key now, or its Wait has timed out and leaves nothing
	// behind.
	cut.servedOrUnknown("Wait that was cut off")
	must(b.grantedAtLast(c.Key))
}
