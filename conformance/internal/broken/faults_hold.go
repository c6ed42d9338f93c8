package broken

import (
	"context"
	"strings"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
)

// holdFaults are the faults of holds, keys, fences and the calls that change them.
var holdFaults = []Fault{
	{Name: "no call reaches the store", Clause: "takes-and-releases",
		spoil: onAcquire.first(func(context.Context, op) error { return errRefused })},
	{Name: "traits change with use", Clause: "traits-constant", kind: waits,
		spoil: func(d *driver) {
			var calls atomic.Int32
			claims(func(t *backend.Traits) { t.Reach = backend.Reach(1 + calls.Add(1)%2) })(d)
		}},
	{Name: "the check and the grant are two commands",
		Clause: "acquire-one-winner link-late-acquire fence-unsupported",
		spoil:  spoils(onAcquire.inStore((*command).give), onAcquire.firstSends(checkIsFree))},
	{Name: "a driver takes a key again that it holds", Clause: "acquire-excludes",
		spoil: onAcquire.inStore(func(x *command) (uint64, error) {
			if own, ok := x.d.granted[x.r.token]; ok && own.Owner == x.c.Owner {
				return x.give()
			}
			return x.acquire()
		})},
	{Name: "RetryAfter is in the wrong unit", Clause: "acquire-held-details",
		spoil: onAcquire.turns(backend.ErrHeld, &backend.HeldError{RetryAfter: 1000 * time.Hour})},
	{Name: "MaxTTL is claimed, but longer terms are granted", Clause: "acquire-max-ttl",
		spoil: claims(func(t *backend.Traits) { t.MaxTTL = time.Hour })},

	{Name: "terms are cut short",
		Clause: "expiry expiry-rounded wait-deadline wait-seen", kind: waits,
		spoil: func(d *driver) {
			d.ttl = func(c backend.Claim) time.Duration { return c.TTL * 3 / 4 }
		}},
	{Name: "the deadline counts from the reply", Clause: "link-deadline",
		spoil: func(d *driver) {
			d.deadline = func(c backend.Claim, _ time.Time) time.Time {
				return time.Now().Add(c.TTL - backend.Drift(c.TTL))
			}
		}},

	{Name: "Release compares the token in one command and removes the record in another",
		Clause: "link-late-release", cost: twice,
		spoil: spoils(onRelease.inStore((*command).breakKey), onRelease.firstSends(checkIsOwn))},
	{Name: "Release of a hold that has ended is not an error",
		Clause: "release-lost break-frees", kind: waits,
		spoil: onRelease.turns(backend.ErrLost, nil)},
	{Name: "the timer of a hold outlives it and ends the next hold", Clause: "release-for-good",
		spoil: onAcquire.grants(func(o op, _ *backend.Grant) {
			time.AfterFunc(o.c.TTL, func() { o.d.breakKey(context.Background(), o.c) })
		})},
	{Name: "tokens are compared up to the end of the shorter token", Clause: "token-whole",
		spoil: func(d *driver) {
			d.mine = func(c backend.Claim, token string) bool {
				return strings.HasPrefix(token, c.Token) || strings.HasPrefix(c.Token, token)
			}
		}},

	{Name: "Renew needs the handle", Clause: "token-any-driver",
		spoil: spoils(givesHandles, onRenew.by(withoutHandle))},
	{Name: "Renew shortens terms", Clause: "renew-never-shortens shared-terms", kind: waits,
		spoil: onRenew.after(nil, func(x *command) { x.own().until = x.now.Add(x.c.TTL) })},
	{Name: "Renew takes the key from the successor", Clause: "renew-lost link-late-renew",
		spoil: onRenew.after(backend.ErrLost, func(x *command) {
			if x.r.token != "" {
				x.give()
			}
		})},
	{Name: "renewals trust the driver's memory",
		Clause: "renew-many restart-without-data", kind: waits,
		spoil: onRenew.turns(backend.ErrLost, nil)},
	{Name: "done is called after Renew has returned", Clause: "renew-answers",
		spoil: func(d *driver) {
			d.renew = func(ctx context.Context, cs []backend.Claim, done answer) {
				ended := make(chan struct{})
				go func() {
					defer close(ended)
					d.soundRenew(context.WithoutCancel(ctx), cs, done)
				}()
				select {
				case <-ended:
				case <-ctx.Done():
				}
			}
		}},

	{Name: "keys are compared as text without case", Clause: "keys-odd keys-apart", kind: waits,
		spoil: func(d *driver) { d.key = strings.ToLower }},
	{Name: "long keys are truncated", Clause: "keys-long",
		spoil: func(d *driver) {
			d.key = func(key string) string { return key[:min(len(key), 255)] }
		}},
	{Name: "the fence counter is kept under a name that may be a key",
		Clause: "keys-derived", kind: waits,
		spoil: spoils(changes(countByOne), onRelease.after(nil, func(x *command) {
			if of, ok := strings.CutSuffix(x.c.Key, ":fence"); ok {
				x.fences[of] = 0 // the record KEY:fence also contains the fence counter of KEY
			}
		}))},
	{Name: "owners with a separator are refused", Clause: "owners-odd",
		spoil: onAcquire.first(func(_ context.Context, o op) error {
			if strings.Contains(o.c.Owner, "#") {
				return backend.ErrInvalid
			}
			return nil
		})},

	{Name: "a fence repeats", Clause: "fence-grows", kind: waits,
		spoil: changes(func(s *store) {
			s.count = func(last uint64, _ time.Time) uint64 { return max(last, 1) }
		})},
	{Name: "every hold has a fence, even if the claim asks for none",
		Clause: "fence-grows", kind: waits,
		spoil: onAcquire.asks(func(c *backend.Claim) { c.Fenced = true })},
	{Name: "fences are lost in any restart", Clause: "fence-restart fence-data-loss", kind: waits,
		spoil: changes(func(s *store) {
			countByOne(s)
			s.lose = func(bool) { clear(s.fences) }
		})},

	{Name: "MinHold is claimed, but KeepUntil is ignored",
		Clause: "keep-refuses keep-loses", kind: waits,
		spoil: onRelease.asks(func(c *backend.Claim) { c.KeepUntil = time.Time{} })},
	{Name: "KeepUntil does not end a longer term", Clause: "keep-end keep-wait", kind: waits,
		spoil: onRelease.inStore(func(x *command) (uint64, error) {
			if x.c.KeepUntil.After(x.now) && x.r.until.After(x.c.KeepUntil) {
				x.c.KeepUntil = x.r.until
			}
			return x.release()
		})},
	{Name: "a release with a KeepUntil that has passed leaves the record",
		Clause: "keep-past", kind: waits,
		spoil: onRelease.inStore(func(x *command) (uint64, error) {
			if !x.c.KeepUntil.IsZero() && !x.c.KeepUntil.After(x.now) {
				return 0, nil
			}
			return x.release()
		})},
	{Name: "Break finds no kept key", Clause: "keep-break", kind: waits,
		spoil: onBreak.inStore(func(x *command) (uint64, error) {
			if x.r.token == keptToken {
				return 0, nil
			}
			return x.breakKey()
		})},
	{Name: "KeepUntil is obeyed, but MinHold is not claimed", Clause: "keep-unclaimed", kind: waits,
		spoil: claims(func(t *backend.Traits) { t.MinHold = false })},

	{Name: "a reader joins a hold that is not shared", Clause: "shared-excludes", kind: waits,
		spoil: onAcquire.inStore(func(x *command) (uint64, error) {
			if x.c.Shared {
				return x.give()
			}
			return x.acquire()
		})},
	{Name: "the release of one reader frees the key",
		Clause: "shared-wait shared-inspect shared-keep shared-wait-together", kind: waits,
		spoil: onRelease.after(nil, func(x *command) { x.r.readers = nil })},
	{Name: "a writer that waits is not served while readers come",
		Clause: "shared-writer", kind: wakes, spoil: neverWaits},
	{Name: "a writer that polls is not served while readers come",
		Clause: "shared-writer", spoil: spoils(sharesToo, neverWaits)},
	{Name: "a writer that is gone keeps readers out",
		Clause: "shared-writer-gone leftovers-expired", kind: waits, spoil: placesStay},
	{Name: "shared claims are obeyed, but Shared is not claimed",
		Clause: "shared-unclaimed", kind: waits,
		spoil: claims(func(t *backend.Traits) { t.Shared = false })},
	{Name: "a renewal does not prolong a shared hold", Clause: "shared-renew-raises", kind: waits,
		spoil: onRenew.asks(func(c *backend.Claim) {
			if c.Shared {
				c.TTL = 0
			}
		})},
}

// neverWaits lets the driver forget that the caller of an Acquire waits.
var neverWaits = onAcquire.asks(func(c *backend.Claim) { c.WillRetry = false })

// checkIsFree is a command that refuses a key that is held. It changes nothing.
func checkIsFree(x *command) (uint64, error) {
	if !x.r.free(x.c) {
		return 0, x.r.refusal(x.now)
	}
	return 0, nil
}

// checkIsOwn is a command that returns ErrLost for a foreign token. It changes nothing.
func checkIsOwn(x *command) (uint64, error) {
	if x.r.token != x.c.Token {
		return 0, backend.ErrLost
	}
	return 0, nil
}

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

// countByOne adds 1 for each fence, so that fences start at 1 again after a loss of data.
func countByOne(s *store) { s.count = func(last uint64, _ time.Time) uint64 { return last + 1 } }

// placesStay lets the store keep the place of a dead waiter for an hour.
var placesStay = changes(func(s *store) { s.stay = time.Hour })
