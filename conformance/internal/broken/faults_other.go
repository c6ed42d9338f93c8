package broken

import (
	"context"
	"strings"
	"time"

	"github.com/hasplock/hasp/backend"
)

// otherType is the type of the records of another strategy.
const otherType = "other:"

// other makes a driver of the other strategy.
func other(s *store, k kind) backend.Driver {
	d := newDriver(newWay(s), k)
	d.typ = otherType
	return d.as()
}

// ofOther reports whether a token is in a record of the other strategy.
func ofOther(token string) bool { return strings.HasPrefix(token, otherType) }

// overlook removes the record of key if it belongs to the other strategy.
func (d *driver) overlook(ctx context.Context, key string) {
	d.at(ctx, func(s *store, now time.Time) {
		if r := s.get(d.key(key), now); ofOther(r.token) {
			r.token = ""
		}
	})
}

var otherFaults = []Fault{
	{
		Name: "Acquire ignores a record of another type", Clause: "others-exclude", kind: polls,
		spoil: func(d *driver) {
			d.acquire = func(ctx context.Context, c backend.Claim) (backend.Grant, error) {
				d.overlook(ctx, c.Key)
				return d.soundAcquire(ctx, c)
			}
		},
	},
	{
		Name: "the lock is kept under a name that other strategies do not use", Clause: "others-exclude", kind: polls,
		spoil: func(d *driver) { d.key = func(key string) string { return "lock:" + key } },
	},
	{
		Name: "any token releases a record of another type", Clause: "others-exclude", kind: polls,
		spoil: func(d *driver) {
			mine := d.mine
			d.mine = func(c backend.Claim, token string) bool { return mine(c, token) || ofOther(token) }
		},
	},
	{
		Name: "a record of another type is reported as an outage", Clause: "others-exclude", kind: polls,
		spoil: func(d *driver) {
			d.acquire = func(ctx context.Context, c backend.Claim) (g backend.Grant, err error) {
				d.at(ctx, func(s *store, now time.Time) {
					if ofOther(s.get(d.key(c.Key), now).token) {
						err = errWrongType
					}
				})
				if err != nil {
					return g, err
				}
				return d.soundAcquire(ctx, c)
			}
		},
	},
	{
		Name: "Wait needs messages, and another strategy sends none", Clause: "others-wait", kind: waits,
		spoil: func(d *driver) {
			d.wait = func(ctx context.Context, c backend.Claim) (backend.Grant, error) {
				for {
					_, err := d.lookOnce(ctx, c)
					if _, its, _ := d.holder(ctx, c.Key); err == nil || !its {
						return d.soundWait(ctx, c)
					}
					if !d.sleepUntil(ctx, c, nil, err, true) {
						return backend.Grant{}, err
					}
				}
			}
		},
	},
	{
		Name: "Break does not remove a record of another type", Clause: "others-break", kind: waits,
		spoil: func(d *driver) {
			d.breakKey = func(ctx context.Context, key string) error {
				if _, its, _ := d.holder(ctx, key); its {
					return nil
				}
				return d.soundBreak(ctx, key)
			}
		},
	},
	{
		Name: "each strategy counts fences of its own", Clause: "others-fence", kind: waits,
		spoil: func(d *driver) {
			d.acquire = func(ctx context.Context, c backend.Claim) (backend.Grant, error) {
				g, err := d.soundAcquire(ctx, c)
				if err == nil && c.Fenced {
					d.at(ctx, func(s *store, _ time.Time) {
						s.fences["own:"+d.key(c.Key)]++
						g.Fence = s.fences["own:"+d.key(c.Key)]
					})
				}
				return g, err
			}
		},
	},
	{
		Name: "Wait ignores a record of another type", Clause: "others-history", kind: waits,
		spoil: func(d *driver) {
			d.wait = func(ctx context.Context, c backend.Claim) (backend.Grant, error) {
				d.overlook(ctx, c.Key)
				return d.soundWait(ctx, c)
			}
		},
	},
}

// holder returns the token that holds key, and whether it is the other
// strategy's.
func (d *driver) holder(ctx context.Context, key string) (token string, its bool, err error) {
	err = d.at(ctx, func(s *store, now time.Time) {
		r := s.get(d.key(key), now)
		token = r.token
		s.put(d.key(key), r)
	})
	return token, ofOther(token), err
}
