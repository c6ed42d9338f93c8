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

// historyClauses record calls that overlap, and their answers. Then porcupine searches for an order
// of the calls in which one lock would have given these answers.
var historyClauses = []clause{
	{name: "history-driver", says: saysOneHolder, check: func(e *env) { must(e.history().byDrivers(e.drivers()).check(false)) },
		why: "Simultaneous calls are linearizable: the answers fit an order of the calls in which one lock gives them."},
	{name: "history-locker", says: saysHasp, check: func(e *env) { must(e.history().byClients(e.clients()).check(false)) },
		why: "Lock, TryLock and Unlock of several Clients are linearizable, and fences grow in that order."},
	{name: "history-shared", need: shares, says: saysTogether, check: historyShared,
		why: "Simultaneous shared calls and others are linearizable as one lock with readers and writers."},
	{name: "history-refusals", optional: chance, says: saysGrants, check: historyRefusals,
		why: "ErrHeld is true: in such an order, the key was held at each refusal."},
}

func historyRefusals(e *env) {
	must(e.history().byDrivers(e.drivers()).check(true))
	must(e.history().byClients(e.clients()).check(true))
}

func historyShared(e *env) {
	for range 3 { // several rounds, because a writer rarely finds the key free
		h := e.history()
		h.shared = true
		must(h.byDrivers(e.drivers()).check(false))
	}
	h := e.history()
	h.shared, h.keep = true, 4*time.Millisecond
	must(h.byClients(e.clients()).check(false))
}

// step is one call and its answer.
type step struct {
	op     string // "acquire", "wait", "renew" or "release"
	key    int
	client int
	hold   int  // the attempt's number, from 1; its hold has the same number
	yes    bool // granted, renewed or released; false: ErrHeld or ErrLost
	fence  uint64
	shared bool
	maybe  bool // a refusal that another call may explain; see annotate
	twin   bool // overlaps another shared attempt with the same fence; see annotate
}

func (s step) String() string {
	answer := map[bool]string{true: "yes", false: "no"}[s.yes]
	how := map[bool]string{true: " shared"}[s.shared]
	return fmt.Sprintf("client %d:%s %s #%d of key %d: %s, fence %d", s.client, how, s.op, s.hold, s.key, answer, s.fence)
}

// lockState is the state of one lock: its holders, and the largest fence so far.
type lockState struct {
	hold    int // the exclusive hold; 0 if there is none
	readers readers
	fence   uint64
}

// readers is a set of shared holds, with one bit for each hold. It is an array, because porcupine
// compares states.
type readers [maxHolds/64 + 1]uint64

// maxHolds is the largest hold number in a history.
const maxHolds = 255

func (r readers) has(hold int) bool { return r[hold/64]>>(hold%64)&1 == 1 }

// change adds hold to r, or removes it if r contains it.
func (r readers) change(hold int) readers {
	r[hold/64] ^= 1 << (hold % 64)
	return r
}

// after returns the state after step s. It reports whether a lock in state l could give the answer
// of s. A refusal of a free key is wrong only if strict is set.
func (l lockState) after(s step, strict bool) (lockState, bool) {
	free := l.hold == 0 && (s.shared || l.readers == readers{})
	holds := l.hold == s.hold || l.readers.has(s.hold)
	next := l
	switch {
	case (s.op == "acquire" || s.op == "wait") && s.yes:
		next.fence = max(l.fence, s.fence)
		return next.change(s), free && (s.fence == 0 || s.fence > l.fence || s.twin && s.fence == l.fence)
	case s.op == "acquire":
		return l, !free || s.maybe || !strict
	case s.yes && s.op == "release":
		return next.change(s), holds
	case s.yes:
		return l, holds
	}
	return l, !holds
}

// change adds the hold of s to l, or removes it if l contains it.
func (l lockState) change(s step) lockState {
	switch {
	case s.shared:
		l.readers = l.readers.change(s.hold)
	case l.hold == 0:
		l.hold = s.hold
	default:
		l.hold = 0
	}
	return l
}

// model describes one lock for porcupine.
func model(strict bool) porcupine.Model {
	return porcupine.Model{
		Init: func() any { return lockState{} },
		Step: func(state, input, _ any) (bool, any) {
			next, ok := state.(lockState).after(input.(step), strict)
			return ok, next
		},
	}
}

// history is a record of calls. Its clock counts up when a call begins and when a call ends, so no
// two events have the same time.
type history struct {
	e         *env
	fenced    bool          // half of the attempts ask for a fence
	shared    bool          // half of the attempts are shared
	keep      time.Duration // the longest time between Lock and Unlock
	ofClients bool
	clock     atomic.Int64
	holds     atomic.Int64
	mu        sync.Mutex // guards ops
	ops       []porcupine.Operation
}

// record calls f and records its answer. The answer is yes if f returns no error, and no if it
// returns refusal. Any other error ends the try.
func (h *history) record(s step, refusal error, f func() (fence uint64, err error)) step {
	called := h.clock.Add(1)
	fence, err := f()
	returned := h.clock.Add(1)
	s.fence, s.yes = fence, err == nil
	if !errors.Is(err, refusal) {
		mustf(err, "%s of many at once", s.op)
	}

	h.mu.Lock()
	defer h.mu.Unlock()
	h.ops = append(h.ops, porcupine.Operation{ClientId: s.client, Input: s, Call: called, Return: returned})
	return s
}

