package broken

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/hasplock/hasp/backend"
)

var keyFaults = []Fault{
	{Name: "keys end at a NUL", Clause: "keys-odd",
		spoil: names(func(key string) string { k, _, _ := strings.Cut(key, "\x00"); return k })},
	{Name: "keys are made valid UTF-8", Clause: "keys-odd",
		spoil: names(func(key string) string { return strings.ToValidUTF8(key, "\ufffd") })},
	{Name: "only the part of a key in braces counts", Clause: "keys-odd",
		spoil: names(func(key string) string {
			_, rest, ok := strings.Cut(key, "{")
			tag, _, closed := strings.Cut(rest, "}")
			if ok && closed && tag != "" {
				return tag
			}
			return key
		})},
	{Name: "long keys are truncated", Clause: "keys-long",
		spoil: names(func(key string) string { return key[:min(len(key), 255)] })},
	{Name: "keys are compared without case", Clause: "keys-apart", kind: waits, spoil: names(strings.ToLower)},
	{Name: "white space around keys is dropped", Clause: "keys-apart", spoil: names(strings.TrimSpace)},
	{Name: "a key with a colon collides with its prefix", Clause: "keys-apart",
		spoil: names(func(key string) string { return strings.TrimSuffix(strings.TrimSuffix(key, ":a"), ":") })},
	{Name: "the fence counter is kept under a name that may be a key", Clause: "keys-derived", kind: waits,
		spoil: spoils(onAcquire.inStore(countUnderAKey), onRelease.inStore(releaseUnderAKey))},
	{Name: "owners with a separator are refused", Clause: "owners-odd",
		spoil: onAcquire.first(func(_ context.Context, _ *driver, c backend.Claim) error {
			if strings.Contains(c.Owner, "#") {
				return fmt.Errorf("%w: owner", backend.ErrInvalid)
			}
			return nil
		})},
}

// countUnderAKey is an Acquire whose fences are a plain counter.
func countUnderAKey(_ *driver, s *store, c backend.Claim, now time.Time) (uint64, error) {
	r := s.get(c.Key, now)
	if r.token != "" {
		return 0, r.refusal(now)
	}
	plain := c
	plain.Fenced = false
	s.give(r, plain, now)
	if c.Fenced {
		s.fences[c.Key]++
		r.fence = s.fences[c.Key]
	}
	return r.fence, nil
}

// releaseUnderAKey is a Release that removes a counter with the record of its name.
func releaseUnderAKey(d *driver, s *store, c backend.Claim, now time.Time) (uint64, error) {
	_, err := d.releaseIn(s, c, now)
	if of, ok := strings.CutSuffix(c.Key, ":fence"); ok && err == nil {
		s.fences[of] = 0
	}
	return 0, err
}
