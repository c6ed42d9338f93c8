package broken

import (
	"context"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
)

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
	{Name: "Inspect reports a held key as free", Clause: "inspect-holder", kind: waits,
		spoil: inspects(func(st *backend.Status) { st.Held = false })},
	{Name: "Inspect returns another owner", Clause: "inspect-holder", kind: waits,
		spoil: inspects(func(st *backend.Status) { st.Owner = strings.ToUpper(st.Owner) })},
	{Name: "Inspect returns the next fence", Clause: "inspect-holder", kind: waits,
		spoil: inspects(func(st *backend.Status) { st.Fence++ })},
	{Name: "Inspect returns a negative term", Clause: "inspect-holder", kind: waits,
		spoil: inspects(func(st *backend.Status) { st.TTL = -st.TTL })},
	{Name: "Inspect returns the waiters in reverse order", Clause: "inspect-waiters", kind: orders,
		spoil: inspects(func(st *backend.Status) { slices.Reverse(st.Waiters) })},
	{Name: "Break does nothing", Clause: "break-frees", kind: waits,
		spoil: onBreak.by(func(context.Context, *driver, backend.Claim, call) (backend.Grant, error) {
			return backend.Grant{}, nil
		})},
	{Name: "Renew of a broken hold is not an error", Clause: "break-frees", kind: waits, spoil: onRenew.turns(backend.ErrLost, nil)},
	{Name: "Release of a broken hold is not an error", Clause: "break-frees", kind: waits, spoil: onRelease.turns(backend.ErrLost, nil)},
	{Name: "Break wakes no waiter", Clause: "break-wakes", kind: waits,
		spoil: spoils(sleeps(true, listen), onBreak.inStore(func(_ *driver, s *store, c backend.Claim, _ time.Time) (uint64, error) {
			if r := s.keys[c.Key]; r != nil {
				r.token = ""
			}
			return 0, nil
		}))},
}

var closeFaults = []Fault{
	{Name: "Close leaves a goroutine", Clause: "close-leaves-nothing", spoil: leak},
	{Name: "a Wait leaves a goroutine", Clause: "client-leaves-nothing", kind: waits,
		spoil: onWait.first(func(_ context.Context, d *driver, _ backend.Claim) error {
			leak(d)
			return nil
		})},
	{Name: "a hold of a closed driver cannot be released", Clause: "token-any-driver",
		spoil: closes(func(d *driver, s *store, _ time.Time) {
			for token, c := range d.granted {
				if r := s.keys[c.Key]; r != nil && r.token == token {
					r.token = "orphan of " + token
				}
			}
		})},
	{Name: "Close releases the holds of its driver", Clause: "close-keeps-holds",
		spoil: closes(func(d *driver, s *store, now time.Time) {
			for _, c := range d.granted {
				d.releaseIn(s, c, now)
			}
		})},
}

// leak starts a goroutine that ends with the store.
func leak(d *driver) { go func() { <-d.way.store.ended.Done() }() }
