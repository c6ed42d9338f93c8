package broken

import (
	"context"
	"path"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/hasplock/hasp/backend"
)

var listFaults = []Fault{
	{Name: "List takes the prefix for a pattern", Clause: "list-prefix", kind: waits,
		spoil: listsBy(func(ctx context.Context, _ *driver, prefix string, next lists) seq {
			return func(yield yield) {
				next(ctx, "")(func(e backend.Entry, err error) bool {
					ok, _ := path.Match(prefix+"*", e.Key)
					return !ok && err == nil || yield(e, err)
				})
			}
		})},
	{Name: "List yields the hold of another strategy without its owner",
		Clause: "list-foreign", kind: waits,
		spoil: yields(func(d *driver, e *backend.Entry) bool {
			if token, _ := d.holder(context.Background(), e.Key); ofOther(token) {
				e.Owner = ""
			}
			return true
		})},
	{Name: "List ends after the first page", Clause: "list-pages", kind: waits,
		spoil: yieldsBy(func(_ *driver, yield yield) yield {
			n := 0
			return func(e backend.Entry, err error) bool {
				n++
				return n <= listPage && yield(e, err)
			}
		})},
	{Name: "List goes on after its loop has ended", Clause: "list-stops", kind: waits,
		spoil: yieldsBy(func(_ *driver, yield yield) yield {
			return func(e backend.Entry, err error) bool { yield(e, err); return true }
		})},
	{Name: "List asks the store before the loop", Clause: "list-lazy", kind: waits,
		spoil: listsBy(func(ctx context.Context, d *driver, prefix string, next lists) seq {
			d.send(ctx, backend.Claim{}, doNothing)
			return next(ctx, prefix)
		})},
	{Name: "List does not obey its context", Clause: "list-cancelled", kind: waits,
		spoil: listsBy(func(ctx context.Context, _ *driver, prefix string, next lists) seq {
			return next(context.WithoutCancel(ctx), prefix)
		})},
	{Name: "List yields an error twice", Clause: "list-outage", kind: waits,
		spoil: yieldsBy(func(_ *driver, yield yield) yield {
			return func(e backend.Entry, err error) bool {
				if err != nil && !yield(e, err) {
					return false
				}
				return yield(e, err)
			}
		})},
}

var inspectFaults = []Fault{
	{Name: "traits change with use", Clause: "traits-constant", kind: waits,
		spoil: func(d *driver) {
			var calls atomic.Int32
			claims(func(t *backend.Traits) { t.Reach = backend.Reach(1 + calls.Add(1)%2) })(d)
		}},
	{Name: "Inspect and List return another owner", Clause: "inspect-holder list-held", kind: waits,
		spoil: shows(func(st *backend.Status) { st.Owner = strings.ToUpper(st.Owner) })},
	{Name: "Inspect returns the waiters in reverse order", Clause: "inspect-waiters", kind: orders,
		spoil: inspects(func(st *backend.Status) { slices.Reverse(st.Waiters) })},
	{Name: "Break wakes no waiter", Clause: "break-wakes", kind: waits,
		spoil: spoils(sleeps(untilTheEnd), onBreak.inStore(func(x *command) (uint64, error) {
			x.r.token = ""
			return 0, nil
		}))},
}

var closeFaults = []Fault{
	{Name: "Close leaves a goroutine", Clause: "close-leaves-nothing",
		spoil: func(d *driver) { go func() { <-d.way.store.ended.Done() }() }},
	{Name: "Close releases the holds of its driver", Clause: "token-any-driver",
		spoil: closes(func(x *command) {
			for _, c := range x.d.granted {
				x.d.command(c, x.now).release()
			}
		})},
}
