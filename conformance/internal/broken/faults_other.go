package broken

import (
	"context"
	"errors"
	"path"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
)

// otherFaults are the faults of waits, reports, Close, outages and costs.
var otherFaults = []Fault{
	{Name: "Wait makes its attempt before it listens, and misses wake-ups",
		Clause: "wait-woken", kind: waits, spoil: spoils(sleepsUntilTheEnd, watchesLate)},
	{Name: "a hold by Wait cannot be renewed", Clause: "wait-woken", kind: waits,
		spoil: onRenew.inStore(func(x *command) (uint64, error) {
			if _, ok := x.d.granted[x.c.Token]; !ok {
				return 0, backend.ErrLost
			}
			return x.renew()
		})},
	{Name: "Wait takes the key although its context has ended",
		Clause: "wait-dead-context", kind: waits,
		spoil: onWait.first(func(ctx context.Context, o op) error {
			if ctx.Err() != nil {
				o.d.soundAcquire(context.Background(), o.c)
			}
			return ctx.Err()
		})},
	{Name: "a Wait cancelled during its attempt keeps the key",
		Clause: "wait-cancel-race", kind: waits,
		spoil: func(d *driver) { d.quit = func(backend.Claim) {} }},
	{Name: "the end of a Wait ends the other Waits of its driver",
		Clause: "wait-cancelled wait-independent", kind: waits, spoil: waitTogether},

	{Name: "a release wakes no caller that listens", Clause: "wake-change wake-shared", kind: wakes,
		spoil: onRelease.inStore(func(x *command) (uint64, error) {
			heard := x.changed[x.c.Key]
			delete(x.changed, x.c.Key)
			defer func() { x.changed[x.c.Key] = heard }()
			return x.release()
		})},
	{Name: "only the first claim of a caller that waits keeps readers out",
		Clause: "wake-writer-leaves", kind: wakes,
		spoil: onAcquire.inStore(func(x *command) (uint64, error) {
			first := x.r.writer
			fence, err := x.acquire()
			if err != nil && first.token != "" {
				x.r.writer = first
			}
			return fence, err
		})},
	{Name: "a caller is not woken although a signal was missed", Clause: "wake-missed", kind: wakes,
		spoil: func(d *driver) { d.moved = func() <-chan struct{} { return nil } }},
	{Name: "Listen does not say that it has failed", Clause: "wake-down", kind: wakes,
		spoil: func(d *driver) {
			d.listen = func(ctx context.Context, c backend.Claim) (<-chan struct{}, func(), error) {
				wake, stop, err := d.soundListen(ctx, c)
				if err != nil {
					return nil, func() {}, nil
				}
				return wake, stop, nil
			}
		}},

	{Name: "Ordered is claimed, but the last waiter is served first",
		Clause: "order-of-arrival shared-order inspect-waiters", kind: orders,
		spoil: onWait.firstSends(func(x *command) (uint64, error) {
			x.look() // joins the queue
			slices.Reverse(x.r.queue)
			return 0, nil
		})},
	{Name: "Acquire takes a free key past the queue", Clause: "order-no-barging", kind: orders,
		spoil: onAcquire.inStore(func(x *command) (uint64, error) {
			if x.r.token != "" {
				return 0, x.r.refusal(x.now)
			}
			return x.give()
		})},
	{Name: "the order is kept, but Ordered is not claimed",
		Clause: "order-not-claimed", kind: orders,
		spoil: claims(func(t *backend.Traits) { t.Ordered = false })},

	{Name: "Inspect and List return another owner",
		Clause: "inspect-holder list-foreign", kind: waits,
		spoil: func(d *driver) {
			d.inspect = func(ctx context.Context, key string) (backend.Status, error) {
				st, err := d.soundInspect(ctx, key)
				st.Owner = strings.ToUpper(st.Owner)
				return st, err
			}
			yieldsBy(func(yield yield) yield {
				return func(e backend.Entry, err error) bool {
					e.Owner = strings.ToUpper(e.Owner)
					return yield(e, err)
				}
			})(d)
		}},
	{Name: "Break wakes no waiter", Clause: "break-wakes break-frees", kind: waits,
		spoil: spoils(sleepsUntilTheEnd, onBreak.inStore(func(x *command) (uint64, error) {
			x.r.token = ""
			return 0, nil
		}))},
	{Name: "List takes the prefix for a pattern", Clause: "list-prefix", kind: waits,
		spoil: listsBy(func(ctx context.Context, _ *driver, prefix string, next lists) seq {
			return func(yield yield) {
				next(ctx, "")(func(e backend.Entry, err error) bool {
					ok, _ := path.Match(prefix+"*", e.Key)
					return !ok && err == nil || yield(e, err)
				})
			}
		})},
	{Name: "List ends after the first page", Clause: "list-pages", kind: waits,
		spoil: yieldsBy(func(yield yield) yield {
			n := 0
			return func(e backend.Entry, err error) bool {
				n++
				return n <= listPage && yield(e, err)
			}
		})},
	{Name: "List goes on after its loop has ended", Clause: "list-stops", kind: waits,
		spoil: yieldsBy(func(yield yield) yield {
			return func(e backend.Entry, err error) bool { yield(e, err); return true }
		})},
	{Name: "List asks the store before the loop", Clause: "list-lazy", kind: waits,
		spoil: listsBy(func(ctx context.Context, d *driver, prefix string, next lists) seq {
			d.send(ctx, backend.Claim{}, doNothing)
			return next(ctx, prefix)
		})},
	{Name: "List ends without its error", Clause: "list-cancelled link-outage", kind: waits,
		spoil: yieldsBy(func(yield yield) yield {
			return func(e backend.Entry, err error) bool { return err == nil && yield(e, nil) }
		})},

	{Name: "Close leaves a goroutine", Clause: "close-leaves-nothing",
		spoil: func(d *driver) { go func() { <-d.way.store.ended.Done() }() }},
	{Name: "Acquire ignores a record of another type",
		Clause: "others-exclude others-shared others-history", kind: waits,
		spoil: onAcquire.firstSends(func(x *command) (uint64, error) {
			if x.ofOther() {
				x.r.token = ""
			}
			return 0, nil
		})},
	{Name: "Break does not remove a record of another type", Clause: "others-break", kind: waits,
		spoil: onBreak.inStore(func(x *command) (uint64, error) {
			if x.ofOther() {
				return 0, nil
			}
			return x.breakKey()
		})},

	{Name: "an outage is reported as ErrHeld",
		Clause: "acquire-dead-context shared-error link-outage link-sent-once", kind: waits,
		spoil: onAcquire.turns(nil, backend.ErrHeld)},
	{Name: "CancelPrompt is claimed, but the second command ignores the cancellation",
		Clause: "link-ends", cost: twice,
		spoil: spoils(
			claimsEnds(backend.CancelPrompt),
			onRelease.by(func(ctx context.Context, o op) (backend.Grant, error) {
				return o.next(context.WithoutCancel(ctx), o.c)
			}),
			onRelease.firstSends(doNothing))},
	{Name: "a waiter that is cut off keeps its place", Clause: "link-cut-waiter", kind: orders,
		spoil: placesStay},
	{Name: "a dropped script is not loaded again", Clause: "flush-unnoticed", kind: waits,
		spoil: loadOnce},
	{Name: "a driver does not connect again", Clause: "kick-ridden-out", kind: waits,
		spoil: func(d *driver) {
			kicked := d.moved()
			onAcquire.first(func(context.Context, op) error {
				select {
				case <-kicked:
					return errRefused
				default:
					return nil
				}
			})(d)
		}},
	{Name: "holds do not survive a restart of the store", Clause: "restart-with-data",
		spoil: changes(func(s *store) { s.lose = func(bool) { clear(s.keys) } })},
	{Name: "Wait reports an outage as ErrInvalid", Clause: "restart-waiter link-wait-reply",
		kind: waits,
		spoil: spoils(
			onWait.asks(func(c *backend.Claim) { c.Timeout = 4 * latency }), // gives up too early
			onWait.turns(nil, backend.ErrInvalid))},
	{Name: "Network is claimed, but the driver reaches one process", Clause: "reach"},

	{Name: "a late vote is not released after Close", Clause: "leftovers-close", spoil: voteLate},
	{Name: "Acquire checks in an extra call whether the key is free",
		Clause: "commands-per-operation commands-waiting", spoil: onAcquire.firstSends(doNothing)},
	{Name: "a refused attempt leaves a record", Clause: "leftovers",
		spoil: onAcquire.after(backend.ErrHeld, func(x *command) {
			x.leave("attempts:" + x.c.Key)
		})},
}

// sleepsUntilTheEnd lets Wait poll only when a signal comes, or when the holder's term ends.
func sleepsUntilTheEnd(d *driver) {
	d.sleep = func(left time.Duration) time.Duration { return max(left, time.Millisecond) }
}

func watchesLate(d *driver) {
	d.watch = func(key string) func() <-chan struct{} {
		return func() <-chan struct{} { return d.way.store.watch(key) }
	}
}

// waitTogether ends all Waits of a driver when one of them ends without the key.
func waitTogether(d *driver) {
	ended, end := context.WithCancel(d.way.store.ended)
	onWait.by(func(ctx context.Context, o op) (backend.Grant, error) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		defer context.AfterFunc(ended, cancel)()
		g, err := o.next(ctx, o.c)
		if err != nil {
			end()
		}
		return g, err
	})(d)
}

// otherType is the prefix of the tokens of another strategy on the same store.
const otherType = "other:"

func other(s *store, k kind) backend.Driver {
	d := newDriver(newWay(s), k)
	d.typ = otherType
	return d.as()
}

// ofOther reports whether the other strategy holds the key.
func (x *command) ofOther() bool { return strings.HasPrefix(x.r.token, otherType) }

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
