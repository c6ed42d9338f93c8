package pubsublock

import (
	"context"
	"net/url"
	"strings"
	"testing"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/conformance"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
)

func TestConformance(t *testing.T) {
	t.Parallel() // most of it is waiting
	conformance.Run(t, harness(t))
}

// harness is the suite's way to a Redis of its own. Drivers reach it through
// a proxy, which counts their commands.
func harness(t *testing.T) conformance.Harness {
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
			return open(ctx, hasp.Config{Strategy: "pubsublock", Nodes: []string{store}})
		},
		Stop:  func(context.Context, string) error { return srv.Stop() },
		Start: func(_ context.Context, _ string, data bool) error { return srv.Start(data) },
		Flush: func(ctx context.Context, _ string) error { return srv.Forget(ctx) },
		Kick:  func(ctx context.Context, _ string) error { return srv.Kick(ctx, proxy) },
		Link: func(_ context.Context, store string) (*conformance.Link, error) {
			u, err := url.Parse(store)
			if err != nil {
				return nil, err
			}
			l, err := conformance.TCP(u.Host)
			if err != nil {
				return nil, err
			}
			l.Store = "redis://" + l.Store
			return l, nil
		},
		// To subscribe, and a look once a second.
		Cost:     conformance.Cost{Waiting: 4},
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
