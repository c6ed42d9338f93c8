package broken

import (
	"context"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/hasplock/hasp/backend"
)

var listFaults = []Fault{
	{Name: "List yields a key after its release", Clause: "list-held", kind: waits,
		spoil: func(d *driver) {
			seen := map[string]backend.Entry{}
			yieldsBy(func(_ *driver, yield yield) yield {
				for _, e := range seen {
					yield(e, nil)
				}
				return func(e backend.Entry, err error) bool { seen[e.Key] = e; return yield(e, err) }
			})(d)
		}},
	{Name: "List leaves a held key out", Clause: "list-held", kind: waits,
		spoil: yields(func(_ *driver, e *backend.Entry) bool { return e.Fence == 0 })},
	{Name: "List yields another owner", Clause: "list-held", kind: waits,
		spoil: yields(func(_ *driver, e *backend.Entry) bool { e.Owner = strings.ToUpper(e.Owner); return true })},
	{Name: "List yields no fence", Clause: "list-held", kind: waits,
		spoil: yields(func(_ *driver, e *backend.Entry) bool { e.Fence = 0; return true })},
	{Name: "List yields no term", Clause: "list-held", kind: waits,
		spoil: yields(func(_ *driver, e *backend.Entry) bool { e.TTL = 0; return true })},
	{Name: "List leaves out a key that is kept", Clause: "list-kept", kind: waits,
		spoil: yields(func(d *driver, e *backend.Entry) bool {
			token, err := d.holder(context.Background(), e.Key)
			return err != nil || token != keptToken
		})},
	{Name: "List yields the waiters in reverse order", Clause: "list-waiters", kind: orders,
		spoil: yields(func(_ *driver, e *backend.Entry) bool { slices.Reverse(e.Waiters); return true })},
	{Name: "List yields one holder of a shared key", Clause: "list-shared", kind: waits,
		spoil: yields(func(_ *driver, e *backend.Entry) bool { e.Shared = e.Shared[:min(1, len(e.Shared))]; return true })},
	{Name: "List yields the holder of a shared key as its owner", Clause: "list-shared", kind: waits,
		spoil: yields(func(_ *driver, e *backend.Entry) bool {
			if len(e.Shared) > 0 {
				e.Owner = e.Shared[0]
			}
			return true
		})},
	{Name: "List takes the prefix for a pattern", Clause: "list-prefix", kind: waits,
		spoil: listsBy(func(ctx context.Context, _ *driver, prefix string, next func(context.Context, string) seq) seq {
			return func(yield yield) {
				next(ctx, "")(func(e backend.Entry, err error) bool {
					ok, _ := path.Match(prefix+"*", e.Key)
					return err == nil && !ok || yield(e, err)
				})
			}
		})},
	{Name: "List ignores the prefix", Clause: "list-prefix", kind: waits,
		spoil: listsBy(func(ctx context.Context, _ *driver, _ string, next func(context.Context, string) seq) seq {
			return next(ctx, "")
		})},
	{Name: "List yields the hold of another strategy without its owner", Clause: "list-foreign", kind: waits,
		spoil: yields(func(d *driver, e *backend.Entry) bool {
			token, _ := d.holder(context.Background(), e.Key)
			if strings.HasPrefix(token, otherType) {
				e.Owner = ""
			}
			return true
		})},
	{Name: "List ends after the first page", Clause: "list-pages", kind: waits,
		spoil: yieldsBy(func(_ *driver, yield yield) yield {
			n := 0
			return func(e backend.Entry, err error) bool { n++; return n <= listPage && yield(e, err) }
		})},
	{Name: "List goes on where an earlier loop has ended", Clause: "list-stops", kind: waits,
		spoil: func(d *driver) {
			done := 0
			yieldsBy(func(_ *driver, yield yield) yield {
				skip, n := done, 0
				done = 0
				return func(e backend.Entry, err error) bool {
					if n++; n <= skip || yield(e, err) {
						return true
					}
					done = n
					return false
				}
			})(d)
		}},
	{Name: "List asks the store before the loop", Clause: "list-lazy", kind: waits,
		spoil: listsBy(func(ctx context.Context, d *driver, prefix string, next func(context.Context, string) seq) seq {
			extraCommand(ctx, d, backend.Claim{})
			return next(ctx, prefix)
		})},
	{Name: "List does not obey its context", Clause: "list-cancelled", kind: waits,
		spoil: listsBy(func(ctx context.Context, _ *driver, prefix string, next func(context.Context, string) seq) seq {
			return next(context.WithoutCancel(ctx), prefix)
		})},
	{Name: "List ends without an error in an outage", Clause: "list-outage", kind: waits,
		spoil: yieldsBy(func(_ *driver, yield yield) yield {
			return func(e backend.Entry, err error) bool { return err == nil && yield(e, nil) }
		})},
	{Name: "List yields an error twice", Clause: "list-outage", kind: waits,
		spoil: yieldsBy(func(_ *driver, yield yield) yield {
			return func(e backend.Entry, err error) bool { return yield(e, err) && (err == nil || yield(e, err)) }
		})},
	{Name: "List says that an outage is definite", Clause: "list-outage", kind: waits,
		spoil: yieldsBy(func(_ *driver, yield yield) yield {
			return func(e backend.Entry, err error) bool {
				if err != nil {
					err = errUnsupported
				}
				return yield(e, err)
			}
		})},
	{Name: "List waits for a store that does not answer", Clause: "list-outage", kind: waits,
		spoil: listsBy(func(ctx context.Context, d *driver, prefix string, _ func(context.Context, string) seq) seq {
			return d.soundList(ctx, prefix, time.Hour)
		})},
}
