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

// historyClauses record simultaneous calls and their answers. porcupine checks whether there is an
// order of the calls in which one lock would have given these answers.
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
	for range 3 { // writers find the key free in few rounds
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
	hold   int  // number of the attempt, and of its hold, from 1
	yes    bool // granted, renewed, released; else ErrHeld or ErrLost
	fence  uint64
	shared bool // the hold is shared
	maybe  bool // a refusal that another call of the same Client explains
	twin   bool // has the fence of another shared hold, which began at the same moment
}

func (s step) String() string {
	answer := map[bool]string{true: "yes", false: "no"}[s.yes]
	how := map[bool]string{true: " shared"}[s.shared]
	return fmt.Sprintf("client %d:%s %s #%d of key %d: %s, fence %d", s.client, how, s.op, s.hold, s.key, answer, s.fence)
}

// lockState is the state of one lock: its holders, and the largest fence so far.
type lockState struct {
	hold    int // 0: none, or shared
	readers readers
	fence   uint64
}

// readers is a set of shared holds, one bit each. States are compared, so it is an array.
type readers [maxHolds/64 + 1]uint64

// maxHolds is the largest number of a hold in a history.
const maxHolds = 255

func (r readers) has(hold int) bool { return r[hold/64]>>(hold%64)&1 == 1 }

// change returns r with hold if it was without, and the reverse.
func (r readers) change(hold int) readers {
	r[hold/64] ^= 1 << (hold % 64)
	return r
}

// after returns the state after s, and whether a lock in state l would give the answer of s.
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

// change returns l after the begin or the end of the hold of s.
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

// model is a lock.
func model(strict bool) porcupine.Model {
	return porcupine.Model{
		Init: func() any { return lockState{} },
		Step: func(state, input, _ any) (bool, any) {
			next, ok := state.(lockState).after(input.(step), strict)
			return ok, next
		},
	}
}

// history is a record of calls. Its clock is a counter that grows at the begin and the end of each
// call, so no two events have the same time.
type history struct {
	e         *env
	fenced    bool          // every second hold has a fence
	shared    bool          // every second hold is shared
	keep      time.Duration // how long a lease is kept at most
	ofClients bool
	clock     atomic.Int64
	holds     atomic.Int64
	mu        sync.Mutex // guards ops
	ops       []porcupine.Operation
}

// record makes one call and records its answer: yes if there is no error, and no if the error is
// refusal. Any other error ends the try.
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

// check returns an error unless the answers fit some order of the calls. If strict, refusals must
// fit as well.
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

// history returns a new history of the driver under test.
func (e *env) history() *history { return &history{e: e, fenced: e.traits.Fenced} }

// byDrivers records goroutines that use drivers on two keys.
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

// useDriver makes one attempt, and uses the hold.
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

	// After the first release, the token holds nothing. If the attempt was refused, the token never
	// held anything. So later calls must return ErrLost.
	for _, op := range []string{"renew", "release", "renew", "release"}[rand.N(2):] {
		use := d.renews
		if op == "release" {
			use = d.release
		}
		s.op = op
		h.record(s, backend.ErrLost, func() (uint64, error) { return 0, use(c) })
	}
}

// byClients records goroutines that use Clients on two keys.
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

// useClient locks a key by Lock or TryLock, and unlocks it.
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

// overlap returns the operations on the key of operation i that overlap it.
func (h *history) overlap(i int) (all []step) {
	for j, other := range h.ops {
		if i != j && other.Input.(step).key == h.ops[i].Input.(step).key && other.Call < h.ops[i].Return && h.ops[i].Call < other.Return {
			all = append(all, other.Input.(step))
		}
	}
	return all
}

// annotate marks two kinds of steps. Twins are shared holds that begin at the same moment, which
// may have the same fence with redlock. A refusal by a Client may be right although no token holds
// the key: TryLock returns ErrHeld while another caller of its Client acquires or releases the key,
// and an ordered driver returns ErrHeld while any caller waits.
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
