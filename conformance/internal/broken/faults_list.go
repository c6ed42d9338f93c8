package broken

import (
	"context"
	"iter"
	"path"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
)

// seq is a list.
type seq = iter.Seq2[backend.Entry, error]

var listFaults = []Fault{
	{Name: "List yields a key after its release", Clause: "list-held", kind: waits, spoil: remembers()},
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
		spoil: listsBy(func(ctx context.Context, d *driver, prefix string, next lists) seq {
			return filtered(next(ctx, "", 0), func(e backend.Entry) bool {
				ok, _ := path.Match(prefix+"*", e.Key)
				return ok
			})
		})},
	{Name: "List ignores the prefix", Clause: "list-prefix", kind: waits,
		spoil: listsBy(func(ctx context.Context, d *driver, _ string, next lists) seq { return next(ctx, "", 0) })},
	{Name: "List yields the hold of another strategy without its owner", Clause: "list-foreign", kind: waits,
		spoil: yields(func(d *driver, e *backend.Entry) bool {
			token, _ := d.holder(context.Background(), e.Key)
			if strings.HasPrefix(token, otherType) {
				e.Owner = ""
			}
			return true
		})},
	{Name: "List ends after the first page", Clause: "list-pages", kind: waits,
		spoil: listsBy(func(ctx context.Context, d *driver, prefix string, next lists) seq {
			n := 0
			return filtered(next(ctx, prefix, 0), func(backend.Entry) bool { n++; return n <= listPage })
		})},
	{Name: "List goes on where an earlier loop has ended", Clause: "list-stops", kind: waits,
		spoil: func(d *driver) {
			var done atomic.Int32
			listsBy(func(ctx context.Context, d *driver, prefix string, next lists) seq {
				return func(yield func(backend.Entry, error) bool) {
					skip := done.Swap(0)
					n := int32(0)
					for e, err := range next(ctx, prefix, 0) {
						if n++; n > skip && !yield(e, err) {
							done.Store(n)
							return
						}
					}
				}
			})(d)
		}},
	{Name: "List asks the store before the loop", Clause: "list-lazy", kind: waits,
		spoil: listsBy(func(ctx context.Context, d *driver, prefix string, next lists) seq {
			extraCommand(ctx, d, backend.Claim{})
			return next(ctx, prefix, 0)
		})},
	{Name: "List does not obey its context", Clause: "list-cancelled", kind: waits,
		spoil: listsBy(func(ctx context.Context, d *driver, prefix string, next lists) seq {
			return next(context.WithoutCancel(ctx), prefix, 0)
		})},
	{Name: "List ends without an error", Clause: "list-cancelled", kind: waits, spoil: endsSilently},
	{Name: "List ends without an error in an outage", Clause: "list-outage", kind: waits, spoil: endsSilently},
	{Name: "List yields an error twice", Clause: "list-outage", kind: waits,
		spoil: listsBy(func(ctx context.Context, d *driver, prefix string, next lists) seq {
			return func(yield func(backend.Entry, error) bool) {
				for e, err := range next(ctx, prefix, 0) {
					if !yield(e, err) || err != nil && !yield(e, err) {
						return
					}
				}
			}
		})},
	{Name: "List says that an outage is definite", Clause: "list-outage", kind: waits,
		spoil: listsBy(func(ctx context.Context, d *driver, prefix string, next lists) seq {
			return func(yield func(backend.Entry, error) bool) {
				for e, err := range next(ctx, prefix, 0) {
					if err != nil {
						err = errUnsupported
					}
					if !yield(e, err) {
						return
					}
				}
			}
		})},
	{Name: "List waits for a store that does not answer", Clause: "list-outage", kind: waits,
		spoil: listsBy(func(ctx context.Context, d *driver, prefix string, _ lists) seq {
			return d.soundList(ctx, prefix, time.Hour)
		})},
}

// filtered leaves out the entries for which f returns false.
func filtered(all seq, f func(e backend.Entry) bool) seq {
	return func(yield func(backend.Entry, error) bool) {
		for e, err := range all {
			if (err != nil || f(e)) && !yield(e, err) {
				return
			}
		}
	}
}

// endsSilently makes List end where it should yield an error.
var endsSilently = listsBy(func(ctx context.Context, d *driver, prefix string, next lists) seq {
	return func(yield func(backend.Entry, error) bool) {
		for e, err := range next(ctx, prefix, 0) {
			if err != nil || !yield(e, nil) {
				return
			}
		}
	}
})

// remembers makes List yield what it has yielded before.
func remembers() spoil {
	return func(d *driver) {
		seen := map[string]backend.Entry{}
		listsBy(func(ctx context.Context, d *driver, prefix string, next lists) seq {
			return func(yield func(backend.Entry, error) bool) {
				for e, err := range next(ctx, prefix, 0) {
					seen[e.Key] = e
					if err != nil {
						yield(e, err)
						return
					}
				}
				for _, e := range seen {
					if !yield(e, nil) {
						return
					}
				}
			}
		})(d)
	}
}
