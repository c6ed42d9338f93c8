// Package conformance is the suite that every driver of package backend must
// pass. The driver's own test is one call:
//
//	func TestConformance(t *testing.T) {
//		conformance.Run(t, conformance.Harness{
//			Store: func(ctx context.Context) (string, func(), error) { … }, // start a store, return its address
//			Open:  func(ctx context.Context, store string) (backend.Driver, error) { … },
//		})
//	}
//
// [Check] is the same outside of tests. Each clause checks one sentence of the
// contract in package backend, which its result quotes. Half of them call the driver itself, the
// other half use it through package hasp, since that is how it will be used.
//
// # What is skipped
//
// A clause that a driver's Traits make pointless, that needs a hook of the
// Harness which is nil, or that the Harness declares out of reach
// ([Harness.Cannot]) is a skip that names its reason. Claiming less than is
// true fails as claiming more does.
//
// The first clause takes a free key and releases it. If it fails, the others are
// skipped, because they would fail for the same reason.
//
// # Time
//
// Terms are real, so a run takes some seconds, of which most are waiting. A
// verdict rests on the order of events and on what the store itself says; what
// must happen at last is given 20 seconds. Only of cancelled calls the fastest
// of several must return within 50 ms. What a slow machine could cause as well
// is tried again with longer terms, and is a skip if this process was seen to
// stand still even then.
//
// # Several processes
//
// Clauses over several processes start the running program again, with the
// arguments that led to Check, or for Run with those that lead to this test.
// In such a child Check and Run do not return: they open drivers with Open,
// do what the parent says, and exit. Store is not called there. What stands
// before the call runs in the child, too; [Child] tells.
package conformance

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/hasplock/hasp/backend"
)

// Harness says how to reach the driver under test, and what may be done to
// its store. Only Open is required.
type Harness struct {
	// Name tells this harness from others in the same program, for child
	// processes. Run uses the test's name.
	Name string

	// Store starts a store, or names one that runs, and returns its address
	// and what stops it. It is called once; without it the address is empty.
	// All keys of the suite contain "hasp-conformance-" and a random part, so
	// a store that others use, too, will do.
	Store func(ctx context.Context) (store string, stop func(), err error)

	// Open makes a new driver on the store at an address: that of Store, or of
	// a Link. The suite closes it. It is called often, by several goroutines,
	// and in child processes.
	Open func(ctx context.Context, store string) (backend.Driver, error)

	// Term is the term of leases that are meant to run out; default 400 ms.
	// Long is one that outlasts every clause; default 1 min, and not less.
	// Timeout bounds one call to the store; default 3 s.
	Term, Long, Timeout time.Duration

	// Only picks clauses by name; nil is all.
	Only func(clause string) bool

	// Cannot declares clauses that the driver or its store cannot meet: name
	// and reason. Such a clause is tried all the same and must fail: then it
	// is a skip with that reason. Only what no other process can be hurt by
	// may be declared.
	Cannot map[string]string

	// Stop stops the store, so that it does not answer. Start starts it again
	// at the same address, with the data it had or without any; a store that
	// can do only one of the two answers errors.ErrUnsupported to the other.
	Stop  func(ctx context.Context, store string) error
	Start func(ctx context.Context, store string, data bool) error

	// Link makes a new way to the store that the suite can disturb. [TCP]
	// makes one for stores that are reached over TCP.
	Link func(ctx context.Context, store string) (*Link, error)

	// Flush makes the store drop what it keeps only for speed, such as scripts
	// that drivers have loaded. Kick makes it end the connections of all
	// drivers. Holds and places in queues survive both.
	Flush, Kick func(ctx context.Context, store string) error

	// Advance moves the store's clock forward by d, all its terms included.
	Advance func(ctx context.Context, store string, d time.Duration) error

	// Commands returns how many calls the store has served so far, by a
	// counter that only grows. Cost is what they may be.
	Commands func(ctx context.Context, store string) (int64, error)
	Cost     Cost

	// Entries lists what the store keeps of holds, places in queues and the
	// like: everything that must be gone when nobody holds or wants a key. A
	// fence counter and a guard file may stay and are not listed.
	Entries func(ctx context.Context, store string) ([]string, error)

	// Sweep does at once what the driver or its store does from time to time:
	// it removes what expired holds have left of keys that no caller wants
	// again. It is nil if such leftovers disappear within 20 seconds without it.
	Sweep func(ctx context.Context, store string) error

	// Others are strategies that keep their locks on the same store under the
	// same keys, so that processes on different ones exclude each other.
	Others []Other
}

