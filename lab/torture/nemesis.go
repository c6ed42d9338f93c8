package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/hasplock/hasp/internal/clock"
)

// inject is a function that starts a fault. It returns nil if it found no victim.
type inject func(n *nemesis) *injection

// injection is a fault that was injected. Recovery is the time until all awaited grants have come.
type injection struct {
	heal   func() // may be nil
	from   bool   // recovery counts from the beginning of the fault, not from its end
	awaits []awaited

	at, healed int64 // when the fault began, and when it was healed
}

// awaited is a grant that must come: of a key, to a client. If the key or the seat is negative, it
// may be any key or the client of any seat.
type awaited struct{ key, seat int }

// ofAll is the injection of a fault after which each key must be granted.
func ofAll(heal func()) *injection {
	in := &injection{heal: heal}
	for k := range slotted + slots {
		if contended(k) {
			in.awaits = append(in.awaits, awaited{k, -1})
		}
	}
	return in
}

// ofKey returns the injection of a fault after which a key must be granted.
func ofKey(key int, heal func()) *injection {
	return &injection{heal: heal, awaits: []awaited{{key, -1}}}
}

// ofSeat returns the injection of a fault after whose end the client in that seat must lock a key.
func ofSeat(seat int, heal func()) *injection {
	return &injection{heal: heal, awaits: []awaited{{-1, seat}}}
}

// nemesis injects faults one after another. The seed decides their choice and their length.
type nemesis struct {
	*run
	rand    *rand.Rand
	busy    map[int]bool  // seats that a fault affects now
	losses  [][2]int64    // when the store may have lost locks
	thinned [][2]int64    // when a minority may have lost locks; then a lease may end early, but no other caller gets the key
	count   int           // the number of injected faults
	lasts   time.Duration // length of the current fault
	at      int64         // when the current fault was injected
	found   found         // what the check found in the history
}

// torture injects faults until the time end, or until ctx ends.
func (n *nemesis) torture(ctx context.Context, end time.Time) {
	for plan, strikes := n.rand, uint64(0); ; {
		for _, i := range plan.Perm(len(n.faults)) {
			// Each strike has its own generator of random numbers. So if a strike finds no victim,
			// the rest of the plan does not change.
			strikes++
			n.rand = rand.New(rand.NewPCG(n.seed, strikes))
			if ctx.Err() != nil || !time.Now().Before(end) {
				return
			}

			f, extra := n.faults[i], (*fault)(nil)
			if n.rand.IntN(6) == 0 {
				extra = n.faults[n.rand.IntN(len(n.faults))]
			}
			if extra != nil && (extra.class == f.class || f.class == alone) {
				extra = nil
			}
			n.strike(ctx, f, extra)
		}
	}
}

// strike injects the fault f. If the fault extra is not nil, strike injects that fault as well,
// while f lasts. It heals both faults, and waits until keys are granted again.
func (n *nemesis) strike(ctx context.Context, f, extra *fault) {
	n.lasts = n.span(f.least, f.most)
	lasts := n.lasts
	time.Sleep(time.Duration(20+n.rand.IntN(130)) * time.Millisecond)
	first := n.inflict(f)
	if first == nil {
		return
	}
	time.Sleep(lasts / 2)

	var second *injection
	if extra != nil {
		n.lasts = n.span(extra.least, extra.most)
		second = n.inflict(extra)
	}
	if second != nil {
		time.Sleep(n.lasts)
		n.heal(extra, second)
	}

	time.Sleep(lasts / 2)
	n.heal(f, first)

	// Wait until the servers work again, because the second fault may have delayed them. This wait
	// does not count as recovery of the clients.
	if n.store.ready != nil {
		n.Check(n.store.ready())
	}
	if second != nil {
		n.recover(ctx, extra, second)
	}
	n.recover(ctx, f, first)
}

func (n *nemesis) span(least, most float64) time.Duration {
	return time.Duration((least + n.rand.Float64()*(most-least)) * float64(n.term))
}

