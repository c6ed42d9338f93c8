package redlock

import (
	"context"
	"fmt"

	"github.com/hasplock/hasp/internal/redisstore"
)

// A fence is the largest proposal of the nodes that voted for the holder. Before the key is
// granted, a quorum of nodes that have the holder's record must store the fence. A node without the
// record may already have made its proposal for the next holder, so it does not count. Each renewal
// writes the fence to all nodes again, in case they lose their data one by one. See
// docs/redlock.md.

// maxFence is the largest possible fence, because Lua's integers are exact only up to this value.
const maxFence = 1 << 53

// noFence returns the error of a node whose fence counter has a value that is not a
// number. hasp never overwrites such a value.
func (n *node) noFence(key string) error {
	return fmt.Errorf("%s: the value of %q is no fence counter; remove it, so that hasp can begin a new one", n.name, redisstore.DerivedKey("fence", key))
}

// raiseFence stores the fence of the attempt a on a quorum of nodes that have the attempt's record,
// and returns the fence.
func (a *attempt) raiseFence(ctx context.Context) (uint64, error) {
	d := a.d
	d.mu.Lock()
	// All proposals of the quorum are known, because settle runs before a node's vote is cast.
	fence := uint64(0)
	for _, r := range a.on {
		fence = max(fence, r.proposal)
	}
	a.fence = fence // after this, renewals write the fence to all nodes
	d.mu.Unlock()

	err := d.poll(ctx, noLead, func(n *node) (vote, error) {
		// Wait for a vote in flight, because the node counts only if it has the record.
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
		// Nodes may still store the fence, which is harmless.
		return 0, ctx.Err()
	}
	return fence, err
}
