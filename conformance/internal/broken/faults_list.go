package broken

import (
	"context"
	"path"
	"slices"
	"strings"
	"sync/atomic"
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
	{Name: "List leaves out a key that is kept", Clause: "keep-refuses", kind: waits,
		spoil: yields(func(d *driver, e *backend.Entry) bool {
			token, err := d.holder(context.Background(), e.Key)
			return err != nil || token != keptToken
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
	{Name: "List yields the hold of another strategy without its owner", Clause: "list-foreign", kind: waits,
		spoil: yields(func(d *driver, e *backend.Entry) bool {
			if token, _ := d.holder(context.Background(), e.Key); ofOther(token) {
				e.Owner = ""
			}
			return true
		})},
	{Name: "List ends after the first page", Clause: "list-pages", kind: waits,
		spoil: yieldsBy(func(_ *driver, yield yield) yield {
			n := 0
			return func(e backend.Entry, err error) bool { n++; return n <= listPage && yield(e, err) }
		})},
	{Name: "List goes on after its loop has ended", Clause: "list-stops", kind: waits,
		spoil: yieldsBy(func(_ *driver, yield yield) yield {
			return func(e backend.Entry, err error) bool { yield(e, err); return true }
		})},
	{Name: "List asks the store before the loop", Clause: "list-lazy", kind: waits,
		spoil: listsBy(func(ctx context.Context, d *driver, prefix string, next func(context.Context, string) seq) seq {
			d.send(ctx, backend.Claim{}, doNothing)
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
	{Name: "List waits for a store that does not answer", Clause: "list-outage", kind: waits,
		spoil: listsBy(func(ctx context.Context, d *driver, prefix string, _ func(context.Context, string) seq) seq {
			return d.soundList(ctx, prefix, time.Hour)
		})},
}

var inspectFaults = []Fault{
	{Name: "traits change with use", Clause: "traits-constant", kind: waits,
		spoil: func(d *driver) {
			var calls atomic.Int32
			claims(func(t *backend.Traits) { t.Reach = backend.Reach(1 + calls.Add(1)%2) })(d)
		}},
	{Name: "Inspect returns the last holder after its release", Clause: "inspect-holder", kind: waits,
		spoil: func(d *driver) {
			var last backend.Status
			inspects(func(st *backend.Status) {
				if st.Held {
					last = *st
				}
				*st = last
			})(d)
		}},
	{Name: "Inspect and List report a held key as free", Clause: "inspect-holder list-held", kind: waits,
		spoil: shows(func(st *backend.Status) { st.Held = false })},
	{Name: "Inspect and List return another owner", Clause: "inspect-holder list-held", kind: waits,
		spoil: shows(func(st *backend.Status) { st.Owner = strings.ToUpper(st.Owner) })},
	{Name: "Inspect and List return the next fence", Clause: "inspect-holder list-held", kind: waits,
		spoil: shows(func(st *backend.Status) { st.Fence++ })},
	{Name: "Inspect and List return a negative term", Clause: "inspect-holder list-held", kind: waits,
		spoil: shows(func(st *backend.Status) { st.TTL = -st.TTL })},
	{Name: "Inspect returns the waiters in reverse order", Clause: "inspect-waiters", kind: orders,
		spoil: inspects(func(st *backend.Status) { slices.Reverse(st.Waiters) })},
	{Name: "Break does nothing", Clause: "break-frees", kind: waits, spoil: onBreak.inStore(doNothing)},
	{Name: "Break wakes no waiter", Clause: "break-wakes", kind: waits,
		spoil: spoils(sleeps(untilTheEnd), onBreak.inStore(func(x *command) (uint64, error) {
			x.r.token = ""
			return 0, nil
		}))},
}

var closeFaults = []Fault{
	{Name: "Close leaves a goroutine", Clause: "close-leaves-nothing", spoil: func(d *driver) { go func() { <-d.way.store.ended.Done() }() }},
	{Name: "Close releases the holds of its driver", Clause: "token-any-driver",
		spoil: closes(func(x *command) {
			for _, c := range x.d.granted {
				x.d.command(c, x.now).release()
			}
		})},
}
