package broken

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
)

// setUntil is a renewal that always sets the end of the term, even to an earlier
// time.
func (d *driver) setUntil(ctx context.Context, c backend.Claim, mine func(r *record) bool) (g backend.Grant, err error) {
	called := time.Now()
	if cerr := d.at(ctx, func(s *store, now time.Time) {
		r := s.keys[d.key(c.Key)]
		if r == nil || !mine(r) {
			err = backend.ErrLost
			return
		}
		r.until = now.Add(c.TTL)
	}); cerr != nil {
		return g, cerr
	}
	g.Until = d.deadline(c, called)
	return g, err
}

// remembers makes a driver keep the last claim of each key after its end, and
// returns the claims.
func (d *driver) remembers() map[string]backend.Claim {
	last := map[string]backend.Claim{} // by key; guarded by the store
	d.onGrant(func(_ *store, c backend.Claim, _ time.Time) { last[c.Key] = c })
	return last
}

var renewFaults = []Fault{
	{
		Name: "Renew does nothing", Clause: "renew-holds", kind: polls,
		spoil: func(d *driver) {
			d.renewOne = func(ctx context.Context, c backend.Claim) (backend.Grant, error) { return backend.Grant{}, nil }
		},
	},
	{
		Name: "Renew never prolongs beyond the first term", Clause: "renew-raises", kind: polls,
		spoil: func(d *driver) {
			last := d.remembers()
			d.renewOne = func(ctx context.Context, c backend.Claim) (backend.Grant, error) {
				d.at(ctx, func(*store, time.Time) { c.TTL = min(c.TTL, last[c.Key].TTL) })
				return d.soundRenewOne(ctx, c)
			}
		},
	},
	{
		Name: "Renew shortens terms", Clause: "renew-never-shortens", kind: polls,
		spoil: func(d *driver) {
			d.renewOne = func(ctx context.Context, c backend.Claim) (backend.Grant, error) {
				return d.setUntil(ctx, c, func(r *record) bool { return r.token == c.Token })
			}
		},
	},
	{
		Name: "Renew takes a free key again", Clause: "renew-never-revives", kind: polls,
		spoil: func(d *driver) {
			d.renewOne = func(ctx context.Context, c backend.Claim) (backend.Grant, error) {
				g, err := d.soundRenewOne(ctx, c)
				if errors.Is(err, backend.ErrLost) {
					if g, err := d.soundAcquire(ctx, c); err == nil {
						return g, nil
					}
				}
				return g, err
			}
		},
	},
	{
		Name: "Renew takes the key from the successor", Clause: "renew-stale", kind: polls,
		spoil: func(d *driver) {
			d.renewOne = func(ctx context.Context, c backend.Claim) (backend.Grant, error) {
				g, err := d.soundRenewOne(ctx, c)
				if errors.Is(err, backend.ErrLost) {
					d.at(ctx, func(s *store, now time.Time) {
						r := s.get(d.key(c.Key), now)
						if r.token != "" {
							s.give(d.key(c.Key), r, c, now)
						}
						s.put(d.key(c.Key), r)
					})
				}
				return g, err
			}
		},
	},
	{
		Name: "Renew compares the token in one command and prolongs in another", Clause: "link-late-renew", kind: polls, cost: twice,
		spoil: func(d *driver) {
			d.renewOne = func(ctx context.Context, c backend.Claim) (g backend.Grant, err error) {
				called := time.Now()
				if lost, _ := d.lost(ctx, c); lost {
					return g, backend.ErrLost
				}
				if cerr := d.at(ctx, func(s *store, now time.Time) {
					err = s.renew(d.key(c.Key), d.ttl(c), anyToken, now)
				}); cerr != nil {
					return g, cerr
				}
				g.Until = d.deadline(c, called)
				return g, err
			}
		},
	},
	{
		Name: "Renew prolongs any hold of the key", Clause: "renew-foreign", kind: polls,
		spoil: func(d *driver) {
			d.renewOne = func(ctx context.Context, c backend.Claim) (g backend.Grant, err error) {
				cerr := d.at(ctx, func(s *store, now time.Time) {
					err = s.renew(d.key(c.Key), c.TTL, anyToken, now)
				})
				return g, errors.Join(err, cerr)
			}
		},
	},
	{
		Name: "only the first claim of a batch is renewed", Clause: "renew-many", kind: polls,
		spoil: func(d *driver) {
			d.renew = func(ctx context.Context, cs []backend.Claim, done func(int, backend.Grant, error)) {
				for i, c := range cs {
					if lost, _ := d.lost(ctx, c); lost || i == 0 {
						g, err := d.soundRenewOne(ctx, c)
						done(i, g, err)
						continue
					}
					done(i, backend.Grant{}, nil)
				}
			}
		},
	},
	{
		Name: "one lost claim fails its batch", Clause: "renew-many", kind: polls,
		spoil: func(d *driver) {
			d.renew = func(ctx context.Context, cs []backend.Claim, done func(int, backend.Grant, error)) {
				var all error
				for _, c := range cs {
					if _, err := d.soundRenewOne(ctx, c); err != nil {
						all = err
					}
				}
				for i := range cs {
					done(i, backend.Grant{}, all)
				}
			}
		},
	},
	{
		Name: "done is called twice", Clause: "renew-answers", kind: polls,
		spoil: func(d *driver) {
			d.renew = func(ctx context.Context, cs []backend.Claim, done func(int, backend.Grant, error)) {
				d.soundRenew(ctx, cs, done)
				if ctx.Err() != nil {
					for i := range cs { // "unanswered", without a look at what was
						done(i, backend.Grant{}, ctx.Err())
					}
				}
			}
		},
	},
	{
		Name: "done is called after Renew has returned", Clause: "renew-answers", kind: polls,
		spoil: func(d *driver) {
			d.renew = func(ctx context.Context, cs []backend.Claim, done func(int, backend.Grant, error)) {
				ended := make(chan struct{})
				go func() {
					defer close(ended)
					backend.RenewEach(context.WithoutCancel(ctx), cs, done, d.soundRenewOne)
				}()
				select {
				case <-ended:
				case <-ctx.Done():
				}
			}
		},
	},
	{
		Name: "a renewal that was not sent is reported as lost", Clause: "renew-answers", kind: polls,
		spoil: func(d *driver) {
			d.renew = func(ctx context.Context, cs []backend.Claim, done func(int, backend.Grant, error)) {
				for i, c := range cs {
					g, err := d.soundRenewOne(ctx, c)
					if err != nil {
						err = backend.ErrLost
					}
					done(i, g, err)
				}
			}
		},
	},
}

