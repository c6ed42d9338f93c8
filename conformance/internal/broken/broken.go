// Package broken contains drivers with one deliberate fault each. These drivers prove that the
// suite of package conformance finds faults. Each fault names the clauses that must fail with it.
// The drivers without a fault must pass.
//
// The drivers use a small store in memory, over links that can be cut, so that the suite can run in
// virtual time (testing/synctest). They cannot use the store of package memlock, because its fences
// cannot be lost, its waiters cannot be cut off, and many faults change what the store keeps.
package broken

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/conformance"
)

// Fault is one mistake in a driver.
type Fault struct {
	Name string

	// Clause lists the names of the clauses that must fail, separated by spaces. Other clauses may
	// fail as well. Clause is empty for a driver without a fault.
	Clause string

	kind  kind             // the driver's interfaces
	cost  conformance.Cost // the driver's cost, if the driver makes more calls on purpose
	spoil spoil
}

// twice is the cost of a driver that sends two commands for each call.
var twice = conformance.Cost{Acquire: 2, Renew: 2, Release: 2, Waiting: 80}

// Sound returns drivers without a fault, one of each kind.
func Sound() []Fault {
	return []Fault{
		{Name: "none, polls"},
		{Name: "none, polls and shares", spoil: sharesToo},
		{Name: "none, waits", kind: waits},
		{Name: "none, wakes", kind: wakes},
		{Name: "none, refuses without details",
			spoil: onAcquire.turns(backend.ErrHeld, backend.ErrHeld)},
		{Name: "none, keeps the order", kind: orders},
		{Name: "none, with a lock delay",
			spoil: spoils(sharesToo, changes(func(s *store) { s.delay = time.Second }))},
		{Name: "none, counts in seconds and gives handles", kind: waits, spoil: spoils(
			claims(func(t *backend.Traits) { t.MinTTL, t.TTLUnit = 2*time.Second, time.Second }),
			wholeSeconds, givesHandles)},
		{Name: "none, ends its calls", kind: waits, spoil: claimsEnds(backend.CancelPrompt)},
	}
}

// Harness returns a harness for the driver with the fault, on a new store. The harness has all
// hooks but Sweep. All these drivers wrongly claim to reach other processes. So only one clause
// over several processes, "reach", has faults.
func (f Fault) Harness() conformance.Harness {
	s := newStore()
	return conformance.Harness{
		Name:  f.Name,
		Cost:  f.cost,
		Store: func(context.Context) (string, func(), error) { return "", s.end, nil },
		Open: func(_ context.Context, store string) (backend.Driver, error) {
			var w *way
			s.locked(func() { w = s.ways[store] })
			d := newDriver(w, f.kind)
			if f.spoil != nil {
				f.spoil(d)
			}

			return d.as(), nil
		},
		Stop:     func(context.Context, string) error { s.stop(); return nil },
		Start:    func(_ context.Context, _ string, data bool) error { s.start(data); return nil },
		Link:     func(context.Context, string) (*conformance.Link, error) { return s.link(), nil },
		Flush:    func(context.Context, string) error { s.flushes.Add(1); return nil },
		Kick:     func(context.Context, string) error { s.endConnections(); return nil },
		Commands: func(context.Context, string) (int64, error) { return s.commands.Load(), nil },
		Entries:  func(context.Context, string) ([]string, error) { return s.entries(), nil },
		Others: map[string]func(context.Context, string) (backend.Driver, error){
			"other": func(context.Context, string) (backend.Driver, error) {
				return other(s, f.kind), nil
			},
		},
	}
}

// sharesToo lets a driver of the kind polls obey Claim.Shared.
func sharesToo(d *driver) { d.shares = true }

// wholeSeconds rounds terms up to whole seconds, and to at least two seconds.
func wholeSeconds(d *driver) {
	d.ttl = func(c backend.Claim) time.Duration {
		return max(2*time.Second, (c.TTL + time.Second - 1).Truncate(time.Second))
	}
}

// definite reports whether the outcome of a call that returned err is known.
func definite(err error) bool {
	return errors.Is(err, backend.ErrHeld) || errors.Is(err, backend.ErrLost)
}

func retryAfter(err error) time.Duration {
	var he *backend.HeldError
	if errors.As(err, &he) {
		return he.RetryAfter
	}
	return 0
}

// Faults returns all faults.
func Faults() []Fault { return slices.Concat(holdFaults, otherFaults) }
