package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/hasplock/hasp/internal/hostclock"
)

// fault is something that goes wrong.
type fault struct {
	name        string
	class       string  // two at once are of different classes
	loses       bool    // locks: exclusion is not promised
	thins       bool    // a minority of its locks, which may be one too many for a lease that only a quorum had
	least, most float64 // how long it lasts, in terms
	inject      func(n *nemesis) (injection, bool)
}

// injection is a fault that has happened.
type injection struct {
	heal func() error // may be nil
	from bool         // recovery counts from when it began, not from when it is healed
	key  int          // that is granted again, or below 0 for each
	seat int          // whose client has a key again, or below 0 for anybody
}

// Classes of faults.
const (
	process = "process"
	link    = "link"
	server  = "server"
)

// nemesis injects faults one after another. What it does and how long follows
// from the seed.
type nemesis struct {
	*run
	rand    *rand.Rand
	busy    map[int]bool // seats that a fault is at work on
	tally   map[string]*tally
	losses  [][2]int64 // from when to when locks were lost
	thinned [][2]int64 // and on a minority: a lease may end early, and still nobody else has the key
	count   int
	lasts   time.Duration // how long the fault that is injected is to last

	at           int64 // of the injection under way
	held, waited bool  // somebody held a key then, or waited
}

// tally is what came of one kind of fault.
type tally struct {
	injected, missed      int
	held, waited, touched int // while somebody held, waited, did either
	before, during, after int // grants
	recovery              []time.Duration
	at                    []int64
}

// torture injects faults until the time is over.
func (n *nemesis) torture(ctx context.Context, until time.Time) error {
	for plan, strikes := n.rand, uint64(0); ; {
		for _, i := range plan.Perm(len(n.faults)) {
			// A victim that is not found leaves the rest of the plan as it is.
			strikes++
			n.rand = rand.New(rand.NewPCG(n.seed, strikes))
			if ctx.Err() != nil || !time.Now().Before(until) {
				return nil
			}
			f := n.faults[i]
			if n.rand.IntN(6) > 0 {
				if err := n.strike(ctx, f, nil); err != nil {
					return err
				}
				continue
			}
			with := n.faults[n.rand.IntN(len(n.faults))]
			if with.class == f.class {
				with = fault{}
			}
			if err := n.strike(ctx, f, &with); err != nil {
				return err
			}
		}
	}
}

// strike injects a fault, and perhaps another while it lasts, heals them and
// waits until keys are granted again.
func (n *nemesis) strike(ctx context.Context, f fault, with *fault) error {
	n.lasts = n.span(f.least, f.most)
	lasts := n.lasts
	quiet := hostclock.Now()
	time.Sleep(time.Duration(20+n.rand.IntN(130)) * time.Millisecond)
	in, ok, err := n.inflict(f)
	if err != nil || !ok {
		return err
	}
	t := n.of(f)
	t.before += n.rec.between(quiet, in.at)
	time.Sleep(lasts / 2)
	var second inflicted
	if with != nil && with.inject != nil {
		n.lasts = n.span(with.least, with.most)
		if second, ok, err = n.inflict(*with); err != nil {
			return err
		}
		if ok {
			time.Sleep(n.lasts)
			if err := n.heal(&second); err != nil {
				return err
			}
		}
	}
	time.Sleep(lasts / 2)
	if err := n.heal(&in); err != nil {
		return err
	}
	n.forget(f, in)
	if second.heal != nil {
		n.forget(*with, second)
		if err := n.recover(ctx, *with, second); err != nil {
			return err
		}
	}
	return n.recover(ctx, f, in)
}

func (n *nemesis) span(least, most float64) time.Duration {
	return time.Duration((least + n.rand.Float64()*(most-least)) * float64(n.term))
}

// inflicted is an injection with its times.
type inflicted struct {
	injection
	at, healed int64
}

func (n *nemesis) inflict(f fault) (inflicted, bool, error) {
	var in inflicted
	var ok bool
	n.mark()
	in.injection, ok = f.inject(n)
	in.at = n.at
	t := n.of(f)
	if !ok {
		t.missed++
		return in, false, nil
	}
	if in.injection.heal == nil {
		in.injection.heal = func() error { return nil }
	}
	n.count++
	t.injected++
	t.at = append(t.at, in.at)
	t.held += one(n.held)
	t.waited += one(n.waited)
	t.touched += one(n.held || n.waited)
	return in, true, nil
}

