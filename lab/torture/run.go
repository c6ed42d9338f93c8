package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/hasplock/hasp/internal/clock"
	"github.com/hasplock/hasp/internal/crew"
	"github.com/hasplock/hasp/internal/redistest"
)

type options struct {
	strategy string
	place    string // the store of a strategy on one Redis
	nodes    int    // servers of redlock
	only     string // a part of the names of the faults to inject
	seed     uint64
	time     time.Duration // the -time flag
	plant    string        // a bug, or empty
	patience time.Duration // the longest wait for a grant
	history  io.Writer     // receives all reports of clients; may be nil
}

const (
	seats   = 4   // client processes
	callers = 3   // callers in each process
	keys    = 2   // keys that all callers contend for
	cold    = 200 // more keys; sometimes a caller locks all these keys
)

// names has the names of all keys. The index is the key's number.
var names = func() (all []string) {
	for k := range keys + cold {
		all = append(all, fmt.Sprintf("torture-%03d", k))
	}

	return all
}()

// patience is how long torture waits for steps that must happen on any machine, however slow.
const patience = 3 * time.Minute

// run is one store with its clients under faults, which the seed chooses. Check ends the run if the
// harness fails.
type run struct {
	options
	*redistest.Lab // ends the servers and the processes

	term   time.Duration // of all leases
	store  *store
	rec    *record
	seats  []*seat
	faults catalog
	wrong  []violation
	found  *found // what the check found in the history

	rand   *rand.Rand
	count  int   // the number of injected faults
	victim *seat // of the current fault; nil if it has none
}

var errStill = errors.New("the run stood still")

// fail notes a violation that is not in the history.
func (r *run) fail(promise, format string, args ...any) {
	r.wrong = append(r.wrong, violation{promise, fmt.Sprintf(format, args...)})
}

// do carries out a run and prints its verdict. It returns an error only if the harness failed.
func (o options) do(ctx context.Context, out io.Writer) (*run, error) {
	r := &run{options: o, Lab: &redistest.Lab{}, rec: newRecord(o.strategy, o.history)}
	r.term = cmp.Or(terms[o.strategy], shortTerm)
	defer r.Close()
	return r, r.Do(func() error {
		r.store = o.openStore(r.Lab)
		r.faults = slices.DeleteFunc(r.store.faults,
			func(f *fault) bool { return !strings.Contains(f.name, o.only) })
		err := r.Do(func() error { r.torture(ctx); return nil })
		if !errors.Is(err, errStill) {
			r.Check(err)
		}
		r.found = r.rec.check()
		r.wrong = append(r.wrong, r.found.wrong...)
		r.verdict(out)
		return nil
	})
}

// torture injects faults until the time of the run has passed, or until ctx ends. Each strike has
// its own generator of random numbers. So if a strike finds no victim, the rest of the plan does
// not change.
func (r *run) torture(ctx context.Context) {
	for i := range seats {
		s := &seat{run: r, n: i}
		r.seats = append(r.seats, s)
		s.fill()
		r.Cleanup(s.kill)
	}

	r.everyone(ctx)

	plan := rand.New(rand.NewPCG(r.seed, 0))
	strikes := uint64(0)
	for end := time.Now().Add(r.time); time.Now().Before(end); {
		for _, i := range plan.Perm(len(r.faults)) {
			strikes++
			r.rand = rand.New(rand.NewPCG(r.seed, strikes))
			if time.Now().Before(end) {
				r.strike(ctx, r.faults[i])
			}
		}
	}

	r.everyone(ctx)
	r.drain(ctx)
}

// everyone waits until each client has got a key.
func (r *run) everyone(ctx context.Context) {
	now := clock.Now()
	for _, s := range r.seats {
		r.await(ctx, s.String(), now)
	}
}

// strike injects a fault, heals it, and waits until each contended key is granted again. If the
// fault had a victim, its client must get one as well.
func (r *run) strike(ctx context.Context, f *fault) {
	lasts := r.terms(f.least + r.rand.Float64()*(f.most-f.least))
	time.Sleep(time.Duration(20+r.rand.IntN(130)) * time.Millisecond)
	began := clock.Now()
	r.victim = nil
	heal := f.inject(r)
	if heal == nil {
		return
	}
	r.count++
	time.Sleep(lasts)
	heal()

	healed := clock.Now()
	r.rec.take(entry{Fault: f.name, Span: &span{began, healed, f.takes}})
	awaited := names[:keys]
	if r.victim != nil {
		awaited = append(slices.Clip(awaited), r.victim.String())
	}
	last := healed
	for _, name := range awaited {
		last = max(last, r.await(ctx, name, healed))
	}
	f.recovery = append(f.recovery, time.Duration(last-healed))
}