// lost reports whether c does not hold its key, without a renewal.
func (d *driver) lost(ctx context.Context, c backend.Claim) (lost bool, err error) {
	token, _, err := d.holder(ctx, c.Key)
	return token != c.Token, err
}

var fenceFaults = []Fault{
	{
		Name: "Fenced is claimed, but the fence is zero", Clause: "fence-grows", kind: waits,
		spoil: func(d *driver) {
			d.acquire = answers(d.soundAcquire, func(_ backend.Claim, g *backend.Grant, _ *error) { g.Fence = 0 })
		},
	},
	{
		Name: "fences are granted, but Fenced is not claimed", Clause: "fence-unsupported", kind: waits,
		spoil: func(d *driver) { d.claims(func(t *backend.Traits) { t.Fenced = false }) },
	},
	{
		Name: "a fence repeats after the end of a term", Clause: "fence-after-expiry", kind: waits,
		spoil: func(d *driver) {
			d.acquire = func(ctx context.Context, c backend.Claim) (g backend.Grant, err error) {
				d.at(ctx, func(s *store, now time.Time) {
					key, last := d.key(c.Key), s.fences[d.key(c.Key)]
					r := s.keys[key]
					expired := r != nil && r.token != "" && !now.Before(r.until)
					g.Fence, err = s.acquire(key, c, now)
					if err == nil && expired && c.Fenced { // counted up by Release, which never came
						g.Fence, s.fences[key], s.keys[key].fence = last, last, last
					}
				})
				return g, err
			}
		},
	},
	{
		Name: "each driver counts fences of its own", Clause: "fence-grows", kind: waits,
		spoil: func(d *driver) {
			var n atomic.Uint64
			d.acquire = answers(d.soundAcquire, func(_ backend.Claim, g *backend.Grant, _ *error) {
				if g.Fence > 0 {
					g.Fence = n.Add(1)
				}
			})
		},
	},
	{
		Name: "fences start again after a driver is closed", Clause: "fence-outlives-drivers", kind: waits,
		spoil: func(d *driver) {
			d.way.store.count = func(last uint64, _ time.Time) uint64 { return last + 1 }
			d.close = func() error {
				return d.at(context.Background(), func(s *store, _ time.Time) { clear(s.fences) })
			}
		},
	},
	{
		Name: "every hold has a fence, even if the claim asks for none", Clause: "fence-when-asked", kind: waits,
		spoil: func(d *driver) { d.acquire = asks(d.soundAcquire, func(c *backend.Claim) { c.Fenced = true }) },
	},
	{
		Name: "fences are lost with the store's data", Clause: "fence-data-loss", kind: waits,
		spoil: func(d *driver) { d.way.store.count = func(last uint64, _ time.Time) uint64 { return last + 1 } },
	},
	{
		Name: "fences are lost in any restart", Clause: "fence-restart", kind: waits,
		spoil: func(d *driver) {
			s := d.way.store
			s.count = func(last uint64, _ time.Time) uint64 { return last + 1 }
			s.lose = func(bool) { clear(s.fences) }
		},
	},
}
