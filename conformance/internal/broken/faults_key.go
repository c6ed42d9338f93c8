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
		spoil: spoils(changes(countByOne), onRelease.after(nil, func(_ *driver, s *store, c backend.Claim, _ time.Time) {
			if of, ok := strings.CutSuffix(c.Key, ":fence"); ok {
				s.fences[of] = 0 // with the record of its name
			}
		}))},
	{Name: "owners with a separator are refused", Clause: "owners-odd",
		spoil: onAcquire.first(func(_ context.Context, _ *driver, c backend.Claim) error {
			if strings.Contains(c.Owner, "#") {
				return fmt.Errorf("%w: owner", backend.ErrInvalid)
			}
			return nil
		})},
}