func (r *run) terms(n float64) time.Duration { return time.Duration(n * float64(r.term)) }

// await waits until a client gets a key, or a key is granted, after the time since. It returns the
// time of that grant.
func (r *run) await(ctx context.Context, name string, since int64) (at int64) {
	granted := repeatUntil(r.patience, 2*time.Millisecond, func() bool {
		r.Check(ctx.Err())
		at = r.rec.after(name, since)
		return at != 0
	})

	if !granted {
		r.still("no grant of or to %s for %v", name, r.patience)
	}

	return at
}

// still ends the run because there is no progress. The clients print the stacks of their goroutines
// and end, so that the output shows what they wait for.
func (r *run) still(format string, args ...any) {
	r.fail("stood still", format, args...)
	for _, s := range r.seats {
		_ = s.Signal(syscall.SIGQUIT) // it fails if the process has ended
		select {
		case <-s.done:
		case <-time.After(10 * time.Second): // the process is stopped, for instance
		}
	}
	r.Check(errStill)
}

// drain lets all callers end and close their Clients, and checks what is left in their processes
// and in the store. The records of killed processes stay in the store until they expire.
func (r *run) drain(ctx context.Context) {
	for _, s := range r.seats {
		_ = s.Send(order{})
	}
	for _, s := range r.seats {
		over := repeatUntil(2*r.patience, 5*time.Millisecond,
			func() bool { return r.rec.over(s.String()) })
		if !over {
			r.still("%s does not end", s)
		}
	}

	// A server keeps a connection that has died in silence, and what was subscribed on it, for
	// minutes.
	for _, links := range r.store.links {
		for _, link := range links {
			link.Cut()
		}
	}

	var left []string
	repeatUntil(patience, 20*time.Millisecond, func() bool {
		left = r.store.left(ctx)
		return len(left) == 0
	})

	for client, text := range r.rec.left {
		if text != "" {
			left = append(left, client+": "+text)
		}
	}
	for _, text := range left {
		r.fail("leftovers", "%s", text)
	}
}

// repeatUntil calls the function done, with pauses, until it returns true or the time limit has
// passed. It reports whether done returned true.
func repeatUntil(limit, pause time.Duration, done func() bool) bool {
	for end := time.Now().Add(limit); !done(); time.Sleep(pause) {
		if time.Now().After(end) {
			return false
		}
	}

	return true
}

// seat is a place for a client process. When this process is killed, a new one takes the place.
type seat struct {
	run *run
	n   int
	gen int // how many processes the seat has had

	*crew.Process
	done chan struct{} // closed when the process has ended and its reports are recorded
}

// spared is the client that is never killed, so that its growth can be checked.
const spared = "client 0.1"

func (s *seat) String() string { return fmt.Sprintf("client %d.%d", s.n, s.gen) }

// fill starts a process. Its reports are recorded until it has ended.
func (s *seat) fill() {
	r := s.run
	child, err := crew.Start("client")
	r.Check(err)
	done := make(chan struct{})
	s.Process = child
	s.done = done
	s.gen++
	name := s.String()
	go func() {
		defer close(done)
		defer child.Wait()
		for {
			var e report
			if child.Receive(&e) != nil {
				return
			}
			r.rec.take(entry{Client: name, report: e})
		}
	}()

	// The Timeouts of the clients differ, because redlock once relied on that of the caller.
	o := order{URL: r.store.urls[s.n], Owner: name, Term: r.term, Plant: r.plant,
		Timeout: r.term / time.Duration(1+(s.n+s.gen)%4),
		Seed:    r.seed + uint64(s.n)<<32 + uint64(s.gen)}
	if s.n%2 == 1 && slices.Contains(onOne, r.strategy) && r.place == onServer {
		o.Passed = r.store.links[s.n][0].Addr()
	}
	_ = child.Send(o)
}

// kill ends the process as SIGKILL does, and returns when all its reports are recorded.
func (s *seat) kill() {
	at := clock.Now()
	_ = s.Kill()
	<-s.done
	s.run.rec.die(s.String(), at)
}
