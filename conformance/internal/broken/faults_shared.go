package broken

import (
	"slices"
	"time"

	"github.com/hasplock/hasp/backend"
)

var sharedFaults = []Fault{
	{Name: "a reader joins a hold that is not shared", Clause: "shared-excludes", kind: waits,
		spoil: onAcquire.inStore(func(x *command) (uint64, error) {
			if x.c.Shared {
				return x.give()
			}
			return x.acquire()
		})},
	{Name: "a refusal by readers does not say that they are", Clause: "shared-error", kind: waits,
		spoil: onAcquire.turns(backend.ErrHeld, &backend.HeldError{})},
	{Name: "a shared Wait joins a hold that is not shared", Clause: "shared-wait", kind: waits,
		spoil: onLook.inStore(func(x *command) (uint64, error) {
			if x.c.Shared {
				return x.give()
			}
			return x.look()
		})},
	{Name: "the release of one reader frees the key", Clause: "shared-keep", kind: waits,
		spoil: onRelease.after(nil, func(x *command) { x.r.readers = nil })},
	{Name: "a writer that asks again is not served while readers come",
		Clause: "shared-writer", kind: polls,
		spoil: func(d *driver) {
			sharesToo(d)
			onAcquire.asks(func(c *backend.Claim) { c.WillRetry = false })(d)
		}},
	{Name: "a writer that waits is not served while readers come",
		Clause: "shared-writer-waits", kind: waits,
		spoil: onAcquire.inStore(func(x *command) (uint64, error) {
			x.r.writer = queued{}
			return x.acquire()
		})},
	{Name: "a writer that is gone keeps readers out",
		Clause: "shared-writer-gone leftovers-expired", kind: waits, spoil: placesStay},
	{Name: "Inspect returns one holder of a shared key as its owner",
		Clause: "shared-inspect", kind: waits,
		spoil: inspects(func(st *backend.Status) {
			if len(st.Shared) > 0 {
				st.Owner = st.Shared[0]
			}
		})},
	{Name: "Break ends one shared hold", Clause: "shared-break", kind: waits,
		spoil: onBreak.inStore(func(x *command) (uint64, error) {
			x.c.Shared = len(x.r.readers) > 0
			x.accepting(anyToken).release()
			return 0, nil
		})},
	{Name: "a writer checks for readers in one command and locks in another",
		Clause: "history-shared", kind: waits, cost: twice,
		spoil: spoils(onAcquire.inStore(func(x *command) (uint64, error) {
			if !x.c.Shared && x.r.token == "" {
				return x.give()
			}
			return x.acquire()
		}), onAcquire.firstSends(checkIsFree))},
	{Name: "shared claims are obeyed, but Shared is not claimed",
		Clause: "shared-unclaimed", kind: waits,
		spoil: claims(func(t *backend.Traits) { t.Shared = false })},
	{Name: "a renewal does not prolong a shared hold", Clause: "shared-renew-raises", kind: waits,
		spoil: onRenew.asks(func(c *backend.Claim) {
			if c.Shared {
				c.TTL = 0
			}
		})},
	{Name: "the term of the key follows the reader that was renewed last",
		Clause: "shared-terms", kind: waits,
		spoil: onRenew.after(nil, func(x *command) { x.endsNoLaterThan(x.now.Add(x.c.TTL)) })},
	{Name: "readers that waited get the key one after another",
		Clause: "shared-wait-together", kind: waits,
		spoil: onLook.inStore(func(x *command) (uint64, error) {
			if x.c.Shared && len(x.r.readers) > 0 {
				return 0, x.r.refusal(x.now)
			}
			return x.look()
		})},
	{Name: "a reader that waits passes a writer that came before it",
		Clause: "shared-order", kind: orders,
		spoil: queues(func(queue []queued) {
			for i, p := range slices.Backward(queue) {
				if i > 0 && p.shared && !queue[i-1].shared {
					queue[i-1], queue[i] = p, queue[i-1]
				}
			}
		})},
}

// endsNoLaterThan shortens the shared holds of a key that would end after the argument end.
func (x *command) endsNoLaterThan(end time.Time) {
	for i := range x.r.readers {
		if x.r.readers[i].until.After(end) {
			x.r.readers[i].until = end
		}
	}
}

// sharesToo lets a driver of the kind polls obey Claim.Shared.
func sharesToo(d *driver) { d.shares = true }
