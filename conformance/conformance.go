// Package conformance is a test suite for drivers of package backend. Every driver must pass it.
// The driver's own test is one call:
//
//	func TestConformance(t *testing.T) {
//		conformance.Run(t, conformance.Harness{
//			// Store starts a store and returns its address.
//			Store: func(ctx context.Context) (string, func(), error) { … },
//			Open:  func(ctx context.Context, store string) (backend.Driver, error) { … },
//		})
//	}
//
// [Check] does the same outside of tests. Each clause checks one sentence of the contract in
// package backend, and its result quotes the sentence. Most clauses call the driver directly. Some
// use it through package hasp, as programs do.
//
// # Skipped clauses
//
// A clause is skipped, with a reason, if the driver's Traits make it pointless, if it needs a hook
// that is nil in the Harness, or if [Harness.Cannot] declares that the driver cannot meet it. A
// driver fails if its Traits claim more than is true. It also fails if they claim less.
//
// The first clause takes a free key and releases it. If it fails, the others are skipped, because
// they would fail for the same reason.
//
// # Time
//
// The suite waits for real terms to end, so a run takes some seconds. A verdict depends on the
// order of events and on the answers of the store, and not on speed. There is one exception: the
// fastest of several cancelled calls must return within 50 ms. Every other event that must happen
// has 20 seconds to happen.
//
// If a slow machine could have caused a failure, the clause is tried again with longer terms, and
// the result says so. There are three signs of a slow machine: this process was stopped for a part
// of a term, a call to the store had no answer for its whole timeout, or long holds may have
// expired. If this process was stopped for a part of even the longest term, the clause is skipped.
//
// # Several processes
//
// Clauses over several processes start this program again. Check passes the same arguments, and Run
// passes arguments that select the test. In such a child process, Check and Run open drivers with
// Open, execute the parent's requests, and exit. They do not call Store and do not return. Code
// before the call of Check or Run also runs in the child; see [Child].
package conformance

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/hasplock/hasp/backend"
)

// Harness opens the driver under test. It also has hooks that change the driver's store. Only Open
// is required.
type Harness struct {
	// Name tells a child process which harness of the program is meant. The default of Run is the
	// test's name.
	Name string

	// Store starts a store, or finds one that runs, and returns the store's address and a function
	// that stops it. Store is called once. If Store is nil, the address is empty. All keys of the
	// suite contain "hasp-conformance-" and a random part, so other programs may use the store at
	// the same time.
	Store func(ctx context.Context) (store string, stop func(), err error)

	// Open opens a new driver on the store at an address that Store or Link has returned. The suite
	// closes the driver. Open is called by several goroutines at the same time, and in child
	// processes.
	Open func(ctx context.Context, store string) (backend.Driver, error)

	// Term is the term of leases that expire in a clause; default 400 ms. The suite rounds Term up
	// as the driver's Traits say. Long is a term that outlasts every clause; its default and
	// minimum are 1 min, or Traits.MaxTTL if that is shorter. Timeout bounds one call to the store;
	// default 3 s.
	Term, Long, Timeout time.Duration

	// Only selects clauses by name. If it is nil, all clauses run.
	Only func(clause string) bool

	// Cannot names optional clauses that the driver or its store cannot meet, each with the reason.
	// Such a clause is tried, and must fail. Then it counts as skipped, with the reason. A clause
	// is optional if its failure harms no other process.
	Cannot map[string]string

	// Stop stops the store, so that it does not answer. Start starts the store again at the same
	// address, with its data or without. If Start cannot do that, it returns errors.ErrUnsupported.
	Stop  func(ctx context.Context, store string) error
	Start func(ctx context.Context, store string, data bool) error

	// Link creates a connection path to the store. The suite disturbs this path, which must not
	// affect other paths. Several links exist at the same time. For a store on TCP, use [TCP].
	Link func(ctx context.Context, store string) (*Link, error)

	// Flush makes the store drop what it keeps only for speed, such as scripts that drivers have
	// loaded. Kick ends the connections of all drivers. Holds and places in queues survive Flush
	// and Kick.
	Flush, Kick func(ctx context.Context, store string) error

	// Commands returns how many calls the store has served so far. The number never falls. Cost is
	// how many calls each operation may take.
	Commands func(ctx context.Context, store string) (int64, error)
	Cost     Cost

	// Entries lists the store's entries that must be gone when no caller holds or wants a key, such
	// as holds and places in queues. It leaves out fence counters and guard files, because these
	// may stay.
	Entries func(ctx context.Context, store string) ([]string, error)

	// Sweep removes the leftovers of expired holds immediately. Without it, the driver or its store
	// does so from time to time. Sweep may be nil if leftovers then disappear within 20 seconds.
	Sweep func(ctx context.Context, store string) error

	// Others maps the name of each other strategy to its Open. These strategies keep their locks on
	// the same store under the same keys. Processes that use them must exclude each other.
	Others map[string]func(ctx context.Context, store string) (backend.Driver, error)
}