// Other opens drivers of another strategy than that under test.
type Other struct {
	Name string
	Open func(ctx context.Context, store string) (backend.Driver, error)
}

// Cost is how many calls to the store an operation may take, without
// contention and averaged over many. Zero means the default.
type Cost struct {
	Acquire float64 // default 1
	Renew   float64 // of one hold, in a batch; default 1
	Release float64 // default 1
	Waiting float64 // of one Client that waits, per second; default 40
}

// Status is how a clause came out.
type Status int

// A clause passes, fails, or is skipped with a reason.
const (
	Pass Status = iota
	Fail
	Skip
)

// String returns "pass", "fail" or "skip".
func (s Status) String() string {
	switch s {
	case Pass:
		return "pass"
	case Fail:
		return "fail"
	case Skip:
		return "skip"
	}
	return fmt.Sprintf("Status(%d)", int(s))
}

// Result is the outcome of one clause.
type Result struct {
	Name     string        // of the clause, such as "release-foreign"
	Why      string        // what it checks
	Contract string        // the sentence of package backend that demands it
	Status   Status        // Pass, Fail or Skip
	Reason   string        // of a Skip
	Err      error         // of a Fail: what the clause observed
	Elapsed  time.Duration // zero if the clause was not tried
}

// Check checks the driver of h against all clauses and reports each result,
// in the order of the table. It returns an error that names the clauses that
// failed, or says why the suite could not be run.
//
// Independent clauses run at the same time. Those that disturb the store or
// count what it does run alone, last.
func Check(ctx context.Context, h Harness, report func(Result)) error {
	if err := serveIfChild(ctx, h); err != nil {
		return err
	}
	s, err := newSuite(ctx, h, nil)
	if err != nil {
		return err
	}
	defer s.stop()
	var failed []string
	total := 0
	for _, r := range s.start(ctx) {
		res := <-r
		if ctx.Err() != nil {
			continue // what was under way says nothing
		}
		total++
		report(res)
		if res.Status == Fail {
			failed = append(failed, res.Name)
		}
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("conformance: %w", err)
	}
	if len(failed) > 0 {
		return fmt.Errorf("conformance: %d of %d clauses failed: %s", len(failed), total, strings.Join(failed, ", "))
	}
	return nil
}

// check returns what is wrong with h itself.
func (h *Harness) check() error {
	if h.Open == nil {
		return errors.New("conformance: Harness.Open is nil")
	}
	if (h.Stop == nil) != (h.Start == nil) {
		return errors.New("conformance: Harness has one of Stop and Start")
	}
	for _, o := range h.Others {
		if o.Name == "" || o.Open == nil {
			return errors.New("conformance: Harness.Others: one without Name or Open")
		}
	}
	for name := range h.Cannot {
		c := find(name)
		switch {
		case c == nil:
			return fmt.Errorf("conformance: Harness.Cannot: no clause %q", name)
		case c.optional == no:
			return fmt.Errorf("conformance: Harness.Cannot: every driver must meet %q", name)
		}
	}
	return nil
}

func (h *Harness) setDefaults() {
	def := func(d *time.Duration, v time.Duration) {
		if *d <= 0 {
			*d = v
		}
	}
	def(&h.Term, 400*time.Millisecond)
	h.Term = max(h.Term, backend.MinTTL)
	h.Long = max(h.Long, time.Minute)
	def(&h.Timeout, 3*time.Second)
	for _, c := range []struct {
		v   *float64
		def float64
	}{{&h.Cost.Acquire, 1}, {&h.Cost.Renew, 1}, {&h.Cost.Release, 1}, {&h.Cost.Waiting, 40}} {
		if *c.v <= 0 {
			*c.v = c.def
		}
	}
}
