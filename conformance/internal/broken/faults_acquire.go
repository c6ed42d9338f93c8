package broken

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/hasplock/hasp/backend"
)

var acquireFaults = []Fault{
	{Name: "no call reaches the store", Clause: "takes-and-releases",
		spoil: onAcquire.first(func(context.Context, op) error { return errRefused })},
	{Name: "the check and the grant are two commands",
		Clause: "acquire-one-winner link-late-acquire",
		spoil:  spoils(onAcquire.inStore((*command).give), onAcquire.firstSends(checkIsFree))},
	{Name: "a driver takes a key again that it holds", Clause: "acquire-excludes",
		spoil: onAcquire.inStore(func(x *command) (uint64, error) {
			if own, ok := x.d.granted[x.r.token]; ok && own.Owner == x.c.Owner {
				return x.give()
			}
			return x.acquire()
		})},
	{Name: "RetryAfter is in the wrong unit", Clause: "acquire-held-details",
		spoil: onAcquire.fails(func(err error) error {
			var he *backend.HeldError
			if errors.As(err, &he) {
				// Milliseconds were taken for microseconds.
				return &backend.HeldError{RetryAfter: 1000 * he.RetryAfter, Owner: he.Owner}
			}
			return err
		})},
	{Name: "MaxTTL is claimed, but longer terms are granted", Clause: "acquire-max-ttl",
		spoil: claims(func(t *backend.Traits) { t.MaxTTL = time.Hour })},
	{Name: "TTLUnit is claimed, but terms are not rounded up", Clause: "expiry-rounded",
		spoil: claims(func(t *backend.Traits) { t.TTLUnit = 300 * time.Millisecond })},
	{Name: "a context that has ended is reported as ErrHeld", Clause: "acquire-dead-context",
		spoil: onAcquire.first(func(ctx context.Context, _ op) error {
			if ctx.Err() != nil {
				return backend.ErrHeld
			}
			return nil
		})},
}

// checkIsFree is a command that refuses a key that is held. It changes nothing.
func checkIsFree(x *command) (uint64, error) {
	if !x.r.free(x.c) {
		return 0, x.r.refusal(x.now)
	}
	return 0, nil
}

var termFaults = []Fault{
	{Name: "terms are cut short", Clause: "expiry",
		spoil: terms(func(c backend.Claim) time.Duration { return c.TTL * 3 / 4 })},
	{Name: "the deadline of a renewal is half a term late", Clause: "deadline-in-time", kind: waits,
		spoil: onRenew.grants(func(o op, g *backend.Grant) { g.Until = g.Until.Add(o.c.TTL / 2) })},
	{Name: "the deadline counts from the reply", Clause: "link-deadline",
		spoil: deadlines(func(c backend.Claim, _ time.Time) time.Time {
			return time.Now().Add(c.TTL - backend.Drift(c.TTL))
		})},
}

var releaseFaults = []Fault{
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
		spoil: accepts(func(_ *driver, c backend.Claim, token string) bool {
			return strings.HasPrefix(token, c.Token) || strings.HasPrefix(c.Token, token)
		})},
}

var keyFaults = []Fault{
	{Name: "keys end at a NUL", Clause: "keys-odd",
		spoil: names(func(key string) string { k, _, _ := strings.Cut(key, "\x00"); return k })},
	{Name: "long keys are truncated", Clause: "keys-long",
		spoil: names(func(key string) string { return key[:min(len(key), 255)] })},
	{Name: "keys are compared without case", Clause: "keys-apart", kind: waits,
		spoil: names(strings.ToLower)},
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
				return fmt.Errorf("%w: owner", backend.ErrInvalid)
			}
			return nil
		})},
}
