package strategytest

import (
	"context"
	"strings"
	"testing"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/conformance"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
)

// Conform runs the conformance suite with params.
func (s Strategy) Conform(t *testing.T, params hasp.Params) {
	t.Parallel() // most of it is waiting
	conformance.Run(t, s.harness(t, params))
}

// harness gives the suite a Redis of its own. Drivers reach it through a
// proxy, which counts their commands.
func (s Strategy) harness(t *testing.T, params hasp.Params) conformance.Harness {
	var (
		srv   *redistest.Server
		proxy *faultproxy.Proxy
	)
	return conformance.Harness{
		Store: func(context.Context) (string, func(), error) {
			srv = redistest.Start(t, &redistest.Options{Keep: true})
			proxy = srv.Proxy()
			return "redis://" + proxy.Addr(), func() {}, nil
		},
		Open: func(ctx context.Context, store string) (backend.Driver, error) {
			return hasp.Config{Strategy: s.Name, Nodes: []string{store}, Params: params}.Driver(ctx)
		},
		Stop:     func(context.Context, string) error { return srv.Stop() },
		Start:    func(_ context.Context, _ string, data bool) error { return srv.Start(data) },
		Flush:    func(ctx context.Context, _ string) error { return srv.Forget(ctx) },
		Kick:     func(ctx context.Context, _ string) error { return srv.Kick(ctx, proxy) },
		Link:     Link,
		Cost:     conformance.Cost{Waiting: s.Waiting},
		Commands: func(context.Context, string) (int64, error) { return proxy.Count(), nil },
		Entries: func(ctx context.Context, _ string) ([]string, error) {
			all, err := srv.Client().Keys(ctx, "*").Result()
			var entries []string
			for _, key := range all {
				if !strings.HasPrefix(key, "hasp:{") || !strings.Contains(key, "}:fence:") {
					entries = append(entries, key)
				}
			}
			return entries, err
		},
	}
}

// Link disturbs the connections to all servers of a URL without a user at once.
func Link(_ context.Context, store string) (*conformance.Link, error) {
	var links []*conformance.Link
	all := &conformance.Link{
		Set: func(s conformance.LinkState) {
			for _, l := range links {
				l.Set(s)
			}
		},
		SetAfter: func(replies int, s conformance.LinkState) {
			for _, l := range links {
				l.SetAfter(replies, s)
			}
		},
		Close: func() {
			for _, l := range links {
				l.Close()
			}
		},
	}
	var addrs []string
	for addr := range strings.SplitSeq(strings.TrimSuffix(strings.TrimPrefix(store, "redis://"), "/0"), ",") {
		l, err := conformance.TCP(addr)
		if err != nil {
			all.Close()
			return nil, err
		}
		links, addrs = append(links, l), append(addrs, l.Store)
	}
	all.Store = "redis://" + strings.Join(addrs, ",")
	return all, nil
}
