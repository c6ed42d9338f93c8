package broken

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
)

var costFaults = []Fault{
	{Name: "a second record of a hold stays until the Release", Clause: "leftovers-expired",
		spoil: spoils(
			onAcquire.after(nil, func(_ *driver, s *store, c backend.Claim, now time.Time) { s.leave("history of "+c.Token, now) }),
			onRelease.after(nil, func(_ *driver, s *store, c backend.Claim, _ time.Time) { delete(s.keys, "history of "+c.Token) }))},
	{Name: "Break leaves a record of the broken hold", Clause: "leftovers-expired", kind: waits,
		spoil: onBreak.inStore(func(_ *driver, s *store, c backend.Claim, now time.Time) (uint64, error) {
			s.leave("broken "+c.Key, now)
			s.release(c, anyToken, now)
			return 0, nil
		})},
	{Name: "a late vote is not released after Close", Clause: "leftovers-close", spoil: voteLate},
	{Name: "Acquire checks in an extra call whether the key is free", Clause: "commands-per-operation", spoil: onAcquire.first(extraCommand)},
	{Name: "waiters poll without pause", Clause: "commands-waiting", kind: waits,
		spoil: onWait.by(func(ctx context.Context, d *driver, c backend.Claim, _ call) (backend.Grant, error) {
			for ctx.Err() == nil {
				g, err := d.soundAcquire(context.WithoutCancel(ctx), c)
				if !errors.Is(err, backend.ErrHeld) {
					return g, err
				}
			}
			return backend.Grant{}, backend.ErrHeld
		})},
	{Name: "a refused attempt leaves a record", Clause: "leftovers",
		spoil: onAcquire.after(backend.ErrHeld, func(_ *driver, s *store, c backend.Claim, now time.Time) { s.leave("attempts:"+c.Key, now) })},
}

// leave makes a record that no call removes.
func (s *store) leave(key string, now time.Time) {
	s.keys[key] = &record{hold: hold{token: "left", until: now.Add(time.Hour)}}
}

// voteLate makes each hold leave a vote, which arrives late. A driver that is open
// then removes the vote.
func voteLate(d *driver) {
	var closed atomic.Bool
	d.close = func() error { closed.Store(true); return nil }
	onAcquire.grants(func(d *driver, c backend.Claim, _ *backend.Grant) {
		go func() {
			vote := "vote for " + c.Token
			time.Sleep(10 * time.Millisecond)
			d.at(context.Background(), func(s *store, now time.Time) { s.leave(vote, now) })
			time.Sleep(10 * time.Millisecond)
			if !closed.Load() {
				d.at(context.Background(), func(s *store, _ time.Time) { delete(s.keys, vote) })
			}
		}()
	})(d)
}
