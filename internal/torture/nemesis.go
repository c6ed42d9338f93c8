package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/hasplock/hasp/internal/hostclock"
)

// fault is a kind of failure.
type fault struct {
	name        string
	class       string  // two faults at once have different classes
	loses       bool    // the store loses locks, so that exclusion is not promised
	thins       bool    // a minority loses locks; a lease that only a quorum had may be lost
	least, most float64 // the length, in terms
	inject      func(n *nemesis) (injection, bool)
}

// injection is a fault that was injected. Recovery is the time until a key is
// granted again.
type injection struct {
	heal func() error // may be nil
	from bool         // recovery counts from the begin of the fault, not from its end
	key  int          // the key that must be granted; if negative, each key
	seat int          // the seat whose client must get a key; if negative, any client
}

// Classes of faults.
const (
	process = "process"
	link    = "link"
	server  = "server"
)

// nemesis injects faults one after another. The seed decides which faults, and
// how long they last.
type nemesis struct {
	*run
	rand    *rand.Rand
	busy    map[int]bool      // seats that a fault affects now
	tally   map[string]*tally // by fault
	losses  [][2]int64        // when the store may have lost locks
	thinned [][2]int64        // when a minority may have lost locks: a lease may end early, but no other caller gets the key
	count   int               // of injected faults
	lasts   time.Duration     // length of the current fault
	at      int64             // when the current fault was injected
}

// tally counts one kind of fault.
type tally struct {
	recovery []time.Duration
	at       []int64 // when the fault was injected
}

// torture injects faults until the time is up.
func (n *nemesis) torture(ctx context.Context, until time.Time) error {
	for plan, strikes := n.rand, uint64(0); ; {
		for _, i := range plan.Perm(len(n.faults)) {
			// Each strike has a generator of its own. So if a strike finds no victim,
			// the rest of the plan does not change.
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

// strike injects a fault, and with as well if it is not nil, while the first
// lasts. It heals both and waits until keys are granted again.
func (n *nemesis) strike(ctx context.Context, f fault, with *fault) error {
	n.lasts = n.span(f.least, f.most)
	lasts := n.lasts
	time.Sleep(time.Duration(20+n.rand.IntN(130)) * time.Millisecond)
	in, ok := n.inflict(f)
	if !ok {
		return nil
	}
	time.Sleep(lasts / 2)

	var second inflicted
	if with != nil && with.inject != nil {
		n.lasts = n.span(with.least, with.most)
		if second, ok = n.inflict(*with); ok {
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
	n.noteLoss(f, in)
	if second.heal != nil {
		n.noteLoss(*with, second)
		if err := n.recover(ctx, *with, second); err != nil {
			return err
		}
	}
	return n.recover(ctx, f, in)
}

func (n *nemesis) span(least, most float64) time.Duration {
	return time.Duration((least + n.rand.Float64()*(most-least)) * float64(n.term))
}

// inflicted is an injection with the times when it was injected and healed.
type inflicted struct {
	injection
	at, healed int64
}

// inflict injects a fault. It reports whether there was a victim.
func (n *nemesis) inflict(f fault) (in inflicted, ok bool) {
	n.mark()
	if in.injection, ok = f.inject(n); !ok {
		return in, false
	}
	in.at = n.at
	if in.injection.heal == nil {
		in.injection.heal = func() error { return nil }
	}
	n.count++
	t := n.of(f)
	t.at = append(t.at, in.at)
	return in, true
}

// mark sets the time of the injection. A fault that searches for a victim calls
// it again when it has found one.
func (n *nemesis) mark() { n.at = hostclock.Now() }

func (n *nemesis) heal(in *inflicted) error {
	err := in.injection.heal()
	in.healed = hostclock.Now()
	clear(n.busy)
	return err
}

// noteLoss notes when a fault may have lost locks.
func (n *nemesis) noteLoss(f fault, in inflicted) {
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

// recover waits until the processes run and the keys are granted again.
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
			text := "no caller"
			if in.seat >= 0 {
				text = fmt.Sprintf("no caller of client %d", in.seat)
			}
			n.fail("stood still", in.at, fmt.Sprintf("%s was granted a key for %v", text, n.patience))
			return errStill
		}
	}
	t := n.of(f)
	t.recovery = append(t.recovery, time.Duration(last-since))
	return nil
}

// search is how long the nemesis searches for a victim.
const search = 3 * time.Second

// victim is a function that searches for a turn to disturb.
type victim func(*nemesis) (turn, bool)

// take makes a turn's process the victim.
func (n *nemesis) take(t turn) (turn, bool) {
	n.busy[t.proc.seat] = true
	n.mark()
	return t, true
}

// holder returns a holder that will hold its key for a while.
func (n *nemesis) holder() (turn, bool) {
	for began := time.Now(); time.Since(began) < search; time.Sleep(time.Millisecond) {
		holders, _ := n.rec.seen()
		for _, h := range holders {
			if h.key < keys && !n.busy[h.proc.seat] && h.plan-hostclock.Now() > int64(n.term/3) {
				return n.take(h)
			}
		}
	}
	return turn{}, false
}

// waiter returns a caller that waits.
func (n *nemesis) waiter() (turn, bool) {
	for began := time.Now(); time.Since(began) < search; time.Sleep(time.Millisecond) {
		_, waiters := n.rec.seen()
		for _, w := range waiters {
			if w.key < keys && !n.busy[w.proc.seat] {
				return n.take(w)
			}
		}
	}
	return turn{}, false
}

// first returns the first waiter in the queue of a key that is held.
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
					return n.take(w)
				}
			}
		}
	}
	return turn{}, false
}
