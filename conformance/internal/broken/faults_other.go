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

var otherFaults = []Fault{
	{Name: "Acquire ignores a record of another type", Clause: "others-exclude", spoil: onAcquire.first(overlook)},
	{Name: "the lock is kept under a name that other strategies do not use", Clause: "others-exclude",
		spoil: names(func(key string) string { return "lock:" + key })},
	{Name: "any token releases a record of another type", Clause: "others-exclude",
		spoil: accepts(func(_ *driver, c backend.Claim, token string) bool { return token == c.Token || ofOther(token) })},
	{Name: "a record of another type is reported as an outage", Clause: "others-exclude",
		spoil: onAcquire.first(func(ctx context.Context, d *driver, c backend.Claim) error {
			if token, _ := d.holder(ctx, c.Key); ofOther(token) {
				return errWrongType
			}
			return nil
		})},
	{Name: "Wait needs messages, and another strategy sends none", Clause: "others-wait", kind: waits,
		spoil: onWait.by(func(ctx context.Context, d *driver, c backend.Claim, next call) (backend.Grant, error) {
			for {
				_, err := d.look(ctx, c)
				if token, _ := d.holder(ctx, c.Key); err == nil || !ofOther(token) {
					return next(ctx, c)
				}
				if !d.sleep(ctx, c, nil, err, true) {
					return backend.Grant{}, err
				}
			}
		})},
	{Name: "Break does not remove a record of another type", Clause: "others-break", kind: waits,
		spoil: onBreak.by(func(ctx context.Context, d *driver, c backend.Claim, next call) (backend.Grant, error) {
			if token, _ := d.holder(ctx, c.Key); ofOther(token) {
				return backend.Grant{}, nil
			}
			return next(ctx, c)
		})},
	{Name: "each strategy counts fences of its own", Clause: "others-fence", kind: waits,
		spoil: onAcquire.inStore(func(d *driver, s *store, c backend.Claim, now time.Time) (uint64, error) {
			fence, err := d.acquireIn(s, c, now)
			if err == nil && c.Fenced {
				s.fences["own:"+c.Key]++
				fence = s.fences["own:"+c.Key]
			}
			return fence, err
		})},
	{Name: "Wait ignores a record of another type", Clause: "others-history", kind: waits, spoil: onWait.first(overlook)},
}

// overlook removes the hold of a key if it belongs to the other strategy.
func overlook(ctx context.Context, d *driver, c backend.Claim) error {
	return d.record(ctx, c.Key, func(r *record, _ time.Time) {
		if ofOther(r.token) {
			r.token = ""
		}
	})
}
