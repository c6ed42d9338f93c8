package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"regexp"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/hostclock"
	"github.com/hasplock/hasp/internal/redistest"
)

// options describe a run.
type options struct {
	strategy string
	place    string         // of a strategy on one Redis
	nodes    int            // servers of redlock
	losing   bool           // use the faults that take locks away
	only     *regexp.Regexp // the names of the faults, or nil for all
	seed     uint64
	time     time.Duration
	whole    time.Duration // the -time flag, of which time is a part
	plant    string        // a bug, or empty
	program  string        // binary of clients whose wall clocks can jump; if empty, this one
	term     time.Duration
	patience time.Duration // the longest wait for a grant
	log      io.Writer     // for all reports of clients, or nil
	results  io.Writer     // for the result as JSON, or nil
}

const (
	seats   = 4   // client processes
	callers = 3   // in each
	keys    = 2   // that all contend for
	cold    = 200 // more keys, which a caller sometimes takes all at once
)

// run is one store with its clients under faults.
type run struct {
	options
	store  *store
	rec    *record
	names  []string // the keys that all contend for
	all    []string // these and the cold ones
	seats  []*seat
	faults []fault
	wrong  []violation
}

var errStill = errors.New("the run stood still")

// fail notes a violation.
func (r *run) fail(promise string, at int64, text string) {
	r.wrong = append(r.wrong, violation{Promise: promise, At: at, What: text})
}

// do makes a run and prints its verdict. The result is nil if there is no fault
// to inject. An error is an error of the harness.
func do(ctx context.Context, o options, out io.Writer) (res *result, err error) {
	l := &redistest.Lab{}
	defer l.Close()
	err = l.Do(func() error {
		res, err = o.run(ctx, l)
		return err
	})
	if res != nil {
		res.verdict(out)
	}
	return res, err
}

// run makes a run. l ends its servers and processes.
func (o options) run(ctx context.Context, l *redistest.Lab) (res *result, err error) {
	r := &run{options: o, rec: newRecord(keys+cold, o.log)}
	for k := range keys + cold {
		r.all = append(r.all, fmt.Sprintf("torture-%03d", k))
	}
	r.names = r.all[:keys]
	if r.store, err = o.openStore(l, r.all); err != nil {
		return nil, err
	}
	for _, f := range r.store.faults(o.losing) {
		if o.only == nil || o.only.MatchString(f.name) {
			r.faults = append(r.faults, f)
		}
	}
	if len(r.faults) == 0 {
		return nil, nil
	}

	l.Cleanup(func() {
		for _, s := range r.seats {
			if s.proc != nil {
				s.proc.kill()
			}
		}
	})
	for i := range seats {
		s := &seat{n: i, rec: r.rec, url: r.store.urls[i], program: o.program}
		r.seats = append(r.seats, s)
		if err := r.fill(s); err != nil {
			return nil, err
		}
	}
	if err := r.seated(); err != nil {
		return nil, err
	}

	n := &nemesis{run: r, rand: rand.New(rand.NewPCG(o.seed, 0)), busy: map[int]bool{}, tally: map[string]*tally{}}
	began := hostclock.Now()
	err = n.torture(ctx, time.Now().Add(o.time))
	if err == nil {
		err = r.drain()
	}
	if err != nil && !errors.Is(err, errStill) {
		return nil, err
	}
	lasted := time.Duration(hostclock.Now() - began)
	found := n.check()
	return n.result(lasted, found), nil
}

// fill starts a process for a seat.
func (r *run) fill(s *seat) error {
	o := order{Keys: r.all, Callers: callers, Term: r.term, Timeout: r.term / 2, Seed: r.seed, Plant: r.plant, Dir: r.store.dir, Ahead: offset(s.n), Steady: s.n == spared}
	if r.losing {
		// Fences are promised if the store loses its data, or if its clock goes back.
		// If both happen before the next grant of a key, they are not. So there are
		// no keys that are granted rarely.
		o.Keys = r.names
	} else {
		o.Bare = 0.3
	}
	for _, srv := range r.store.servers {
		o.Direct = append(o.Direct, srv.Addr)
	}
	return s.fill(o)
}

// seated waits until all processes are at work.
func (r *run) seated() error {
	for _, s := range r.seats {
		if s.proc.fresh {
			if _, err := s.proc.await(began); err != nil {
				return err
			}
			s.proc.fresh = false
		}
	}
	return nil
}

// drain lets all callers end and closes the clients, and then checks what is left.
func (r *run) drain() error {
	for _, s := range r.seats {
		s.proc.send(order{Op: "drain"})
	}
	for end := time.Now().Add(r.patience); ; time.Sleep(5 * time.Millisecond) {
		holders, waiters := r.rec.seen()
		if len(holders)+len(waiters) == 0 {
			break
		}
		if time.Now().After(end) {
			for _, w := range waiters {
				r.fail("stood still", w.asked, fmt.Sprintf("%s has waited for key %d for %v; holders: %d", w.proc, w.key, time.Duration(hostclock.Now()-w.asked), len(holders)))
			}
			return errStill
		}
	}
	for _, s := range r.seats {
		if _, err := s.proc.await(idle); err != nil {
			return err
		}
	}
	for _, part := range []func() error{r.close, r.swept, r.calm} {
		if err := part(); err != nil {
			return err
		}
	}
	return nil
}

// close closes the clients, and checks what they leave in their processes.
func (r *run) close() error {
	for _, s := range r.seats {
		s.proc.send(order{Op: "close"})
	}
	for _, s := range r.seats {
		c, err := s.proc.await(closed)
		if err != nil {
			return err
		}
		if c.Err != "" {
			r.fail("leftovers", c.T, fmt.Sprintf("%s: close: %s", s.proc, c.Err))
		}
		if c.Goroutines[1] > c.Goroutines[0] {
			r.fail("leftovers", c.T, fmt.Sprintf("%s: %d goroutines before, %d after", s.proc, c.Goroutines[0], c.Goroutines[1]))
		}
		if c.Files[1] > c.Files[0] {
			r.fail("leftovers", c.T, fmt.Sprintf("%s: %d descriptors before, %d after", s.proc, c.Files[0], c.Files[1]))
		}
	}
	return nil
}

// swept waits until nothing is left in the store. The records of killed
// processes expire by themselves.
func (r *run) swept() error {
	for end := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		left, err := r.store.left(ctx)
		cancel()
		if errors.Is(err, hasp.ErrLost) { // of a lease that left took, after all clients had closed
			r.fail("kept until its end", hostclock.Now(), err.Error())
			return nil
		}
		if err != nil {
			return err
		}
		if len(left) == 0 {
			return nil
		}
		if time.Now().After(end) {
			for _, text := range left {
				r.fail("leftovers", hostclock.Now(), text)
			}
			return nil
		}
	}
}