// Cost is how many calls to the store an operation may take on average, without
// contention. Zero means the default.
type Cost struct {
	Acquire float64 // default 1
	Refused float64 // an Acquire that returns ErrHeld; default 2 × Acquire
	Renew   float64 // a Renew of one hold; default 1
	Release float64 // default 1
	Keep    float64 // a Release with KeepUntil; default Release
	Waiting float64 // one second in which a Client waits; default 40
}

// These are the values of Result.Status.
const (
	passed  = "pass"
	failed  = "fail"
	skipped = "skip"
)

// Result is the outcome of one clause.
type Result struct {
	Name     string        // the clause's name, such as "release-lost"
	Why      string        // the promise that the clause checks
	Contract string        // the sentence of package backend that makes the promise
	Status   string        // "pass", "fail" or "skip"
	Reason   string        // why the clause was skipped, or tried again
	Err      error         // the observation that breaks the promise, if the clause failed
	Elapsed  time.Duration // zero if the clause was not tried
}

// Check checks the driver of h against all clauses and reports each result, in a fixed order. Its
// error names the failed clauses, or says why the suite could not run.
//
// Independent clauses run at the same time. Clauses that disturb the store or
// count its calls run alone, at the end.
func Check(ctx context.Context, h Harness, report func(Result)) error {
	if err := serveIfChild(ctx, h); err != nil {
		return err
	}
	s, err := newSuite(ctx, h, nil)
	if err != nil {
		return err
	}
	defer s.stop()

	var broken []string // the names of the failed clauses
	total := 0
	for _, result := range s.start(ctx) {
		r := <-result
		if ctx.Err() != nil {
			// Do not count r, because the end of ctx may have caused it. Still receive the other
			// results, so that no clause is running when s.stop stops the store.
			continue
		}
		total++
		report(r)
		if r.Status == failed {
			broken = append(broken, r.Name)
		}
	}

	if err := ctx.Err(); err != nil {
		return fmt.Errorf("conformance: %w", err)
	}
	if len(broken) > 0 {
		return fmt.Errorf("conformance: %d of %d clauses failed: %s", len(broken), total,
			strings.Join(broken, ", "))
	}
	return nil
}

// check returns an error if a field of h is missing or wrong. It does not call any hook.
func (h *Harness) check() error {
	if h.Open == nil {
		return errors.New("conformance: Harness.Open is nil")
	}
	if (h.Stop == nil) != (h.Start == nil) {
		return errors.New("conformance: Harness has one of Stop and Start")
	}
	for name, open := range h.Others {
		if open == nil {
			return fmt.Errorf("conformance: Harness.Others: %q is nil", name)
		}
	}

	for name := range h.Cannot {
		i := slices.IndexFunc(table, func(c clause) bool { return c.name == name })
		switch {
		case i < 0:
			return fmt.Errorf("conformance: Harness.Cannot: no clause %q", name)
		case !table[i].optional:
			return fmt.Errorf("conformance: Harness.Cannot: every driver must meet %q", name)
		}
	}
	return nil
}

// has reports whether the field of h with the name hook is set.
func (h *Harness) has(hook string) bool {
	return !reflect.ValueOf(h).Elem().FieldByName(hook).IsZero()
}

// setDefaults replaces fields that are zero, and durations that are negative, by their defaults.
// Bounds by the driver's Traits come later: see newSuite and paceOf.
func (h *Harness) setDefaults() {
	h.Term = max(cmp.Or(max(h.Term, 0), 400*time.Millisecond), backend.MinTTL)
	h.Long = max(h.Long, time.Minute)
	h.Timeout = cmp.Or(max(h.Timeout, 0), 3*time.Second)

	h.Cost.Acquire = cmp.Or(h.Cost.Acquire, 1)
	h.Cost.Refused = cmp.Or(h.Cost.Refused, 2*h.Cost.Acquire)
	h.Cost.Renew = cmp.Or(h.Cost.Renew, 1)
	h.Cost.Release = cmp.Or(h.Cost.Release, 1)
	h.Cost.Keep = cmp.Or(h.Cost.Keep, h.Cost.Release)
	h.Cost.Waiting = cmp.Or(h.Cost.Waiting, 40)
}
