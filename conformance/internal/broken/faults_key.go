package broken

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/hasplock/hasp/backend"
)

var keyFaults = []Fault{
	{
		Name: "keys end at a NUL", Clause: "keys-odd", kind: polls,
		spoil: func(d *driver) { d.key = func(key string) string { k, _, _ := strings.Cut(key, "\x00"); return k } },
	},
	{
		Name: "keys are made valid UTF-8", Clause: "keys-odd", kind: polls,
		spoil: func(d *driver) { d.key = func(key string) string { return strings.ToValidUTF8(key, "\ufffd") } },
	},
	{
		Name: "only the part of a key in braces counts", Clause: "keys-odd", kind: polls,
		spoil: func(d *driver) {
			d.key = func(key string) string {
				_, rest, ok := strings.Cut(key, "{")
				tag, _, closed := strings.Cut(rest, "}")
				if ok && closed && tag != "" {
					return tag
				}
				return key
			}
		},
	},
	{
		Name: "long keys are truncated", Clause: "keys-long", kind: polls,
		spoil: func(d *driver) { d.key = func(key string) string { return key[:min(len(key), 255)] } },
	},
	{
		Name: "keys are compared without case", Clause: "keys-apart", kind: waits,
		spoil: func(d *driver) { d.key = strings.ToLower },
	},
	{
		Name: "white space around keys is dropped", Clause: "keys-apart", kind: polls,
		spoil: func(d *driver) { d.key = strings.TrimSpace },
	},
	{
		Name: "a key with a colon collides with its prefix", Clause: "keys-apart", kind: polls,
		spoil: func(d *driver) {
			d.key = func(key string) string { return strings.TrimSuffix(strings.TrimSuffix(key, ":a"), ":") }
		},
	},
	{
		Name: "the fence counter is kept under a name that may be a key", Clause: "keys-derived", kind: waits,
		spoil: func(d *driver) {
			d.release = func(ctx context.Context, c backend.Claim) error {
				err := d.soundRelease(ctx, c)
				if of, ok := strings.CutSuffix(c.Key, ":fence"); ok && err == nil {
					d.at(ctx, func(s *store, _ time.Time) { s.fences[of] = 0 })
				}
				return err
			}
			d.acquire = func(ctx context.Context, c backend.Claim) (g backend.Grant, err error) {
				called := time.Now()
				d.at(ctx, func(s *store, now time.Time) {
					r := s.get(d.key(c.Key), now)
					defer s.put(d.key(c.Key), r)
					if r.token != "" {
						err = r.refusal(now)
						return
					}
					plain := c
					plain.Fenced = false
					s.give(d.key(c.Key), r, plain, now)
					if c.Fenced {
						s.fences[c.Key]++
						r.fence = s.fences[c.Key]
						g.Fence = r.fence
					}
					g.Until = d.deadline(c, called)
				})
				return g, err
			}
		},
	},
	{
		Name: "owners with a separator are refused", Clause: "owners-odd", kind: polls,
		spoil: func(d *driver) {
			d.acquire = func(ctx context.Context, c backend.Claim) (backend.Grant, error) {
				if strings.Contains(c.Owner, "#") {
					return backend.Grant{}, fmt.Errorf("%w: owner", backend.ErrInvalid)
				}
				return d.soundAcquire(ctx, c)
			}
		},
	},
}
