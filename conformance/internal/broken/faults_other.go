package broken

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
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
	{Name: "Acquire ignores a record of another type",
		Clause: "others-exclude others-shared others-history", kind: waits,
		spoil: onAcquire.firstSends(overlook)},
	{Name: "Break does not remove a record of another type", Clause: "others-break", kind: waits,
		spoil: onBreak.by(func(ctx context.Context, o op) (backend.Grant, error) {
			if token, _ := o.d.holder(ctx, o.c.Key); ofOther(token) {
				return backend.Grant{}, nil
			}
			return o.next(ctx, o.c)
		})},
}

// overlook removes the hold of a key if that hold belongs to the other strategy.
func overlook(x *command) (uint64, error) {
	if ofOther(x.r.token) {
		x.r.token = ""
	}
	return 0, nil
}

var outageFaults = []Fault{
	{Name: "an outage is reported as ErrHeld", Clause: "link-outage", kind: waits,
		spoil: onAcquire.turns(nil, backend.ErrHeld)},
	{Name: "a call of two commands whose reply is lost is repeated",
		Clause: "link-sent-once", cost: twice,
		spoil: spoils(onAcquire.by(again), onAcquire.firstSends(doNothing))},
	{Name: "Wait repeats an attempt whose reply is lost, and waits for its own hold",
		Clause: "link-wait-reply", kind: waits,
		spoil: onWait.by(func(ctx context.Context, o op) (backend.Grant, error) {
			g, err := o.d.soundAcquire(ctx, o.c)
			if err == nil {
				return g, nil
			}
			if errors.Is(err, errNoReply) {
				o.c.Token += "-again"
			}
			return o.next(ctx, o.c)
		})},
	{Name: "CancelPrompt is claimed, but the second command ignores the cancellation",
		Clause: "link-ends", cost: twice,
		spoil: spoils(
			claimsEnds(backend.CancelPrompt),
			onRelease.by(byDeadline),
			onRelease.firstSends(doNothing))},
	{Name: "a waiter that is cut off keeps its place", Clause: "link-cut-waiter", kind: orders,
		spoil: placesStay},
	{Name: "a dropped script is not loaded again", Clause: "flush-unnoticed", kind: waits,
		spoil: loadOnce},
	{Name: "a waiter does not notice that its connection has ended",
		Clause: "kick-ridden-out", kind: waits, spoil: onWait.by(waitUntilKicked)},
	{Name: "renewals trust the driver's memory",
		Clause: "break-frees restart-without-data", kind: waits,
		spoil: onRenew.turns(backend.ErrLost, nil)},
	{Name: "holds do not survive a restart of the store", Clause: "restart-with-data",
		spoil: changes(func(s *store) { s.lose = func(bool) { clear(s.keys) } })},
	{Name: "Wait reports a restart as ErrHeld", Clause: "restart-waiter", kind: waits,
		spoil: spoils(
			onWait.asks(func(c *backend.Claim) { c.Timeout = 4 * latency }), // gives up too early
			onWait.turns(nil, backend.ErrHeld))},
	{Name: "Network is claimed, but the driver reaches one process", Clause: "reach"},
}

// byDeadline lets a call ignore cancellation, and end at the deadline of its context.
func byDeadline(ctx context.Context, o op) (backend.Grant, error) {
	deadline, ok := ctx.Deadline()
	ctx = context.WithoutCancel(ctx)
	if ok {
		later, cancel := context.WithDeadline(ctx, deadline)
		defer cancel()
		ctx = later
	}
	return o.next(ctx, o.c)
}

// again is a fault: the driver repeats a call whose reply is lost.
func again(ctx context.Context, o op) (backend.Grant, error) {
	g, err := o.next(ctx, o.c)
	if errors.Is(err, errNoReply) {
		return o.next(ctx, o.c)
	}
	return g, err
}

// loadOnce lets renewals need a script that is loaded only when the driver is opened.
func loadOnce(d *driver) {
	s := d.way.store
	loaded := s.flushes.Load()
	onRenew.first(func(context.Context, op) error {
		if s.flushes.Load() != loaded {
			return errors.New("broken: no such script")
		}
		return nil
	})(d)
}

// waitUntilKicked lets a Wait receive no message after the store has ended the connection.
func waitUntilKicked(ctx context.Context, o op) (backend.Grant, error) {
	_, kicked := o.d.way.now()
	on, stop := context.WithCancel(ctx)
	defer stop()
	go func() {
		select {
		case <-kicked:
			stop()
		case <-on.Done():
		}
	}()

	g, err := o.next(on, o.c)
	if err != nil {
		<-ctx.Done()
	}
	return g, err
}

var costFaults = []Fault{
	{Name: "a late vote is not released after Close", Clause: "leftovers-close", spoil: voteLate},
	{Name: "Acquire checks in an extra call whether the key is free",
		Clause: "commands-per-operation", spoil: onAcquire.firstSends(doNothing)},
	{Name: "waiters poll without pause", Clause: "commands-waiting", kind: waits,
		spoil: sleeps(func(time.Duration) time.Duration { return 0 })},
	{Name: "a refused attempt leaves a record", Clause: "leftovers",
		spoil: onAcquire.after(backend.ErrHeld, func(x *command) {
			x.leave("attempts:" + x.c.Key)
		})},
}

func (x *command) leave(key string) {
	x.keys[key] = &record{hold: hold{token: "left", until: x.now.Add(time.Hour)}}
}

// voteLate lets each hold leave a record in the store if the driver is closed soon after the grant.
func voteLate(d *driver) {
	var closed atomic.Bool
	d.close = func() error { closed.Store(true); return nil }
	onAcquire.grants(func(o op, _ *backend.Grant) {
		go func() {
			time.Sleep(10 * time.Millisecond)
			if closed.Load() {
				o.d.visit(context.Background(), o.c, func(x *command) {
					x.leave("vote for " + o.c.Token)
				})
			}
		}()
	})(d)
}
