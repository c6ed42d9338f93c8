package strategytest

import (
	"context"
	"crypto/rand"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/conformance"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
)

// Conform runs the conformance suite in virtual time, on n servers in memory. The argument h
// contains the settings that differ between strategies, and the function open makes the drivers.
//
// Conform leaves out some clauses, which internal/acceptance runs on real servers. Several
// processes cannot share virtual time. Goroutines cannot be counted, because the servers in memory
// run some goroutines for each connection. There is no Kick, and no Stop for several servers,
// because go-redis notices the end of an idle connection only on a socket.
func Conform(
	t *testing.T, n int, h conformance.Harness,
	open func(nodes []redis.UniversalClient) backend.Driver,
) {
	await.Crowd(t)
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		virtual := redistest.VirtualNodes(t, n)
		h.Only = func(clause string) bool {
			startsProcesses := clause == "reach" || strings.HasPrefix(clause, "process-")
			return !startsProcesses && !strings.HasSuffix(clause, "-leaves-nothing")
		}

		var links sync.Map // the clients that connect over a Link, by its Store
		h.Open = func(_ context.Context, store string) (backend.Driver, error) {
			if clients, ok := links.Load(store); ok {
				return open(clients.([]redis.UniversalClient)), nil
			}
			return open(virtual.Clients()), nil
		}
		var nodes Nodes
		for _, v := range virtual {
			nodes = append(nodes, Node{v.Direct(), v.Proxy,
				func(context.Context) error { v.Kill(); return nil },
				func(_ context.Context, data bool) error { v.Start(data); return nil }})
		}
		Hooks(&h, func() Nodes { return nodes })
		h.Link = func(context.Context, string) (*conformance.Link, error) {
			var proxies []*faultproxy.Proxy
			var clients []redis.UniversalClient
			for _, v := range virtual {
				client, proxy := v.Link()
				proxies = append(proxies, proxy)
				clients = append(clients, client)
			}

			name := rand.Text()
			links.Store(name, clients)
			return Link(name, proxies), nil
		}
		if n > 1 {
			// After a restart, each idle connection of a node fails once, and the node does not
			// vote until redlock has tried all these connections.
			h.Stop = nil
			h.Start = nil
		}
		passed := 0
		await.Must(t, conformance.Check(t.Context(), h, func(r conformance.Result) {
			switch r.Status {
			case "pass":
				passed++
			case "skip":
				t.Logf("%s: skipped: %s", r.Name, r.Reason)
			case "fail":
				t.Errorf("%s: %v (%s)", r.Name, r.Err, r.Why)
			}
		}))
		t.Logf("%d clauses passed", passed)
	})
}

// Conformance runs the conformance suite for a strategy on one server.
func (s Strategy) Conformance(t *testing.T) {
	h := conformance.Harness{Cost: conformance.Cost{Waiting: s.Waiting}}
	Conform(t, 1, h, func(nodes []redis.UniversalClient) backend.Driver { return s.open(nodes[0]) })
}

// Node is one Redis of the store of a suite.
type Node struct {
	Redis *redis.Client     // connects directly to the server
	Proxy *faultproxy.Proxy // drivers connect through it
	Stop  func(ctx context.Context) error
	Start func(ctx context.Context, data bool) error
}

// Nodes are the servers that keep the locks.
type Nodes []Node

// Each calls f for all nodes at the same time.
func (ns Nodes) Each(f func(n Node) error) error {
	return redistest.Each(len(ns), func(i int) error { return f(ns[i]) })
}

// Hooks sets the hooks of h that disturb all nodes together, or that read from the nodes.
func Hooks(h *conformance.Harness, nodes func() Nodes) {
	h.Stop = func(ctx context.Context, _ string) error {
		return nodes().Each(func(n Node) error { return n.Stop(ctx) })
	}

	h.Start = func(ctx context.Context, _ string, data bool) error {
		return nodes().Each(func(n Node) error { return n.Start(ctx, data) })
	}

	h.Flush = func(ctx context.Context, _ string) error {
		return nodes().Each(func(n Node) error { return n.Redis.ScriptFlush(ctx).Err() })
	}

	h.Commands = func(context.Context, string) (int64, error) {
		return redistest.Settled(func() (total int64) {
			for _, n := range nodes() {
				total += n.Proxy.Count()
			}
			return total
		}), nil
	}

	// List all keys except fence counters and the marks of redlock.
	h.Entries = func(ctx context.Context, _ string) (entries []string, _ error) {
		for _, n := range nodes() {
			keys, err := n.Redis.Keys(ctx, "*").Result()
			if err != nil {
				return nil, err
			}

			entries = append(entries, slices.DeleteFunc(keys, func(key string) bool {
				isFence := strings.HasPrefix(key, "hasp:{") && strings.Contains(key, "}:fence:")
				return isFence || key == "hasp:{redlock}:mark"
			})...)
		}
		return entries, nil
	}
}

// Link returns a Link that disturbs the connections of all proxies together.
func Link(store string, proxies []*faultproxy.Proxy) *conformance.Link {
	each := func(f func(p *faultproxy.Proxy)) {
		for _, p := range proxies {
			f(p)
		}
	}

	return &conformance.Link{
		Store: store,
		Set: func(s conformance.LinkState) {
			each(func(p *faultproxy.Proxy) { p.Set(states[s]) })
		},
		SetAfter: func(replies int, s conformance.LinkState) {
			each(func(p *faultproxy.Proxy) { p.SetAfter(replies, states[s]) })
		},
		Close: func() { each((*faultproxy.Proxy).Close) },
	}
}

var states = map[conformance.LinkState]faultproxy.State{
	conformance.Slow: {Delay: conformance.Delay}, conformance.Deaf: {Deaf: true},
	conformance.Hung: {Stalled: true}, conformance.Down: {Down: true},
}
