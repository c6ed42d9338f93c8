package redlock

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/conformance"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/internal/strategytest"
)

func TestConformance(t *testing.T) {
	t.Parallel() // most of it is waiting
	conformance.Run(t, harness(t, 3))
}

// harness gives the suite nodes of its own, which write each command to disk before
// they answer. Drivers reach them through proxies that count commands.
func harness(t *testing.T, n int) conformance.Harness {
	var nodes *redistest.Nodes
	return conformance.Harness{
		Store: func(context.Context) (string, func(), error) {
			nodes = redistest.StartNodes(t, n, &redistest.Options{Keep: true})
			return nodes.URL(), func() {}, nil
		},
		Open: func(ctx context.Context, store string) (backend.Driver, error) {
			return hasp.Config{Strategy: "redlock", Nodes: []string{store}, Params: hasp.Params{"durable": "true"}}.Driver(ctx)
		},
		Stop:     func(context.Context, string) error { return nodes.Stop() },
		Start:    func(_ context.Context, _ string, data bool) error { return nodes.Start(data) },
		Flush:    func(ctx context.Context, _ string) error { return nodes.Forget(ctx) },
		Kick:     func(ctx context.Context, _ string) error { return nodes.Kick(ctx) },
		Link:     strategytest.Link,
		Cost:     costs(n),
		Commands: func(context.Context, string) (int64, error) { return redistest.Settled(nodes.Count), nil },
		Entries: func(ctx context.Context, _ string) ([]string, error) {
			keys, err := nodes.Keys(ctx)
			var entries []string
			for i, node := range keys {
				for _, key := range node {
					if !strings.HasPrefix(key, "hasp:{") || !strings.Contains(key, "}:fence:") && key != "hasp:{redlock}:mark" {
						entries = append(entries, fmt.Sprintf("%s on node %d", key, i))
					}
				}
			}
			return entries, err
		},
		Cannot: map[string]string{
			"history-refusals": "rivals that ask at the same moment may split the vote, and are refused though nobody holds the key",
		},
	}
}

// costs returns the commands that calls cost on n nodes. An acquire sends SET, GET of
// the mark and INFO to each node. A renewal sends a script to each, and another one to
// repair a minority. A release sends a script to each. A waiter subscribes on each
// node and polls: often at first, later once a second. A poll costs an attempt on one
// node and a script on each.
func costs(n int) conformance.Cost {
	nodes := float64(n)
	return conformance.Cost{Acquire: 3.5 * nodes, Renew: 1.5 * nodes, Release: nodes, Waiting: 12 * nodes}
}
