package redlock

import (
	"context"
	"fmt"
	"slices"
	"strconv"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

// A fence is the largest of those that the nodes propose which have voted for
// the holder, and has been written to a quorum before the holder hears of it.
// Any two majorities have a node in common: what the next holder's nodes
// propose is larger.

// maxFence is the largest that a node may propose: a number of Lua has no
// successor beyond. A larger one would be the last, on all nodes.
const maxFence = 1 << 53

// sendFenced takes the key and has the node propose a fence.
func (n *node) sendFenced(ctx context.Context, a *attempt) (v vote, fence uint64, mark string, err error) {
	counter := redisstore.DerivedKey("fence", a.c.Key)
	reply, err := n.store.Run(ctx, acquireScript, redisstore.Call{
		Keys: []string{a.lock, counter, markKey},
		Args: []any{a.record, redisstore.Millis(a.c.TTL)},
	})
	if err != nil {
		return outcome(err), 0, "", err
	}
	switch parts, _ := reply.([]any); {
	case len(parts) == 3 && parts[0] == int64(1):
		text, _ := parts[1].(string)
		mark, ok := parts[2].(string)
		fence, err = strconv.ParseUint(text, 10, 64)
		if ok && err == nil && 0 < fence && fence <= maxFence {
			return yes, fence, mark, nil
		}
	case len(parts) == 1 && parts[0] == int64(0):
		return no, 0, "", nil
	case len(parts) == 1 && parts[0] == int64(-1):
		return failed, 0, "", n.noFence(counter)
	}
	return unsure, 0, "", n.store.Unexpected(reply)
}

func (n *node) noFence(counter string) error {
	return fmt.Errorf("%s: what is stored under %q is no fence; whoever put it there must remove it", n.name, counter)
}

// raise writes the fence of a to a quorum of the nodes, and returns it.
func (a *attempt) raise(ctx context.Context) (uint64, error) {
	d := a.d
	d.mu.Lock()
	fence := slices.Max(a.fences)
	d.mu.Unlock()
	b := newBallot(d.nodes, having)
	counter := redisstore.DerivedKey("fence", a.c.Key)
	for _, n := range d.nodes {
		if !d.spawn(func() {
			v, err := n.raise(a.c, counter, fence, d)
			b.cast(n.i, v, err)
		}) {
			return 0, errClosed
		}
	}
	select {
	case <-b.done:
	case <-ctx.Done():
		b.end(left)
		return 0, ctx.Err()
	}
	return fence, b.err()
}

// raise writes a fence to the node.
func (n *node) raise(c backend.Claim, counter string, fence uint64, d *Driver) (vote, error) {
	if err := n.admit(); err != nil {
		return failed, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), c.Timeout)
	defer cancel()
	reply, err := n.store.Run(ctx, raiseScript, redisstore.Call{
		Keys: []string{counter},
		Args: []any{strconv.FormatUint(fence, 10), redisstore.Millis(d.fenceTTL)},
	})
	switch {
	case err != nil:
		return failed, n.plain(err, c.Timeout)
	case reply == int64(1):
		return yes, nil
	case reply == int64(-1):
		return failed, n.noFence(counter)
	}
	return failed, n.store.Unexpected(reply)
}
