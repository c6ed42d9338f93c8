package broken

import (
	"context"
	"time"

	"github.com/hasplock/hasp/backend"
)

var sharedHoldFaults = []Fault{
	{Name: "the term of the key follows the first reader", Clause: "shared-longer", kind: waits,
		spoil: onAcquire.after(nil, func(_ *driver, s *store, c backend.Claim, _ time.Time) {
			if c.Shared {
				s.endsNoLaterThan(c.Key, s.keys[c.Key].readers[0].until)
			}
		})},
	{Name: "a renewal does not prolong a shared hold", Clause: "shared-renew-raises", kind: waits,
		spoil: onRenew.asks(func(c *backend.Claim) {
			if c.Shared {
				c.TTL = 0
			}
		})},
	{Name: "the term of the key follows the reader that was renewed last", Clause: "shared-renew-never-shortens", kind: waits,
		spoil: onRenew.after(nil, func(_ *driver, s *store, c backend.Claim, now time.Time) { s.endsNoLaterThan(c.Key, now.Add(c.TTL)) })},
	{Name: "a shared hold is kept after its release", Clause: "shared-keep", kind: waits,
		spoil: onRelease.after(nil, func(_ *driver, s *store, c backend.Claim, now time.Time) {
			if c.Shared && c.KeepUntil.After(now) {
				s.with(c.Key, now, func(r *record) {
					r.readers = append(r.readers, hold{token: keptToken, until: c.KeepUntil})
				})
			}
		})},
	{Name: "readers that waited get the key one after another", Clause: "shared-wait-together", kind: waits,
		spoil: onWait.by(oneByOne)},
	{Name: "a shared Wait cancelled during its attempt keeps the key", Clause: "shared-wait-cancelled", kind: waits,
		spoil: func(d *driver) {
			d.quit = func(c backend.Claim) {
				if !c.Shared {
					d.soundQuit(c)
				}
			}
		}},
	{Name: "a reader that waits passes a writer that came before it", Clause: "shared-order", kind: orders,
		spoil: onWait.first(func(ctx context.Context, d *driver, c backend.Claim) error {
			return d.at(ctx, func(s *store, now time.Time) {
				c := d.asked(c)
				s.look(c, true, now)
				s.with(c.Key, now, func(r *record) {
					var readers, writers []place
					for _, p := range r.queue {
						if p.shared {
							readers = append(readers, p)
						} else {
							writers = append(writers, p)
						}
					}
					r.queue = append(readers, writers...)
				})
			})
		})},
	{Name: "readers in a queue get the key one after another", Clause: "shared-order", kind: orders,
		spoil: onWait.by(oneByOne)},
	{Name: "a shared Acquire joins readers past the queue", Clause: "shared-no-barging", kind: orders,
		spoil: onAcquire.inStore(func(d *driver, s *store, c backend.Claim, now time.Time) (uint64, error) {
			if r := s.get(c.Key, now); c.Shared && len(r.readers) > 0 {
				return s.give(r, c, now), nil
			}
			return d.acquireIn(s, c, now)
		})},
	{Name: "a shared call whose reply is lost is repeated", Clause: "shared-sent-once", kind: waits,
		spoil: onAcquire.by(func(ctx context.Context, d *driver, c backend.Claim, next call) (backend.Grant, error) {
			if c.Shared {
				return again(ctx, d, c, next)
			}
			return next(ctx, c)
		})},
	{Name: "an intent stays although its caller has left", Clause: "leftovers-shared", kind: waits, spoil: placesStay},
	{Name: "a shared hold leaves a name of its owner", Clause: "leftovers-shared", kind: waits,
		spoil: onAcquire.after(nil, func(_ *driver, s *store, c backend.Claim, now time.Time) {
			if c.Shared {
				s.leave("owner of "+c.Token, now)
			}
		})},
	{Name: "a writer that is cut off keeps readers out", Clause: "shared-cut-writer", kind: waits, spoil: placesStay},
	{Name: "a writer that is cut off keeps its place before readers", Clause: "shared-cut-writer", kind: orders, spoil: placesStay},
}

// endsNoLaterThan ends all shared holds of a key at end, or sooner if they end sooner.
func (s *store) endsNoLaterThan(key string, end time.Time) {
	r := s.keys[key]
	for i := range r.readers {
		if r.readers[i].until.After(end) {
			r.readers[i].until = end
		}
	}
}

// oneByOne is a Wait that is granted a shared hold only if there is none.
func oneByOne(ctx context.Context, d *driver, c backend.Claim, next call) (backend.Grant, error) {
	for c.Shared {
		g, err := d.send(ctx, c, func(s *store, c backend.Claim, now time.Time) (uint64, error) {
			if r := s.get(c.Key, now); len(r.readers) > 0 {
				return 0, r.refusal(now)
			}
			return s.look(c, d.kind == orders, now)
		})
		if !definite(err) {
			return g, err
		}
		if pause(ctx, 10*latency) != nil {
			return backend.Grant{}, err
		}
	}
	return next(ctx, c)
}

// sharesToo makes a driver that polls obey Claim.Shared.
func sharesToo(d *driver) { d.shares = true }
