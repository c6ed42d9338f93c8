package redlock

import (
	"context"
	"fmt"

	"github.com/hasplock/hasp/internal/redisstore"
)

// A fence is the largest proposal of the nodes that voted for the holder. Before the key is
// granted, a quorum of nodes that have the holder's record must store the fence. A node without the
// record does not count: it may have voted for the next holder, and made its proposal, before this
// fence was written. A renewal writes the fence to every node again, so that it is not forgotten
// even if nodes lose their data one after another during a long hold. See docs/redlock.md.

// maxFence is the largest fence that a node may propose. Above it Lua cannot count
// in steps of one, so all nodes would propose the same number from then on.
const maxFence = 1 << 53

// noFence returns the error of a node whose fence counter has a value that is not a
// number. hasp never overwrites such a value.
func (n *node) noFence(key string) error {
	return fmt.Errorf("%s: the value of %q is no fence counter; remove it, so that hasp can begin a new one", n.name, redisstore.DerivedKey("fence", key))
}

// raiseFence writes the fence of a to a quorum of the nodes that have the record of
// a, and returns the fence.
func (a *attempt) raiseFence(ctx context.Context) (uint64, error) {
	d := a.d
	d.mu.Lock()
	// A node settles before its vote is cast, so the proposals of the whole quorum are known.
	// Later proposals do not matter.
	fence := uint64(0)
	for _, r := range a.on {
		fence = max(fence, r.proposal)
	}
	a.fence = fence // from here on, renewals write it to all nodes
	d.mu.Unlock()

	err := d.poll(ctx, noLead, func(n *node) (vote, error) {
		// Wait for a vote in flight, because the fence counts on a node only if the record is there.
		// The node may store the fence after the caller has left, because counters only grow.
		<-d.settled(a, n.i)
		reply, err := n.ask(a.c.Timeout, renewScript, n.renewCall(a.c, a, 0))
		if err != nil {
			return failed, err
		}
		holds, _, err := n.decodeRenewal(reply, a.c)
		switch {
		case err != nil:
			return failed, err
		case holds:
			return yes, nil
		}
		return failed, fmt.Errorf("%s: does not have the lock, so the fence there does not count", n.name)
	})
	if err != nil && ctx.Err() != nil {
		// The nodes that were asked may still store the fence, which does no harm.
		return 0, ctx.Err()
	}
	return fence, err
}
