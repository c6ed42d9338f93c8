package broken

import (
	"context"
	"slices"
	"time"

	"github.com/hasplock/hasp/backend"
)

var orderFaults = []Fault{
	{Name: "Ordered is claimed, but the last waiter is served first", Clause: "order-of-arrival", kind: orders, spoil: reverseQueue},
	{Name: "Ordered is claimed, but there is no queue", Clause: "order-of-arrival", kind: waits,
		spoil: claims(func(t *backend.Traits) { t.Ordered = true })},
	{Name: "a waiter that gives up is replaced by the last in the queue", Clause: "order-kept", kind: orders,
		spoil: func(d *driver) {
			d.quit = func(c backend.Claim) {
				d.at(context.Background(), func(s *store, now time.Time) {
					s.with(d.key(c.Key), now, func(r *record) { r.replaceByLast(c.Token) })
				})
				d.soundQuit(c)
			}
		}},
	{Name: "Acquire takes a free key past the queue", Clause: "order-no-barging", kind: orders,
		spoil: onAcquire.inStore(func(_ *driver, s *store, c backend.Claim, now time.Time) (uint64, error) {
			r := s.get(c.Key, now)
			if r.token != "" {
				return 0, r.refusal(now)
			}
			return s.give(r, c, now), nil
		})},
	{Name: "the order is kept, but Ordered is not claimed", Clause: "order-not-claimed", kind: orders,
		spoil: claims(func(t *backend.Traits) { t.Ordered = false })},
}

// reverseQueue reverses the queue of a key after the first poll of each waiter.
func reverseQueue(d *driver) {
	known := map[string]bool{} // tokens that had a place; guarded by the store
	onWait.first(func(ctx context.Context, d *driver, c backend.Claim) error {
		d.at(ctx, func(s *store, now time.Time) {
			c := d.asked(c)
			s.look(c, true, now)
			if r := s.keys[c.Key]; r != nil && !known[c.Token] {
				known[c.Token] = true
				slices.Reverse(r.queue)
			}
		})
		return nil
	})(d)
}

// replaceByLast puts the last place of the queue where the place of token was.
func (r *record) replaceByLast(token string) {
	at := slices.IndexFunc(r.queue, func(p place) bool { return p.token == token })
	if n := len(r.queue) - 1; at >= 0 {
		r.queue[at] = r.queue[n]
		r.queue = r.queue[:n]
	}
}
