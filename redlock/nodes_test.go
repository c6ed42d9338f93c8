package redlock

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp/internal/redistest"
)

// nodesUntil asks the nodes about keys until ok returns true for their answers.
func nodesUntil(t *testing.T, d *Driver, what string, ok func([]Node) bool, keys ...string) []Node {
	t.Helper()
	var nodes []Node
	redistest.Until(t, what, func() bool {
		var err error
		if nodes, err = d.Nodes(t.Context(), 10*time.Second, keys...); err != nil {
			t.Fatal(err)
		}
		return ok(nodes)
	})
	return nodes
}

// Nodes shows who has voted for whom, which node is down, and which one does not vote. It
// changes nothing.
func TestNodesShowVotesAndQuarantine(t *testing.T) {
	t.Parallel()
	nodes := redistest.StartNodes(t, 3, &redistest.Options{Own: true, Real: true})
	d := drives(t, nodes.Clients(), nil)
	c := aClaim("k")
	c.TTL, c.Timeout = time.Minute, 10*time.Second
	if _, err := d.Acquire(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	all := func(ok func(Node) bool) func([]Node) bool {
		return func(nodes []Node) bool {
			for _, n := range nodes {
				if !ok(n) {
					return false
				}
			}
			return len(nodes) == 3
		}
	}
	owner := Vote{Held: true, Owner: c.Owner, Quorum: true}
	nodesUntil(t, d, "three votes", all(func(n Node) bool {
		return n.Err == nil && !n.Away && len(n.Votes) == 2 && n.Votes[0] == owner && n.Votes[1] == Vote{}
	}), "k", "free")

	// A record that only one node has is no vote for the holder.
	other := nodes.Servers[0].Client()
	if err := other.Set(t.Context(), "k", "aaaaaaaaaaaaaaaaaaaaaaaaaa#other", time.Minute).Err(); err != nil {
		t.Fatal(err)
	}
	nodesUntil(t, d, "two votes", func(nodes []Node) bool {
		return nodes[0].Err == nil && nodes[0].Votes[0] == Vote{Held: true, Owner: "other"} && nodes[1].Err == nil && nodes[1].Votes[0] == owner
	}, "k")

	// A share that a quorum has is a vote, also beside one that only this node has.
	shared := aClaim("shared")
	shared.Shared, shared.Owner, shared.TTL, shared.Timeout = true, "reader", time.Minute, 10*time.Second
	if _, err := d.Acquire(t.Context(), shared); err != nil {
		t.Fatal(err)
	}
	nodesUntil(t, d, "shares", all(func(n Node) bool {
		return n.Err == nil && n.Votes[0] == Vote{Held: true, Owner: "reader", Shared: 1, Quorum: true}
	}), "shared")

	if err := nodes.Servers[2].Stop(); err != nil {
		t.Fatal(err)
	}
	nodesUntil(t, d, "a node is down", func(nodes []Node) bool { return nodes[2].Err != nil && nodes[2].Votes == nil && nodes[1].Err == nil }, "k")
	if err := nodes.Servers[2].Start(false); err != nil {
		t.Fatal(err)
	}
	nodesUntil(t, d, "a node has lost its data", func(nodes []Node) bool {
		return nodes[2].Err == nil && nodes[2].Away && nodes[2].VotesFrom.IsZero() && nodes[2].Votes[0] == Vote{}
	}, "k")
	if keys, err := nodes.Servers[2].Client().DBSize(t.Context()).Result(); err != nil || keys != 0 {
		t.Errorf("Nodes has written to a node: %d keys, %v", keys, err)
	}

	// A caller that wants its vote gives it a mark, which says when it votes again.
	next := aClaim("next")
	next.TTL, next.Timeout = time.Second, 10*time.Second
	if _, err := d.Acquire(t.Context(), next); err != nil {
		t.Fatal(err)
	}
	nodesUntil(t, d, "a node waits", func(nodes []Node) bool {
		left := time.Until(nodes[2].VotesFrom)
		return nodes[2].Err == nil && nodes[2].Away && left > absence/2 && left < absence+2*time.Second
	})
}

func TestNodesThatHangAreLeftOut(t *testing.T) {
	try(t, 3, nil, func(t *testing.T, tr trial) {
		tr.vs[1].Proxy.Stall()
		began := time.Now()
		nodes, err := tr.d.Nodes(t.Context(), 2*time.Second, "k")
		if err != nil || nodes[0].Err != nil || nodes[2].Err != nil || nodes[1].Err == nil || !strings.Contains(nodes[1].Err.Error(), "no answer") {
			t.Errorf("got %+v, %v", nodes, err)
		}
		took(t, "Nodes", began, 200*time.Millisecond)

		for _, v := range tr.vs {
			v.Proxy.Stall()
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := tr.d.Nodes(ctx, 2*time.Second); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("after the end of ctx: %v", err)
		}
		if nodes, err := tr.d.Nodes(t.Context(), 2*time.Second); err != nil || nodes[0].Err == nil || nodes[1].Err == nil || nodes[2].Err == nil {
			t.Errorf("an outage: %+v, %v", nodes, err)
		}
	})
}
