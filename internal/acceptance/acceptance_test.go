package acceptance

import (
	"context"
	"errors"
	"net"
	"os"
	"strings"
	"testing"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/conformance"
	_ "github.com/hasplock/hasp/fairlock"
	_ "github.com/hasplock/hasp/filelock"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest/container"
	_ "github.com/hasplock/hasp/memlock"
	_ "github.com/hasplock/hasp/pubsublock"
	_ "github.com/hasplock/hasp/redlock"
	_ "github.com/hasplock/hasp/spinlock"
)

// stores opens the store of each registered strategy.
var stores = map[string]func(t *testing.T, h *conformance.Harness){
	"memlock":  inMemory,
	"filelock": inDirectory,
	// The costs are those of the strategies' own tests.
	"spinlock":   inRedis(conformance.Cost{Waiting: 60}),
	"pubsublock": inRedis(conformance.Cost{Waiting: 4}),
	"fairlock":   inRedis(conformance.Cost{Waiting: 3}),
	"redlock":    onThree,
}

func TestEveryStrategyConforms(t *testing.T) {
	needContainers(t)
	for _, strategy := range hasp.Strategies() {
		t.Run(strategy, func(t *testing.T) {
			t.Parallel()
			store, ok := stores[strategy]
			if !ok {
				t.Fatal("registered, and no store to check it on: add one")
			}
			h := conformance.Harness{Open: func(ctx context.Context, store string) (backend.Driver, error) {
				return hasp.Config{Strategy: strategy, Nodes: []string{store}}.Driver(ctx)
			}}
			store(t, &h)
			conformance.Run(t, h)
		})
	}
}

func inMemory(t *testing.T, h *conformance.Harness) {
	h.Store = func(context.Context) (string, func(), error) { return t.Name(), func() {}, nil }
}

func inDirectory(t *testing.T, h *conformance.Harness) {
	h.Store = func(context.Context) (string, func(), error) {
		dir, err := os.MkdirTemp("", "acceptance-")
		return dir, func() { os.RemoveAll(dir) }, err
	}
}

// inRedis starts a container, and a proxy in front of it that counts commands.
func inRedis(cost conformance.Cost) func(t *testing.T, h *conformance.Harness) {
	return func(t *testing.T, h *conformance.Harness) {
		var srv *container.Server
		var proxy *faultproxy.Proxy
		h.Cost = cost
		h.Store = func(context.Context) (string, func(), error) {
			srv = container.Start(t)
			var err error
			proxy, err = faultproxy.Listen(func() (net.Conn, error) { return net.Dial("tcp", srv.Addr) })
			if err != nil {
				return "", nil, err
			}
			return "redis://" + proxy.Addr(), proxy.Close, nil
		}
		h.Stop = func(ctx context.Context, _ string) error { return srv.Kill(ctx) }
		h.Start = func(ctx context.Context, _ string, data bool) error { return srv.Start(ctx, data) }
		h.Link = func(_ context.Context, store string) (*conformance.Link, error) {
			l, err := conformance.TCP(strings.TrimPrefix(store, "redis://"))
			if err == nil {
				l.Store = "redis://" + l.Store
			}
			return l, err
		}
		h.Commands = func(context.Context, string) (int64, error) { return proxy.Count(), nil }
	}
}

// A server that hangs keeps its connections. The container is paused for that.
func TestContainerThatIsPaused(t *testing.T) {
	needContainers(t)
	srv := container.Start(t)
	c := open(t, "spinlock+redis://"+srv.Addr+"?timeout=5s")
	lease := lock(t, c, "k")
	must(t, srv.Pause(t.Context()))
	if _, err := c.TryLock(t.Context(), "other"); err == nil || errors.Is(err, hasp.ErrHeld) {
		t.Errorf("trylock: %v", err)
	}
	must(t, srv.Resume(t.Context()))
	unlock(t, lease)
	must(t, c.Close())
}
