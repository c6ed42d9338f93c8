package acceptance

import (
	"context"
	"errors"
	"net"
	"os"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/conformance"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/internal/redistest/container"
	"github.com/hasplock/hasp/internal/strategytest"
)

// startServers starts n servers, as containers if HASP_TEST_REDIS says so, and otherwise as
// processes. Each server writes its commands to a file, so that its data survives a kill. The
// proxies count commands.
func startServers(t *testing.T, n int) (all strategytest.Nodes, url string, err error) {
	var addrs []string
	for range n {
		var node strategytest.Node
		var addr string
		if os.Getenv(redistest.Env) == "container" {
			c := container.Start(t)
			addr = c.Addr
			node.Stop = c.Kill
			node.Start = c.Start
		} else {
			p := redistest.Start(t, &redistest.Options{Real: true, Keep: true})
			addr = p.Addr
			node.Stop = func(context.Context) error { return p.Stop() }
			node.Start = func(_ context.Context, data bool) error { return p.Start(data) }
		}
		if node.Proxy, err = proxy(addr); err != nil {
			return nil, "", err
		}
		t.Cleanup(node.Proxy.Close)
		node.Redis = redis.NewClient(&redis.Options{Addr: addr, ContextTimeoutEnabled: true})
		t.Cleanup(func() { node.Redis.Close() })
		all = append(all, node)
		addrs = append(addrs, node.Proxy.Addr())
	}
	return all, "redis://" + strings.Join(addrs, ","), nil
}

func proxy(addr string) (*faultproxy.Proxy, error) {
	return faultproxy.Listen(func() (net.Conn, error) { return net.Dial("tcp", addr) })
}

// inRedis returns a function that sets the hooks of h for a store of n servers. The suite disturbs
// all servers together.
func inRedis(n int, cost conformance.Cost) func(t *testing.T, h *conformance.Harness) {
	return func(t *testing.T, h *conformance.Harness) {
		var nodes strategytest.Nodes
		h.Store = func(context.Context) (url string, _ func(), err error) {
			nodes, url, err = startServers(t, n)
			return url, func() {}, err
		}
		strategytest.Hooks(h, func() strategytest.Nodes { return nodes })
		h.Kick = func(ctx context.Context, _ string) error {
			return nodes.Each(func(n strategytest.Node) error {
				return errors.Join(n.Redis.ClientKillByFilter(ctx, "type", "pubsub").Err(),
					n.Redis.ClientKillByFilter(ctx, "type", "normal", "skipme", "yes").Err())
			})
		}
		h.Link = link
		h.Cost = cost
	}
}

// link makes a Link that disturbs the connections to all servers of a URL together. The URL must
// not have a user.
func link(_ context.Context, store string) (*conformance.Link, error) {
	var proxies []*faultproxy.Proxy
	var addrs []string
	list := strings.TrimSuffix(strings.TrimPrefix(store, "redis://"), "/0")
	for addr := range strings.SplitSeq(list, ",") {
		p, err := proxy(addr)
		if err != nil {
			return nil, err
		}
		proxies = append(proxies, p)
		addrs = append(addrs, p.Addr())
	}
	return strategytest.Link("redis://"+strings.Join(addrs, ","), proxies), nil
}
