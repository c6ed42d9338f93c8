package broken

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/conformance"
)

// otherType is the prefix of the tokens of another strategy on the same store.
const otherType = "other:"

func other(s *store, k kind) backend.Driver {
	d := newDriver(newWay(s), k)
	d.typ = otherType
	return d.as()
}

func ofOther(token string) bool { return strings.HasPrefix(token, otherType) }

var otherFaults = []Fault{
	{Name: "Acquire ignores a record of another type", Clause: "others-exclude others-shared", kind: waits, spoil: onAcquire.firstSends(overlook)},
	{Name: "any token releases a record of another type", Clause: "others-exclude",
		spoil: accepts(func(_ *driver, c backend.Claim, token string) bool { return token == c.Token || ofOther(token) })},
	{Name: "Break does not remove a record of another type", Clause: "others-break", kind: waits,
		spoil: onBreak.by(func(ctx context.Context, d *driver, c backend.Claim, next call) (backend.Grant, error) {
			if token, _ := d.holder(ctx, c.Key); ofOther(token) {
				return backend.Grant{}, nil
			}
			return next(ctx, c)
		})},
	{Name: "each strategy counts fences of its own", Clause: "others-history", kind: waits,
		spoil: onAcquire.inStore(func(x *command) (uint64, error) {
			fence, err := x.acquire()
			if err == nil && x.c.Fenced {
				x.fences["own:"+x.c.Key]++
				fence = x.fences["own:"+x.c.Key]
			}
			return fence, err
		})},
	{Name: "Wait ignores a record of another type", Clause: "others-history", kind: waits, spoil: onWait.firstSends(overlook)},
}

// overlook removes the hold of a key if that hold belongs to the other strategy.
func overlook(x *command) (uint64, error) {
	if ofOther(x.r.token) {
		x.r.token = ""
	}
	return 0, nil
}

var outageFaults = []Fault{
	{Name: "an outage is reported as ErrHeld", Clause: "link-outage", kind: waits, spoil: onAcquire.turns(nil, backend.ErrHeld)},
	{Name: "an outage is reported as success", Clause: "link-outage", spoil: onRelease.turns(nil, nil)},
	{Name: "a stopped store is reported as ErrLost", Clause: "link-outage", kind: waits, spoil: onRelease.turns(nil, backend.ErrLost)},
	{Name: "a call does not end while the store hangs", Clause: "link-outage", spoil: onRelease.by(byDeadline(time.Hour))},
	{Name: "a driver does not work again after an outage", Clause: "link-outage", spoil: dieInAnOutage},
	{Name: "a call whose reply is lost is repeated", Clause: "link-sent-once", kind: waits, spoil: onAcquire.by(again)},
	{Name: "a call of two commands whose reply is lost is repeated", Clause: "link-sent-once", cost: twice,
		spoil: spoils(onAcquire.by(again), onAcquire.firstSends(doNothing))},
	{Name: "Wait repeats an attempt whose reply is lost, and waits for its own hold", Clause: "link-wait-reply", kind: waits,
		spoil: onWait.by(func(ctx context.Context, d *driver, c backend.Claim, next call) (backend.Grant, error) {
			g, err := d.soundAcquire(ctx, c)
			if err == nil {
				return g, nil
			}
			if errors.Is(err, errNoReply) {
				c.Token += "-again"
			}
			return next(ctx, c)
		})},
	{Name: "CancelPrompt is claimed, but the second command ignores the cancellation", Clause: "link-ends", cost: twice,
		spoil: spoils(claimsEnds(backend.CancelPrompt), onRelease.by(byDeadline(0)), onRelease.firstSends(doNothing))},
	{Name: "a waiter that is cut off keeps its place", Clause: "link-cut-waiter", kind: orders, spoil: placesStay},
	{Name: "CancelByDeadline is claimed, but a call ends a second later", Clause: "link-ends",
		spoil: spoils(claimsEnds(backend.CancelByDeadline), onAcquire.by(byDeadline(time.Second)))},
	{Name: "a dropped script is not loaded again", Clause: "flush-unnoticed", kind: waits, spoil: loadOnce},
	{Name: "a waiter does not notice that its connection has ended", Clause: "kick-ridden-out", kind: waits, spoil: onWait.by(waitUntilKicked)},
	{Name: "renewals trust the driver's memory", Clause: "break-frees restart-without-data", kind: waits, spoil: onRenew.turns(backend.ErrLost, nil)},
	{Name: "holds do not survive a restart of the store", Clause: "restart-with-data",
		spoil: changes(func(s *store) { s.lose = func(bool) { clear(s.keys) } })},
	{Name: "Wait reports a restart as ErrHeld", Clause: "restart-waiter", kind: waits,
		spoil: spoils(
			onWait.asks(func(c *backend.Claim) { c.Timeout = 4 * latency }), // gives up too early
			onWait.turns(nil, backend.ErrHeld))},
	{Name: "Network is claimed, but the driver reaches one process", Clause: "reach"},
	{Name: "Process is claimed, but another process is refused", Clause: "reach",
		spoil: spoils(claims(func(t *backend.Traits) { t.Reach = backend.Process }),
			onAcquire.first(func(context.Context, *driver, backend.Claim) error {
				if conformance.Child() {
					return backend.ErrHeld
				}
				return nil
			}))},
}

