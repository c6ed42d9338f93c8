package acceptance

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/conformance"
	"github.com/hasplock/hasp/internal/strategytest"
)

// splits are clauses that redlock cannot keep, with the reason.
var splits = map[string]string{
	"history-refusals": "rivals that ask at the same moment may split the vote, and are refused although the key is free",
}

// overRedlock opens redlock with parameters of its own.
func overRedlock(p hasp.Params) func(ctx context.Context, store string) (backend.Driver, error) {
	return func(ctx context.Context, store string) (backend.Driver, error) {
		return hasp.Config{Strategy: "redlock", Nodes: []string{store}, Params: p}.Driver(ctx)
	}
}

// onFive starts five containers. They need not write to disk, because they are
// never all stopped. Without the minority, one is down and one is slow.
func onFive(minority bool) func(t *testing.T, h *conformance.Harness) {
	return func(t *testing.T, h *conformance.Harness) {
		h.Store = func(ctx context.Context) (string, func(), error) {
			nodes, url, err := startServers(t, 5)
			if err == nil {
				err = nodes.Each(func(n strategytest.Node) error { return n.Redis.ConfigSet(ctx, "appendonly", "no").Err() })
			}
			if err == nil && !minority {
				err = leaveThree(ctx, nodes, url)
			}
			return url, func() {}, err
		}
		h.Open = overRedlock(hasp.Params{"timeout": "20s"})
		h.Link = link
		h.Cannot = splits
		if !minority {
			h.Only = func(clause string) bool {
				return !slices.ContainsFunc(sameForAll, func(prefix string) bool { return strings.HasPrefix(clause, prefix) })
			}
		}
	}
}

// leaveThree leaves a bare majority of five. First all five vote once, which makes
// the set new: without that, the missing nodes might have seen other locks.
func leaveThree(ctx context.Context, nodes strategytest.Nodes, url string) error {
	d, err := overRedlock(nil)(ctx, url)
	if err != nil {
		return err
	}
	defer d.Close()
	for i := 0; ; i++ {
		c := backend.Claim{Key: "mark", Token: fmt.Sprint("mark", i), TTL: time.Second, Timeout: 3 * time.Second}
		if _, err := d.Acquire(ctx, c); err == nil {
			_ = d.Release(ctx, c)
		}
		unmarked := nodes.Each(func(n strategytest.Node) error { return n.Redis.Get(ctx, "hasp:{redlock}:mark").Err() })
		if unmarked == nil {
			break
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("a new set: %w", unmarked)
		case <-time.After(10 * time.Millisecond):
		}
	}
	nodes[4].Proxy.Delay(200 * time.Millisecond)
	return nodes[3].Stop(ctx)
}

// TestRedlockConformsOnFive is TestEveryStrategyConforms on five nodes. It repeats
// the clauses that a minority could disturb with one node down and one node that
// takes 200 ms.
func TestRedlockConformsOnFive(t *testing.T) {
	needContainers(t)
	t.Parallel()
	for name, minority := range map[string]bool{"all well": true, "one down and one slow": false} {
		t.Run(name, func(t *testing.T) {
			var h conformance.Harness
			onFive(minority)(t, &h)
			conformance.Run(t, h)
		})
	}
}

// sameForAll are the begins of the names of clauses that do not depend on the
// number of nodes.
var sameForAll = []string{"keys-", "token-", "owners-", "traits-", "reentry", "reach", "process-"}
