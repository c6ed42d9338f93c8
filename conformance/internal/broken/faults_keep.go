package broken

import (
	"context"
	"time"

	"github.com/hasplock/hasp/backend"
)

var keepFaults = []Fault{
	{Name: "Keeps is claimed, but KeepUntil is ignored", Clause: "keep-refuses", kind: waits,
		spoil: onRelease.asks(func(c *backend.Claim) { c.KeepUntil = time.Time{} })},
	{Name: "a kept key has another holder's name", Clause: "keep-refuses", kind: waits,
		spoil: keepsBy(func(r *record, until time.Time) { r.owner, r.until = "nobody", until })},
	{Name: "KeepUntil does not end a longer term", Clause: "keep-shortens", kind: waits,
		spoil: keepsBy(func(r *record, until time.Time) {
			if until.After(r.until) {
				r.until = until
			}
		})},
	{Name: "KeepUntil does not prolong a term", Clause: "keep-prolongs", kind: waits,
		spoil: keepsBy(func(r *record, until time.Time) {
			if until.Before(r.until) {
				r.until = until
			}
		})},
	{Name: "Renew prolongs a kept record", Clause: "keep-renew", kind: waits,
		spoil: onRenew.inStore(func(_ *driver, s *store, c backend.Claim, now time.Time) (uint64, error) {
			return 0, s.renew(c, func(token string) bool { return token == c.Token || token == keptToken }, now)
		})},
	{Name: "a second release frees a kept key", Clause: "keep-release", kind: waits,
		spoil: onRelease.after(backend.ErrLost, func(_ *driver, s *store, c backend.Claim, now time.Time) {
			s.quit(backend.Claim{Key: c.Key, Token: keptToken}, now)
		})},
	{Name: "a release with KeepUntil does not compare the token", Clause: "keep-foreign", kind: waits,
		spoil: onRelease.inStore(func(d *driver, s *store, c backend.Claim, now time.Time) (uint64, error) {
			if !c.KeepUntil.IsZero() {
				return 0, s.release(c, anyToken, now)
			}
			return d.releaseIn(s, c, now)
		})},
	{Name: "a release with a KeepUntil that has passed leaves the record", Clause: "keep-past", kind: waits,
		spoil: onRelease.inStore(func(d *driver, s *store, c backend.Claim, now time.Time) (uint64, error) {
			if !c.KeepUntil.IsZero() && !c.KeepUntil.After(now) {
				return 0, nil
			}
			return d.releaseIn(s, c, now)
		})},
	{Name: "a kept hold begins the fences again", Clause: "keep-fence", kind: waits,
		spoil: spoils(changes(countByOne), onRelease.inStore(func(d *driver, s *store, c backend.Claim, now time.Time) (uint64, error) {
			if !c.KeepUntil.IsZero() {
				delete(s.fences, c.Key)
			}
			return d.releaseIn(s, c, now)
		}))},
	{Name: "a waiter sleeps until the end of the term that it was told", Clause: "keep-wait", kind: waits,
		spoil: onWait.by(func(ctx context.Context, d *driver, c backend.Claim, next call) (backend.Grant, error) {
			_, err := d.soundAcquire(ctx, c)
			if left := retryAfter(err); left > 0 {
				if err := pause(ctx, left); err != nil {
					return backend.Grant{}, err
				}
			}
			return next(ctx, c)
		})},
	{Name: "a release with KeepUntil hands the key to a waiter at once", Clause: "keep-wait", kind: waits,
		spoil: onRelease.inStore(func(d *driver, s *store, c backend.Claim, now time.Time) (uint64, error) {
			if s.changed[c.Key] != nil { // a caller waits
				c.KeepUntil = time.Time{}
			}
			return d.releaseIn(s, c, now)
		})},
	{Name: "Break finds no kept key", Clause: "keep-break", kind: waits,
		spoil: onBreak.inStore(func(d *driver, s *store, c backend.Claim, now time.Time) (uint64, error) {
			s.release(c, func(token string) bool { return token != keptToken }, now)
			return 0, nil
		})},
	{Name: "KeepUntil is obeyed, but Keeps is not claimed", Clause: "keep-unclaimed", kind: waits,
		spoil: claims(func(t *backend.Traits) { t.Keeps = false })},
}

// keepsBy makes a release with KeepUntil leave the term as it was, and run f on the
// record.
func keepsBy(f func(r *record, until time.Time)) spoil {
	return onRelease.inStore(func(d *driver, s *store, c backend.Claim, now time.Time) (uint64, error) {
		r := s.get(c.Key, now)
		until := r.until
		_, err := d.releaseIn(s, c, now)
		if err == nil && c.KeepUntil.After(now) {
			keep := r.until
			r.until = until
			f(r, keep)
		}
		return 0, err
	})
}