// inflict injects a fault. It returns nil if there was no victim.
func (n *nemesis) inflict(f *fault) *injection {
	n.mark()
	in := f.inject(n)
	if in != nil {
		in.at = n.at
		f.at = append(f.at, in.at)
		n.count++
	}
	return in
}

// mark sets the time of the injection to now. A fault that searches for a victim calls mark again
// when it has found a victim.
func (n *nemesis) mark() { n.at = clock.Now() }

// heal ends a fault, and notes when this fault may have caused the loss of locks.
func (n *nemesis) heal(f *fault, in *injection) {
	if in.heal != nil {
		in.heal()
	}
	in.healed = clock.Now()
	clear(n.busy)

	span := [2]int64{in.at, in.healed}
	if n.losing {
		n.losses = append(n.losses, span)
		n.write("", report{What: lossy, T: in.at, End: in.healed})
	}
	if f.thins {
		n.thinned = append(n.thinned, span)
		n.write("", report{What: thinned, T: in.at, End: in.healed})
	}
}

// recover waits until the processes run and the keys are granted again.
func (n *nemesis) recover(ctx context.Context, f *fault, in *injection) {
	n.seated()
	since := in.healed
	if in.from {
		since = in.at
	}
	f.recovery = append(f.recovery, n.await(ctx, in.awaits, since))
}

// await waits until all the grants have come later than at since, and returns how much later the
// last of them came.
func (n *nemesis) await(ctx context.Context, grants []awaited, since int64) time.Duration {
	var last int64
	granted := repeatUntil(n.patience, 2*time.Millisecond, func() bool {
		n.Check(ctx.Err())
		grants = slices.DeleteFunc(grants, func(g awaited) bool {
			at := n.rec.after(g.key, g.seat, since)
			last = max(last, at)
			return at != 0
		})
		return len(grants) == 0
	})
	if !granted {
		who := "no caller"
		if seat := grants[0].seat; seat >= 0 {
			who = fmt.Sprintf("no caller of client %d", seat)
		}
		n.fail("stood still", since, fmt.Sprintf("%s was granted %s for %v; %s", who, title(grants[0].key), n.patience, n.rec.unfinished()))
		n.Check(errStill)
	}
	return time.Duration(last - since)
}

// everyone waits, after the last fault, until the client of each seat has a key again.
func (n *nemesis) everyone() {
	n.seated()
	var all []awaited
	for seat := range n.seats {
		all = append(all, awaited{-1, seat})
	}
	n.await(context.Background(), all, clock.Now())
}

// search is the time limit of the nemesis for finding a victim.
const search = 3 * time.Second

// find returns a victim that no fault affects now, or nil if there is no such victim.
func (n *nemesis) find(who victims) (found *lockCall) {
	repeatUntil(search, time.Millisecond, func() bool {
		for _, t := range who(n) {
			if !n.busy[t.proc.seat] {
				n.busy[t.proc.seat] = true
				n.mark()
				found = &t
				return true
			}
		}
		return false
	})
	return found
}

// victims returns the turns that a fault may disturb, the best first.
type victims func(n *nemesis) []lockCall

// holders returns the callers that will hold their keys for a while.
func holders(n *nemesis) []lockCall {
	all, _ := n.rec.seen()
	return slices.DeleteFunc(all, func(h lockCall) bool {
		return !contended(h.key) || h.plan-clock.Now() <= int64(n.term/3)
	})
}

func waiters(n *nemesis) []lockCall {
	_, all := n.rec.seen()
	return slices.DeleteFunc(all, func(w lockCall) bool { return !contended(w.key) })
}

// mortal leaves out victims whose process is never killed.
func mortal(who victims) victims {
	return func(n *nemesis) []lockCall {
		return slices.DeleteFunc(who(n), func(t lockCall) bool { return t.proc.seat == spared })
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
