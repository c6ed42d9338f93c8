package broken

import (
	"context"
	"slices"
	"time"

	"github.com/hasplock/hasp/backend"
)

var waitFaults = []Fault{
	{Name: "Wait makes its attempt before it listens, and misses wake-ups",
		Clause: "wait-woken", kind: waits,
		spoil: spoils(sleeps(untilTheEnd), watchesLate)},
	{Name: "a hold by Wait cannot be renewed", Clause: "wait-free", kind: waits,
		spoil: onRenew.inStore(func(x *command) (uint64, error) {
			if _, ok := x.d.granted[x.c.Token]; !ok {
				return 0, backend.ErrLost
			}
			return x.renew()
		})},
	{Name: "the deadline counts from the beginning of the Wait",
		Clause: "wait-deadline", kind: waits,
		spoil: onWait.grants(func(_ op, g *backend.Grant) { g.Until = time.Time{} })},
	{Name: "a driver counts the term of a hold from when it saw the caller wait",
		Clause: "wait-seen", kind: waits,
		spoil: func(d *driver) {
			seen := map[string]time.Time{}
			onAcquire.inStore(func(x *command) (uint64, error) {
				if at, ok := seen[x.r.token]; ok && x.now.Sub(at) >= x.r.until.Sub(x.r.since) {
					x.r.hold = hold{}
				}
				if _, ok := seen[x.r.writer.token]; !ok && x.r.writer.token != "" {
					seen[x.r.writer.token] = x.now
				}
				return x.acquire()
			})(d)
		}},
	{Name: "a cancelled Wait does not return the store's answer",
		Clause: "wait-cancelled", kind: waits,
		spoil: onWait.by(func(ctx context.Context, o op) (backend.Grant, error) {
			g, err := o.next(ctx, o.c)
			if err != nil && ctx.Err() != nil {
				err = ctx.Err()
			}
			return g, err
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
		Clause: "wait-cancel-race", kind: waits, spoil: neverQuits},
	{Name: "the end of a Wait ends the other Waits of its driver",
		Clause: "wait-independent", kind: waits, spoil: waitTogether},
}

var wakeFaults = []Fault{
	{Name: "a release wakes no caller that listens", Clause: "wake-change", kind: wakes,
		spoil: onRelease.inStore(func(x *command) (uint64, error) {
			defer x.unheard()()
			return x.release()
		})},
	{Name: "only the first shared release wakes", Clause: "wake-shared", kind: wakes,
		spoil: onRelease.inStore(func(x *command) (uint64, error) {
			if len(x.r.readers) == 1 {
				defer x.unheard()()
			}
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
		spoil: func(d *driver) {
			d.listen = func(ctx context.Context, c backend.Claim) (<-chan struct{}, func(), error) {
				wake, stop, err := d.soundListen(ctx, c)
				_, moved := d.way.now()
				heard := make(chan struct{}, 1)
				go func() {
					select {
					case <-wake:
					case <-d.way.store.ended.Done():
						return
					}
					select {
					case <-moved: // the link has changed, which is no signal of the store
					default:
						heard <- struct{}{}
					}
				}()
				return heard, stop, err
			}
		}},
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
}

// unheard keeps signals of the key from the callers that listen, until the function end is called.
func (x *command) unheard() (end func()) {
	kept := x.changed[x.c.Key]
	delete(x.changed, x.c.Key)
	return func() { x.changed[x.c.Key] = kept }
}

// sleeps lets Wait poll only when a signal comes, or after the time that sleep() returns.
func sleeps(sleep func(left time.Duration) time.Duration) spoil {
	return func(d *driver) { d.sleep = sleep }
}

func untilTheEnd(left time.Duration) time.Duration { return max(left, time.Millisecond) }

func watchesLate(d *driver) {
	d.watch = func(key string) func() <-chan struct{} {
		return func() <-chan struct{} { return d.way.store.watch(key) }
	}
}

// watchesNothing keeps all signals from Wait.
func watchesNothing(d *driver) {
	d.watch = func(string) func() <-chan struct{} { return func() <-chan struct{} { return nil } }
}

// neverQuits lets a Wait that fails leave its place and its hold in the store.
func neverQuits(d *driver) { d.quit = func(backend.Claim) {} }

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

var orderFaults = []Fault{
	{Name: "Ordered is claimed, but the last waiter is served first",
		Clause: "order-of-arrival", kind: orders, spoil: queues(slices.Reverse)},
	{Name: "a waiter that gives up is replaced by the last in the queue",
		Clause: "order-kept", kind: orders,
		spoil: func(d *driver) {
			d.quit = func(c backend.Claim) {
				d.visit(context.Background(), c, func(x *command) {
					queue := x.r.queue
					at := slices.IndexFunc(queue, func(p queued) bool { return p.token == c.Token })
					if at >= 0 {
						last := len(queue) - 1
						queue[at] = queue[last]
						x.r.queue = queue[:last]
					}
				})
				d.soundQuit(c)
			}
		}},
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
}

// queues lets a Wait, before its first poll, join the queue and call f, which may change the queue.
func queues(f func(queue []queued)) spoil {
	return onWait.firstSends(func(x *command) (uint64, error) {
		x.look()
		f(x.r.queue)
		return 0, nil
	})
}