// byDeadline lets a call ignore cancellation and end at its context's deadline + late.
func byDeadline(late time.Duration) func(context.Context, *driver, backend.Claim, call) (backend.Grant, error) {
	return func(ctx context.Context, _ *driver, c backend.Claim, next call) (backend.Grant, error) {
		deadline, ok := ctx.Deadline()
		ctx = context.WithoutCancel(ctx)
		if ok {
			later, cancel := context.WithDeadline(ctx, deadline.Add(late))
			defer cancel()
			ctx = later
		}
		return next(ctx, c)
	}
}

// dieInAnOutage lets every Acquire fail after the first outage.
func dieInAnOutage(d *driver) {
	var dead atomic.Bool
	onAcquire.by(func(ctx context.Context, _ *driver, c backend.Claim, next call) (backend.Grant, error) {
		if dead.Load() {
			return backend.Grant{}, errRefused
		}
		g, err := next(ctx, c)
		if errors.Is(err, errRefused) {
			dead.Store(true)
		}
		return g, err
	})(d)
}

// again is a fault: the driver repeats a call whose reply is lost.
func again(ctx context.Context, _ *driver, c backend.Claim, next call) (backend.Grant, error) {
	g, err := next(ctx, c)
	if errors.Is(err, errNoReply) {
		return next(ctx, c)
	}
	return g, err
}

// loadOnce lets renewals need a script that is loaded only when the driver is opened.
func loadOnce(d *driver) {
	s := d.way.store
	loaded := s.flushes.Load()
	onRenew.first(func(context.Context, *driver, backend.Claim) error {
		if s.flushes.Load() != loaded {
			return errors.New("broken: no such script")
		}
		return nil
	})(d)
}

// waitUntilKicked lets a Wait receive no message after the store has ended the connection.
func waitUntilKicked(ctx context.Context, d *driver, c backend.Claim, next call) (backend.Grant, error) {
	_, kicked := d.way.now()
	on, stop := context.WithCancel(ctx)
	defer stop()
	go func() {
		select {
		case <-kicked:
			stop()
		case <-on.Done():
		}
	}()

	g, err := next(on, c)
	if err != nil {
		<-ctx.Done()
	}
	return g, err
}

var costFaults = []Fault{
	{Name: "a second record of a hold stays until the Release", Clause: "leftovers-expired",
		spoil: spoils(
			onAcquire.after(nil, func(x *command) { x.leave("history of " + x.c.Token) }),
			onRelease.after(nil, func(x *command) { delete(x.keys, "history of "+x.c.Token) }))},
	{Name: "Break leaves a record of the broken hold", Clause: "leftovers-expired", kind: waits,
		spoil: onBreak.inStore(func(x *command) (uint64, error) {
			x.leave("broken " + x.c.Key)
			return x.breakKey()
		})},
	{Name: "a late vote is not released after Close", Clause: "leftovers-close", spoil: voteLate},
	{Name: "Acquire checks in an extra call whether the key is free", Clause: "commands-per-operation", spoil: onAcquire.firstSends(doNothing)},
	{Name: "waiters poll without pause", Clause: "commands-waiting", kind: waits, spoil: sleeps(func(time.Duration) time.Duration { return 0 })},
	{Name: "a refused attempt leaves a record", Clause: "leftovers",
		spoil: onAcquire.after(backend.ErrHeld, func(x *command) { x.leave("attempts:" + x.c.Key) })},
}

func (x *command) leave(key string) {
	x.keys[key] = &record{hold: hold{token: "left", until: x.now.Add(time.Hour)}}
}

// voteLate lets each hold leave a record in the store if the driver is closed soon after the grant.
func voteLate(d *driver) {
	var closed atomic.Bool
	d.close = func() error { closed.Store(true); return nil }
	onAcquire.grants(func(d *driver, c backend.Claim, _ *backend.Grant) {
		go func() {
			time.Sleep(10 * time.Millisecond)
			if closed.Load() {
				d.visit(context.Background(), c, func(x *command) { x.leave("vote for " + c.Token) })
			}
		}()
	})(d)
}
