package acceptance

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/conformance"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/internal/strategytest"
)

// leaveThree leaves three of five nodes that answer fast: it stops one node and slows one down.
// Before that, it lets all five vote once. Otherwise redlock would have to assume that the missing
// nodes know of other locks.
func leaveThree(ctx context.Context, nodes strategytest.Nodes, url string) error {
	d, err := opener("redlock", nil)(ctx, url)
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

// TestRedlockConformsOnABareMajority runs the suite on five nodes. One is down, and one takes 200
// ms to answer. It leaves out the clauses that such a minority cannot disturb. The containers need
// not write to disk, because they are never all stopped.
func TestRedlockConformsOnABareMajority(t *testing.T) {
	if os.Getenv(redistest.Env) != "container" {
		t.Skipf("needs containers: set %s=container", redistest.Env)
	}
	t.Parallel()
	conformance.Run(t, conformance.Harness{
		Store: func(ctx context.Context) (string, func(), error) {
			nodes, url, err := startServers(t, 5)
			if err == nil {
				err = nodes.Each(func(n strategytest.Node) error { return n.Redis.ConfigSet(ctx, "appendonly", "no").Err() })
			}
			if err == nil {
				err = leaveThree(ctx, nodes, url)
			}
			return url, func() {}, err
		},
		Open: opener("redlock", patient),
		Link: link,
		Only: func(clause string) bool {
			return !slices.ContainsFunc(sameForAll, func(prefix string) bool { return strings.HasPrefix(clause, prefix) })
		},
	})
}

// sameForAll has prefixes of clauses that do not depend on the number of nodes.
var sameForAll = []string{"keys-", "token-", "owners-", "traits-", "reach", "process-"}
