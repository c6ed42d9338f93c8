package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"path/filepath"
	"regexp"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/hostclock"
	"github.com/hasplock/hasp/internal/redistest"
)

// options are what is done in a run.
type options struct {
	strategy string
	place    string // of a strategy on one Redis
	nodes    int    // of redlock
	losing   bool   // with faults that take locks away
	only     *regexp.Regexp
	seed     uint64
	time     time.Duration
	whole    time.Duration // that was asked for, of which time is a part
	plant    string
	program  string // of clients whose wall clocks can jump; if empty, this one
	term     time.Duration
	patience time.Duration // with what must happen at last
	log      io.Writer     // of all that clients tell, or nil
	results  io.Writer     // for result as JSON, or nil
	profiles string        // directory for profiles of the client that is never killed, or empty
}

const (
	seats   = 4   // client processes
	callers = 3   // in each
	keys    = 2   // that all contend for
	cold    = 200 // more, which are taken all at once now and then
)

// run is one store with its clients under faults.
type run struct {
	options
	store  *store
	rec    *record
	names  []string // of the keys that all contend for
	all    []string // and of the others
	seats  []*seat
	faults []fault
	wrong  []violation
}

var errStill = errors.New("the run stood still")

// fail notes a violation.
func (r *run) fail(promise string, at int64, what string) {
	r.wrong = append(r.wrong, violation{Promise: promise, At: at, What: what})
}

// do makes a run and prints its verdict. Its result is nil if there is nothing
// to do; an error is one of the harness.
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

// fill has a process take a seat.
func (r *run) fill(s *seat) error {
	o := order{Keys: r.all, Callers: callers, Term: r.term, Timeout: r.term / 2, Seed: r.seed, Plant: r.plant, Dir: r.store.dir, Ahead: offset(s.n), Steady: s.n == spared}
	if r.losing {
		// A fence is promised where the store has lost its data or its clock goes
		// back, not where both are, as for a key that was not granted in between.
		o.Keys = r.names
	} else {
		o.Bare = 0.3
	}
	if o.Steady && r.profiles != "" {
		o.Profile = filepath.Join(r.profiles, r.strategy)
		if r.losing {
			o.Profile += "-losing"
		}
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

// drain lets all callers end, and the clients close, and looks what is left.
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
				r.fail("stood still", w.asked, fmt.Sprintf("%s waits for key %d since %v; holders: %d", w.proc, w.key, time.Duration(hostclock.Now()-w.asked), len(holders)))
			}
			return errStill
		}
	}
	for _, s := range r.seats {
		if _, err := s.proc.await(idle); err != nil {
			return err
		}
	}
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
	if err := r.swept(); err != nil {
		return err
	}
	return r.calm()
}

// swept waits until nothing is left in the store: what the dead have left runs
// out by itself.
func (r *run) swept() error {
	for end := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		left, err := r.store.left(ctx)
		cancel()
		if errors.Is(err, hasp.ErrLost) { // a lease of our own, taken when all clients had closed
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
			for _, what := range left {
				r.fail("leftovers", hostclock.Now(), what)
			}
			return nil
		}
	}
}
