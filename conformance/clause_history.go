package conformance

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

// historyClauses record simultaneous calls and their answers. porcupine checks
// whether one lock could have given the answers in some order.
var historyClauses = []clause{
	{
		name:  "history-driver",
		why:   "Simultaneous calls are linearizable: the answers fit an order of the calls in which one lock gives them.",
		says:  saysOneHolder,
		check: func(e *env) error { return e.ownDrivers().check(false) },
	},
	{
		name:  "history-locker",
		why:   "Lock, TryLock and Unlock of several Clients are linearizable, and fences grow in that order.",
		says:  saysHasp,
		check: func(e *env) error { return e.ownLockers().check(false) },
	},
	{
		name:     "history-refusals",
		why:      "ErrHeld is true: in such an order, the key was held at each refusal.",
		says:     saysGrants,
		optional: chance,
		check: func(e *env) error {
			if err := e.ownDrivers().check(true); err != nil {
				return err
			}
			return e.ownLockers().check(true)
		},
	},
}

// step is one call and its answer.
type step struct {
	op     string // "acquire", "wait", "renew" or "release"
	key    int
	client int
	hold   int  // the attempt or hold that it is about, from 1
	yes    bool // granted, renewed, released; else ErrHeld or ErrLost
	fence  uint64
	maybe  bool // a refusal that another call of the same Client explains
}

func (s step) String() string {
	answer := map[bool]string{true: "yes", false: "no"}[s.yes]
	return fmt.Sprintf("client %d: %s #%d of key %d: %s, fence %d", s.client, s.op, s.hold, s.key, answer, s.fence)
}

// lockState is the state of one lock: its token, and the largest fence so far.
type lockState struct {
	hold  int // 0: nobody
	fence uint64
}

// after returns the state after s, and whether a lock in state l gives that answer.
func (l lockState) after(s step, strict bool) (lockState, bool) {
	switch {
	case (s.op == "acquire" || s.op == "wait") && s.yes:
		next := lockState{s.hold, max(l.fence, s.fence)}
		return next, l.hold == 0 && (s.fence == 0 || s.fence > l.fence)
	case s.op == "acquire":
		return l, l.hold != 0 || s.maybe || !strict
	case s.yes && s.op == "release":
		return lockState{0, l.fence}, l.hold == s.hold
	case s.yes:
		return l, l.hold == s.hold
	}
	return l, l.hold != s.hold
}

// model is a set of locks, by key.
func model(strict bool) porcupine.Model {
	return porcupine.Model{
		Partition: func(all []porcupine.Operation) [][]porcupine.Operation {
			byKey := map[int][]porcupine.Operation{}
			for _, op := range all {
				k := op.Input.(step).key
				byKey[k] = append(byKey[k], op)
			}
			var parts [][]porcupine.Operation
			for _, ops := range byKey {
				parts = append(parts, ops)
			}
			return parts
		},
		Init: func() any { return lockState{} },
		Step: func(state, input, _ any) (bool, any) {
			next, ok := state.(lockState).after(input.(step), strict)
			return ok, next
		},
	}
}

// history is a record of calls. Its clock is a counter that every call reads before
// it begins and after it has ended. So no two events have the same time.
type history struct {
	e      *env
	fenced bool          // every second hold has a fence
	keep   time.Duration // how long a lease is kept at most
	clock  atomic.Int64
	holds  atomic.Int64
	mu     sync.Mutex // guards ops
	ops    []porcupine.Operation
}

