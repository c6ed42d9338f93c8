package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"regexp"
	"slices"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/clock"
	"github.com/hasplock/hasp/internal/redistest"
)

type options struct {
	strategy string
	place    string         // the store of a strategy on one Redis
	nodes    int            // servers of redlock
	losing   bool           // use the faults that take locks away
	only     *regexp.Regexp // matches the names of the faults to inject; nil matches all
	seed     uint64
	time     time.Duration // the -time flag
	plant    string        // a bug, or empty
	term     time.Duration
	patience time.Duration // the longest wait for a grant
	history  io.Writer     // receives all reports of clients; may be nil
}

const (
	seats   = 4   // client processes
	callers = 3   // callers in each process
	keys    = 2   // keys that all callers contend for
	cold    = 200 // more keys; sometimes a caller locks all these keys
	slots   = 2   // slots of one more key that all callers contend for
)

// slotted is the number of the key with slots, after all other keys. A turn that has slot i
// counts as a turn of key slotted+i, because each slot is exclusive and has its own fences.
const slotted = keys + cold

const slottedName = "torture-slots"

// contended reports whether all callers contend for a key.
func contended(key int) bool { return key < keys || key >= slotted }

// title returns the name of a key or a slot for messages.
func title(key int) string {
	switch {
	case key >= slotted:
		return fmt.Sprint("slot ", key-slotted)
	case key < 0:
		return "any key"
	}
	return fmt.Sprint("key ", key)
}

// run is one store with its clients under faults. Check ends the run if the harness fails.
type run struct {
	options
	*redistest.Lab // ends the servers and the processes

	store  *store
	rec    *record
	names  []string // the names of all keys without slots; the index is the key's number
	seats  []*seat
	faults []*fault
	wrong  []violation
}

var errStill = errors.New("the run stood still")

// fail notes a violation.
func (r *run) fail(promise string, at int64, text string) {
	r.wrong = append(r.wrong, violation{promise, at, text})
}

// do carries out a run and prints its verdict. It returns a nil nemesis if there is no fault to
// inject. It returns an error only if the harness failed.
func do(ctx context.Context, o options, out io.Writer) (n *nemesis, err error) {
	l := &redistest.Lab{} // ends the servers and the processes
	defer l.Close()
	err = l.Do(func() error { n = o.run(ctx, l, out); return nil })
	return n, err
}

// run carries out the run. If a Check of l fails, the run ends early.
func (o options) run(ctx context.Context, l *redistest.Lab, out io.Writer) *nemesis {
	r := &run{options: o, Lab: l, rec: newRecord(o)}
	for k := range keys + cold {
		r.names = append(r.names, fmt.Sprintf("torture-%03d", k))
	}
	stored := append(slices.Clone(r.names), slottedName+"#queue")
	for i := range slots + 1 { // the bug "slots" adds one
		stored = append(stored, fmt.Sprint(slottedName, "#", i))
	}
	r.store = o.openStore(l, stored)
	var all catalog
	r.store.faults(&all, o.losing)
	for _, f := range all {
		if o.only == nil || o.only.MatchString(f.name) {
			r.faults = append(r.faults, f)
		}
	}
	if len(r.faults) == 0 {
		return nil
	}

	for i := range seats {
		s := &seat{run: r, n: i}
		r.seats = append(r.seats, s)
		s.fill()
		l.Cleanup(func() { s.proc.kill() })
	}
	r.seated()

	n := &nemesis{run: r, rand: rand.New(rand.NewPCG(o.seed, 0)), busy: map[int]bool{}}
	began := clock.Now()
	err := r.Do(func() error {
		lasts := o.time
		if o.losing {
			lasts /= 3
		}
		n.torture(ctx, time.Now().Add(lasts))
		n.everyone()
		r.drain()
		return nil
	})
	if !errors.Is(err, errStill) {
		r.Check(err)
	}
	lasted := time.Duration(clock.Now() - began)
	n.verdict(out, n.check(), lasted)
	return n
}

// seated waits until all processes are at work.
func (r *run) seated() {
	for _, s := range r.seats {
		if s.proc.fresh {
			s.await(began)
			s.proc.fresh = false
		}
	}
}

// drain lets all callers end, closes the clients, and checks what is left.
func (r *run) drain() {
	for _, s := range r.seats {
		s.proc.send(order{Op: "drain"})
	}
	var holders, waiters []lockCall
	over := repeatUntil(r.patience, 5*time.Millisecond, func() bool {
		holders, waiters = r.rec.seen()
		return len(holders)+len(waiters) == 0
	})
	if !over {
		for _, w := range waiters {
			r.fail("stood still", w.asked, fmt.Sprintf("%s has waited for %s for %v; holders: %d", w.proc, title(w.key), time.Duration(clock.Now()-w.asked), len(holders)))
		}
		r.Check(errStill)
	}

	for _, s := range r.seats {
		s.await(idle)
	}
	r.close()
	r.sweep()
}

// close closes the clients, and checks what they leave in their processes.
func (r *run) close() {
	for _, s := range r.seats {
		s.proc.send(order{Op: "close"})
	}
	for _, s := range r.seats {
		c := s.await(closed)
		if c.Err != "" {
			r.fail("leftovers", c.T, fmt.Sprintf("%s: close: %s", s.proc, c.Err))
		}
		for what, n := range map[string][2]int{"goroutines": c.Goroutines, "descriptors": c.Files} {
			if n[1] > n[0] {
				r.fail("leftovers", c.T, fmt.Sprintf("%s: %d %s before, %d after", s.proc, n[0], what, n[1]))
			}
		}
	}
}

// sweep waits until nothing is left in the store. The records of killed processes stay until they
// expire.
func (r *run) sweep() {
	var left []string
	err := r.Do(func() error {
		repeatUntil(patience, 20*time.Millisecond, func() bool {
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			left = r.store.left(ctx)
			return len(left) == 0
		})
		return nil
	})
	if errors.Is(err, hasp.ErrLost) { // store.left held this lease, after all clients had closed
		r.fail("kept until its end", clock.Now(), err.Error())
		return
	}
	r.Check(err)
	for _, text := range left {
		r.fail("leftovers", clock.Now(), text)
	}
}