// mark notes the moment of an injection. Who looks for a victim first marks it
// again.
func (n *nemesis) mark() {
	n.at = hostclock.Now()
	holders, waiters := n.rec.seen()
	n.held, n.waited = len(holders) > 0, len(waiters) > 0
}

func (n *nemesis) heal(in *inflicted) error {
	err := in.injection.heal()
	in.healed = hostclock.Now()
	clear(n.busy)
	return err
}

// forget notes that locks were lost.
func (n *nemesis) forget(f fault, in inflicted) {
	if f.loses {
		n.losses = append(n.losses, [2]int64{in.at, in.healed})
	}
	if f.thins {
		n.thinned = append(n.thinned, [2]int64{in.at, in.healed})
	}
}

func (n *nemesis) of(f fault) *tally {
	t := n.tally[f.name]
	if t == nil {
		t = &tally{}
		n.tally[f.name] = t
	}
	return t
}

// recover waits until all is as it was before.
func (n *nemesis) recover(ctx context.Context, f fault, in inflicted) error {
	if err := n.seated(); err != nil {
		return err
	}
	since := in.healed
	if in.from {
		since = in.at
	}
	keys := []int{in.key}
	if in.seat < 0 && in.key < 0 {
		keys = keys[:0]
		for k := range n.names {
			keys = append(keys, k)
		}
	}
	var last int64
	for began := time.Now(); len(keys) > 0; time.Sleep(2 * time.Millisecond) {
		keys = slices.DeleteFunc(keys, func(k int) bool {
			at := n.rec.after(k, in.seat, since)
			last = max(last, at)
			return at != 0
		})
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if time.Since(began) > n.patience {
			who := "nobody"
			if in.seat >= 0 {
				who = fmt.Sprintf("no caller of client %d", in.seat)
			}
			n.fail("stood still", in.at, fmt.Sprintf("%s was granted a key for %v", who, n.patience))
			return errStill
		}
	}
	t := n.of(f)
	t.during += n.rec.between(in.at, in.healed)
	t.recovery = append(t.recovery, time.Duration(last-since))
	t.after += n.rec.between(in.healed, hostclock.Now())
	return nil
}

// search is how long the nemesis looks for a victim.
const search = 3 * time.Second

// holder returns somebody who is about to hold for a while.
func (n *nemesis) holder() (turn, bool) {
	for began := time.Now(); time.Since(began) < search; time.Sleep(time.Millisecond) {
		holders, _ := n.rec.seen()
		for _, h := range holders {
			if h.key < keys && !n.busy[h.proc.seat] && h.plan-hostclock.Now() > int64(n.term/3) {
				n.busy[h.proc.seat] = true
				n.mark()
				return h, true
			}
		}
	}
	return turn{}, false
}

// waiter returns somebody who waits.
func (n *nemesis) waiter() (turn, bool) {
	for began := time.Now(); time.Since(began) < search; time.Sleep(time.Millisecond) {
		_, waiters := n.rec.seen()
		for _, w := range waiters {
			if w.key < keys && !n.busy[w.proc.seat] {
				n.busy[w.proc.seat] = true
				n.mark()
				return w, true
			}
		}
	}
	return turn{}, false
}

// first returns who is first in the queue of a key that somebody holds.
func (n *nemesis) first() (turn, bool) {
	for began := time.Now(); time.Since(began) < search; time.Sleep(time.Millisecond) {
		holders, waiters := n.rec.seen()
		for _, h := range holders {
			if h.key >= keys || h.plan-hostclock.Now() < int64(n.term/3) {
				continue
			}
			owner := n.store.head(n.names[h.key])
			for _, w := range waiters {
				if w.key == h.key && w.proc.String() == owner && !n.busy[w.proc.seat] && w.proc.seat != h.proc.seat {
					n.busy[w.proc.seat] = true
					n.mark()
					return w, true
				}
			}
		}
	}
	return turn{}, false
}
