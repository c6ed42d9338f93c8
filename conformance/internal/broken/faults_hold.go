package broken

import (
	"context"
	"time"

	"github.com/hasplock/hasp/backend"
)

// givesHandles adds handles to the grants of Acquire and Wait.
var givesHandles = spoils(onAcquire.grants(giveHandle), onWait.grants(giveHandle))

func giveHandle(o op, g *backend.Grant) { g.Handle = o.c.Token }

// withoutHandle returns ErrLost for a claim without a handle.
func withoutHandle(ctx context.Context, o op) (backend.Grant, error) {
	if o.c.Handle == nil {
		return backend.Grant{}, backend.ErrLost
	}
	return o.next(ctx, o.c)
}

// wholeSeconds rounds a term up to whole seconds, and to at least two seconds.
func wholeSeconds(c backend.Claim) time.Duration {
	return max(2*time.Second, (c.TTL + time.Second - 1).Truncate(time.Second))
}

var renewFaults = []Fault{
	{Name: "Renew needs the handle", Clause: "token-alone",
		spoil: spoils(givesHandles, onRenew.by(withoutHandle))},
	{Name: "Renew shortens terms", Clause: "renew-never-shortens",
		spoil: onRenew.inStore(func(x *command) (uint64, error) {
			if x.r.token != x.c.Token {
				return 0, backend.ErrLost
			}
			x.r.until = x.now.Add(x.c.TTL)
			return 0, nil
		})},
	{Name: "Renew takes the key from the successor", Clause: "renew-lost",
		spoil: onRenew.after(backend.ErrLost, func(x *command) {
			if x.r.token != "" {
				x.give()
			}
		})},
	{Name: "Renew compares the token in one command and prolongs in another",
		Clause: "link-late-renew", cost: twice,
		spoil: spoils(onRenew.inStore(renewAny), onRenew.firstSends(checkIsOwn))},
	{Name: "one lost claim fails its batch", Clause: "renew-many",
		spoil: renews(func(ctx context.Context, d *driver, cs []backend.Claim, done answer) {
			var all error
			for _, c := range cs {
				if _, err := d.renewOne(ctx, c); err != nil {
					all = err
				}
			}
			for i := range cs {
				done(i, backend.Grant{}, all)
			}
		})},
	{Name: "done is called after Renew has returned", Clause: "renew-answers",
		spoil: renews(func(ctx context.Context, d *driver, cs []backend.Claim, done answer) {
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				d.soundRenew(context.WithoutCancel(ctx), cs, done)
			}()
			select {
			case <-ended:
			case <-ctx.Done():
			}
		})},
}

// checkIsOwn is a command that returns ErrLost for a foreign token. It changes nothing.
func checkIsOwn(x *command) (uint64, error) {
	if x.r.token != x.c.Token {
		return 0, backend.ErrLost
	}
	return 0, nil
}

// renewAny is a renewal that accepts any token.
func renewAny(x *command) (uint64, error) { return x.accepting(anyToken).renew() }

var fenceFaults = []Fault{
	{Name: "fences are granted, but Fenced is not claimed",
		Clause: "fence-unsupported", kind: waits,
		spoil: claims(func(t *backend.Traits) { t.Fenced = false })},
	{Name: "a fence repeats after the end of a term", Clause: "fence-grows", kind: waits,
		spoil: spoils(
			changes(func(s *store) {
				s.count = func(last uint64, _ time.Time) uint64 { return max(last, 1) }
			}),
			onRelease.after(nil, func(x *command) { x.fences[x.c.Key]++ }))},
	{Name: "every hold has a fence, even if the claim asks for none",
		Clause: "fence-when-asked", kind: waits,
		spoil: onAcquire.asks(func(c *backend.Claim) { c.Fenced = true })},
	{Name: "fences are lost in any restart", Clause: "fence-restart fence-data-loss", kind: waits,
		spoil: changes(func(s *store) {
			countByOne(s)
			s.lose = func(bool) { clear(s.fences) }
		})},
}

// countByOne adds 1 for each fence, so that fences start at 1 again after a loss of data.
func countByOne(s *store) { s.count = func(last uint64, _ time.Time) uint64 { return last + 1 } }

var keepFaults = []Fault{
	{Name: "MinHold is claimed, but KeepUntil is ignored", Clause: "keep-refuses", kind: waits,
		spoil: onRelease.asks(func(c *backend.Claim) { c.KeepUntil = time.Time{} })},
	{Name: "KeepUntil does not end a longer term", Clause: "keep-end", kind: waits,
		spoil: keepsBy(func(r *record, until time.Time) {
			if until.After(r.until) {
				r.until = until
			}
		})},
	{Name: "a second release frees a kept key", Clause: "keep-loses", kind: waits,
		spoil: onRelease.after(backend.ErrLost, func(x *command) {
			x.c.Token = keptToken
			x.quit()
		})},
	{Name: "a release with a KeepUntil that has passed leaves the record",
		Clause: "keep-past", kind: waits,
		spoil: onRelease.inStore(func(x *command) (uint64, error) {
			if !x.c.KeepUntil.IsZero() && !x.c.KeepUntil.After(x.now) {
				return 0, nil
			}
			return x.release()
		})},
	{Name: "a waiter sleeps until the end of the term that it was told",
		Clause: "keep-wait", kind: waits,
		spoil: spoils(sleeps(untilTheEnd), watchesNothing)},
	{Name: "Break finds no kept key", Clause: "keep-break", kind: waits,
		spoil: onBreak.inStore(func(x *command) (uint64, error) {
			x.accepting(func(token string) bool { return token != keptToken }).release()
			return 0, nil
		})},
	{Name: "KeepUntil is obeyed, but MinHold is not claimed", Clause: "keep-unclaimed", kind: waits,
		spoil: claims(func(t *backend.Traits) { t.MinHold = false })},
}

// keepsBy lets a release with KeepUntil leave the term unchanged and then call f, which may change
// the record.
func keepsBy(f func(r *record, until time.Time)) spoil {
	return onRelease.inStore(func(x *command) (uint64, error) {
		r := x.r
		until := r.until
		_, err := x.release()
		if err == nil && x.c.KeepUntil.After(x.now) {
			keep := r.until
			r.until = until
			f(r, keep)
		}
		return 0, err
	})
}