// record makes one call and records its outcome.
func (h *history) record(s step, f func(s *step) error) (step, error) {
	called := h.clock.Add(1)
	err := f(&s)
	returned := h.clock.Add(1)
	if err != nil {
		return s, fmt.Errorf("%s of many at once: %w", s.op, err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.ops = append(h.ops, porcupine.Operation{ClientId: s.client, Input: s, Call: called, Return: returned})
	return s, nil
}

// answered sets the outcome of a call by its error.
func answered(s *step, err, refusal error) error {
	if s.yes = err == nil; s.yes || errors.Is(err, refusal) {
		return nil
	}
	return err
}

func (h *history) check(strict bool) error {
	if porcupine.CheckOperationsTimeout(model(strict), h.ops, patience) != porcupine.Illegal {
		return nil
	}
	slices.SortFunc(h.ops, func(a, b porcupine.Operation) int { return int(a.Call - b.Call) })
	var b strings.Builder
	for _, part := range model(strict).Partition(h.ops) {
		if porcupine.CheckOperationsTimeout(model(strict), part, patience) != porcupine.Illegal {
			continue
		}
		for _, op := range part[:min(len(part), 100)] {
			fmt.Fprintf(&b, "\n  %d to %d: %v", op.Call, op.Return, op.Input)
		}
		break
	}
	return fmt.Errorf("no order of these calls explains their answers:%s", b.String())
}

func (e *env) ownDrivers() *history {
	return e.driverHistory([]*driver{e.open(), e.open(), e.open()}, e.traits.Fenced)
}

func (e *env) ownLockers() *history {
	return e.lockerHistory([]*hasp.Client{e.newClient(), e.newClient(), e.newClient()}, e.traits.Fenced, 0)
}

// driverHistory records goroutines that use drivers on two keys.
func (e *env) driverHistory(drivers []*driver, fenced bool) *history {
	h := &history{e: e, fenced: fenced}
	keys := []string{e.key(), e.key()}
	must(e.each(6, func(i int) error {
		w := &worker{h: h, d: drivers[i%len(drivers)], client: i % len(drivers), keys: keys}
		for range 25 {
			if err := w.round(); err != nil {
				return err
			}
		}
		return nil
	}))
	return h
}

// worker is one goroutine of a driverHistory.
type worker struct {
	h      *history
	d      *driver
	client int
	keys   []string
}

func (w *worker) round() error {
	k := rand.N(len(w.keys))
	c := w.h.e.claimOf(w.keys[k], w.h.e.h.Long)
	c.Fenced = w.h.fenced && rand.N(2) == 0
	s := step{op: "acquire", key: k, client: w.client, hold: int(w.h.holds.Add(1))}
	_, err := w.h.record(s, func(s *step) error {
		g, err := w.d.acquire(c)
		s.fence = g.Fence
		return answered(s, err, backend.ErrHeld)
	})
	if err != nil {
		return err
	}
	// The second round of these is by a token that holds nothing any more; if
	// the key was refused, the first is, too.
	for _, op := range []string{"renew", "release", "renew", "release"}[rand.N(2):] {
		s.op, s.fence = op, 0
		_, err := w.h.record(s, func(s *step) error {
			var err error
			if op == "renew" {
				_, err = w.d.renew(c)
			} else {
				err = w.d.release(c)
			}
			return answered(s, err, backend.ErrLost)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// lockerHistory records goroutines that use Clients on two keys.
func (e *env) lockerHistory(clients []*hasp.Client, fenced bool, keep time.Duration) *history {
	h := &history{e: e, fenced: fenced, keep: keep}
	keys := []string{e.key(), e.key()}
	began := time.Now()
	must(e.each(9, func(i int) error {
		for n := 0; n < 20 && time.Since(began) < 3*time.Second; n++ {
			if err := h.lockOnce(clients[i%len(clients)], i%len(clients), keys); err != nil {
				return err
			}
		}
		return nil
	}))
	h.explain()
	return h
}

func (h *history) lockOnce(c *hasp.Client, client int, keys []string) error {
	k := rand.N(len(keys))
	var opts []hasp.Option
	if h.fenced && rand.N(2) == 0 {
		opts = append(opts, hasp.WithFence())
	}
	s := step{op: "acquire", key: k, client: client, hold: int(h.holds.Add(1))}
	lock := c.TryLock
	if rand.N(3) == 0 {
		s.op, lock = "wait", c.Lock
	}
	var lease *hasp.Lease
	got, err := h.record(s, func(s *step) (err error) {
		if lease, err = lock(h.e.ctx, keys[k], opts...); err == nil {
			s.fence = lease.Fence()
		} else if s.op == "wait" {
			return err
		}
		return answered(s, err, hasp.ErrHeld)
	})
	if err != nil || !got.yes {
		return err
	}
	if h.keep > 0 {
		h.e.sleep(rand.N(h.keep))
	}
	s.op = "release"
	_, err = h.record(s, func(s *step) error { return answered(s, lease.Unlock(h.e.ctx), hasp.ErrLost) })
	return err
}

// explain marks refusals that are right although no token holds the key. TryLock
// returns ErrHeld while another caller of its Client acquires or releases the key.
// An ordered driver returns ErrHeld while any caller waits.
func (h *history) explain() {
	for i := range h.ops {
		s := h.ops[i].Input.(step)
		if s.op != "acquire" || s.yes {
			continue
		}
		for j, other := range h.ops {
			o := other.Input.(step)
			overlap := i != j && o.key == s.key && other.Call < h.ops[i].Return && h.ops[i].Call < other.Return
			if overlap && (o.client == s.client || h.e.traits.Ordered && o.op == "wait") {
				s.maybe = true
			}
		}
		h.ops[i].Input = s
	}
}