// check returns an error unless the answers fit some order of the calls. If strict is set, the
// order must also explain each ErrHeld.
func (h *history) check(strict bool) error {
	h.annotate()
	byKey := map[int][]porcupine.Operation{}
	for _, op := range h.ops {
		key := op.Input.(step).key
		byKey[key] = append(byKey[key], op)
	}

	for _, ops := range byKey {
		if porcupine.CheckOperationsTimeout(model(strict), ops, 20*time.Second) != porcupine.Illegal {
			continue
		}
		slices.SortFunc(ops, func(a, b porcupine.Operation) int { return int(a.Call - b.Call) })
		var b strings.Builder
		for _, op := range ops[:min(len(ops), 100)] {
			fmt.Fprintf(&b, "\n  %d to %d: %v", op.Call, op.Return, op.Input)
		}
		return fmt.Errorf("no order of these calls explains their answers:%s", b.String())
	}
	return nil
}

func (e *env) history() *history { return &history{e: e, fenced: e.traits.Fenced} }

// byDrivers records calls of drivers for two keys, by several goroutines.
func (h *history) byDrivers(drivers []*driver) *history {
	e := h.e
	keys := []string{e.key(), e.key()}
	must(e.each(6, func(i int) {
		for range 25 {
			h.useDriver(drivers[i%len(drivers)], i%len(drivers), keys)
		}
	}))
	return h
}

func (h *history) useDriver(d *driver, client int, keys []string) {
	k := rand.N(len(keys))
	c := h.e.claimOf(keys[k], h.e.long)
	c.Fenced = h.fenced && rand.N(2) == 0
	c.Shared = h.shared && rand.N(2) == 0
	s := step{op: "acquire", key: k, client: client, hold: int(h.holds.Add(1)), shared: c.Shared}
	h.record(s, backend.ErrHeld, func() (uint64, error) {
		g, err := d.acquire(c)
		return g.Fence, err
	})

	// All calls after the first release must return ErrLost. If the attempt was refused, even the
	// first of these calls must.
	for _, op := range []string{"renew", "release", "renew", "release"}[rand.N(2):] {
		use := d.renews
		if op == "release" {
			use = d.release
		}
		s.op = op
		h.record(s, backend.ErrLost, func() (uint64, error) { return 0, use(c) })
	}
}

// byClients records calls of Clients for two keys, by several goroutines.
func (h *history) byClients(clients []*hasp.Client) *history {
	e := h.e
	h.ofClients = true
	keys := []string{e.key(), e.key()}
	began := time.Now()
	must(e.each(9, func(i int) {
		for n := 0; n < 20 && time.Since(began) < 3*time.Second; n++ {
			h.useClient(clients[i%len(clients)], i%len(clients), keys)
		}
	}))
	return h
}

func (h *history) useClient(c *hasp.Client, client int, keys []string) {
	k := rand.N(len(keys))
	var opts []hasp.Option
	if h.fenced && rand.N(2) == 0 {
		opts = append(opts, hasp.WithFence())
	}
	s := step{op: "acquire", key: k, client: client, hold: int(h.holds.Add(1)), shared: h.shared && rand.N(2) == 0}
	if s.shared {
		opts = append(opts, hasp.WithShared())
	}
	lock, refusal := c.TryLock, hasp.ErrHeld
	if rand.N(3) == 0 {
		s.op, lock, refusal = "wait", c.Lock, nil
	}

	var lease *hasp.Lease
	got := h.record(s, refusal, func() (fence uint64, err error) {
		if lease, err = lock(h.e.ctx, keys[k], opts...); err == nil {
			fence = lease.Fence()
		}
		return fence, err
	})

	if !got.yes {
		return
	}
	if h.keep > 0 {
		h.e.sleep(rand.N(h.keep))
	}
	s.op = "release"
	h.record(s, hasp.ErrLost, func() (uint64, error) { return 0, lease.Unlock(h.e.ctx) })
}

// overlap returns the operations on the same key that overlap operation i.
func (h *history) overlap(i int) (all []step) {
	for j, other := range h.ops {
		if i != j && other.Input.(step).key == h.ops[i].Input.(step).key && other.Call < h.ops[i].Return && h.ops[i].Call < other.Return {
			all = append(all, other.Input.(step))
		}
	}
	return all
}

// annotate sets twin and maybe. With redlock, two shared holds that begin at the same moment may
// have the same fence: these are twins. A refusal of a TryLock gets maybe, because TryLock may
// return ErrHeld for a free key: while another caller of its Client acquires or releases the key,
// and with an ordered driver while any caller waits.
func (h *history) annotate() {
	for i := range h.ops {
		s := h.ops[i].Input.(step)
		for _, o := range h.overlap(i) {
			s.twin = s.twin || s.shared && o.shared && s.fence != 0 && o.fence == s.fence
			s.maybe = s.maybe || h.ofClients && s.op == "acquire" && !s.yes &&
				(o.client == s.client || h.e.traits.Ordered && o.op == "wait")
		}
		h.ops[i].Input = s
	}
}
