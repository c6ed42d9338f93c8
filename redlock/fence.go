package redlock

import (
	"context"
	"fmt"
	"slices"
	"strconv"

	"github.com/hasplock/hasp/internal/redisstore"
)

// A fence is the largest proposal of the nodes that voted for the holder. Before the
// holder is granted the key, a quorum of nodes stores the fence, and each of them
// has the holder's record. Any two majorities share a node. The next holder's
// record reaches that node after this record has ended. So the next holder's fence
// is larger.
//
// A node without the record does not count. It may already have voted for the next
// holder, whose vote on another node is in flight. Then it has made its proposal
// before this fence was written.
//
// A renewal also writes the fence to every node. So nodes that lose their data one
// after another, during a long hold, do not forget the fence.

// maxFence is the largest fence that a node may propose. Above it Lua cannot count
// in steps of one, so all nodes would propose the same number from then on.
const maxFence = 1 << 53

// noFence is the error of a node whose fence counter has a value that is not a
// number. hasp never overwrites it.
func (n *node) noFence(counter string) error {
	return fmt.Errorf("%s: the value of %q is no fence counter; remove it, so that hasp can begin a new one", n.name, counter)
}

// raiseFence writes the fence of a to a quorum of the nodes that have the record of
// a, and returns the fence.
func (a *attempt) raiseFence(ctx context.Context) (uint64, error) {
	d := a.d
	d.mu.Lock()
	// A node settles before its vote is cast, so the proposals of the quorum are here.
	// Later proposals do not matter.
	fence := slices.Max(a.proposals)
	a.fence = fence // from here on, renewals write it to all nodes
	d.mu.Unlock()

	b := newBallot(d.nodes, holdRule)
	for _, n := range d.nodes {
		if !d.spawn(func() {
			// Wait for a vote in flight: the fence counts on the node only if its record
			// is there.
			<-d.settled(a, n.i)
			v, err := n.raiseFence(a, fence)
			b.cast(n.i, v, err)
		}) {
			// Close has begun. A fence on some nodes does no harm.
			return 0, errClosed
		}
	}

	select {
	case <-b.done:
	case <-ctx.Done():
		// The nodes that were asked may still store the fence, which does no harm.
		b.decide(abandoned)
		return 0, ctx.Err()
	}
	return fence, b.err()
}

// raiseFence writes a fence to the node. It returns yes only if the node has the
// record of a.
func (n *node) raiseFence(a *attempt, fence uint64) (vote, error) {
	if err := n.admit(); err != nil {
		return failed, err
	}

	// The caller's context does not end the call: a fence may be stored after the
	// caller has left, because counters only grow.
	ctx, cancel := context.WithTimeout(context.Background(), a.c.Timeout)
	defer cancel()

	counter := redisstore.DerivedKey("fence", a.c.Key)
	call := redisstore.Call{
		Keys: []string{counter, a.lockKey, markKey},
		Args: []any{a.prefix, strconv.FormatUint(fence, 10), redisstore.Millis(n.d.fenceTTL)},
	}
	if a.c.Shared {
		call.Args = append(call.Args, a.record)
	}
	reply, err := n.store.Run(ctx, raiseScript, call)
	if err != nil {
		return failed, n.nodeError(err, a.c.Timeout)
	}
	switch parts, _ := reply.([]any); {
	case len(parts) == 1 && parts[0] == int64(-1):
		return failed, n.noFence(counter)
	case len(parts) != 2:
		return failed, n.store.Unexpected(reply)
	case n.isOfAnotherRun(parts[1]):
		return failed, n.anotherRun()
	case parts[0] == int64(1):
		return yes, nil
	}
	return failed, fmt.Errorf("%s: does not have the lock, so the fence there does not count", n.name)
}
