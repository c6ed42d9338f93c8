// Package broken has drivers with one deliberate fault each. They prove that the
// suite of package conformance can fail: the clause that is named with a fault must
// fail, and the same driver without the fault must pass.
//
// The drivers use a small store in memory over links that can be cut. So the suite
// runs on them in virtual time (testing/synctest).
package broken

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/conformance"
)

var errUnsupported = errors.ErrUnsupported

// Fault is one way to get a driver wrong.
type Fault struct {
	// Name describes the fault.
	Name string

	// Clause is the name of the clause that must fail. Others may also fail. It is
	// empty for a sound driver.
	Clause string

	kind  kind
	cost  conformance.Cost // if the driver takes more commands, which is not its fault
	spoil func(d *driver)
}

// twice is the cost of a driver whose calls take two commands each.
var twice = conformance.Cost{Acquire: 2, Renew: 2, Release: 2, Waiting: 80}

// Sound returns drivers without a fault, one of each kind.
func Sound() []Fault {
	return []Fault{
		{Name: "none, polls", kind: polls},
		{Name: "none, waits", kind: waits},
		{Name: "none, keeps the order", kind: orders},
		{Name: "none, with a lock delay", kind: polls, spoil: lockDelay},
		{Name: "none, ends its calls", kind: waits, spoil: func(d *driver) { d.claimEnds(backend.EndsPromptly) }},
	}
}

// lockDelay makes the store refuse a key to every caller for a second after a
// hold has expired, as some stores do.
func lockDelay(d *driver) {
	d.way.store.mu.Lock()
	defer d.way.store.mu.Unlock()
	d.way.store.delay = time.Second
}

// Harness returns a harness for the driver with the fault, on a new store, with all
// hooks. The drivers claim to reach other processes, although they do not. So only
// one fault is for a clause over several processes.
func (f Fault) Harness() conformance.Harness {
	s := newStore()
	var mu sync.Mutex // guards ways
	ways := map[string]*way{"": newWay(s)}
	return conformance.Harness{
		Name: f.Name,
		Cost: f.cost,
		Store: func(context.Context) (string, func(), error) {
			return "", func() { close(s.ended) }, nil
		},
		Open: func(_ context.Context, store string) (backend.Driver, error) {
			mu.Lock()
			defer mu.Unlock()
			d := newDriver(ways[store], f.kind)
			if f.spoil != nil {
				f.spoil(d)
			}
			return d.as(), nil
		},
		Stop:  func(context.Context, string) error { s.stop(); return nil },
		Start: func(_ context.Context, _ string, data bool) error { s.start(data); return nil },
		Link: func(context.Context, string) (*conformance.Link, error) {
			mu.Lock()
			defer mu.Unlock()
			name, w := "link "+string(rune('a'+len(ways))), newWay(s)
			ways[name] = w
			return &conformance.Link{Store: name, Set: w.set, SetAfter: w.setAfter, Close: func() { w.set(conformance.Down) }}, nil
		},
		Flush: func(context.Context, string) error {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.flushes++
			return nil
		},
		Kick: func(context.Context, string) error {
			s.mu.Lock()
			close(s.kicked)
			s.kicked = make(chan struct{})
			s.mu.Unlock()
			mu.Lock()
			defer mu.Unlock()
			for _, w := range ways {
				w.set(conformance.Down)
				w.set(conformance.Up)
			}
			return nil
		},
		Advance: func(_ context.Context, _ string, d time.Duration) error {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.ahead += d
			return nil
		},
		Commands: func(context.Context, string) (int64, error) {
			s.mu.Lock()
			defer s.mu.Unlock()
			return s.commands, nil
		},
		Entries: func(context.Context, string) ([]string, error) { return s.entries(), nil },
		Others:  []conformance.Other{{Name: "other", Open: func(context.Context, string) (backend.Driver, error) { return other(s, f.kind), nil }}},
	}
}

// definite reports whether the outcome of a call that returned err is known.
func definite(err error) bool {
	return errors.Is(err, backend.ErrHeld) || errors.Is(err, backend.ErrLost)
}

// retryAfter returns the RetryAfter of a HeldError.
func retryAfter(err error) time.Duration {
	var he *backend.HeldError
	if errors.As(err, &he) {
		return he.RetryAfter
	}
	return 0
}

// Faults returns all faults.
func Faults() []Fault {
	var all []Fault
	for _, group := range [][]Fault{acquireFaults, termFaults, releaseFaults, renewFaults, keyFaults, fenceFaults,
		waitFaults, orderFaults, inspectFaults, closeFaults, otherFaults, outageFaults, costFaults} {
		all = append(all, group...)
	}
	return all
}
