package acceptance

import (
	"context"
	"os"
	"slices"
	"testing"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/conformance"
	_ "github.com/hasplock/hasp/fairlock"
	_ "github.com/hasplock/hasp/filelock"
	_ "github.com/hasplock/hasp/memlock"
	_ "github.com/hasplock/hasp/pubsublock"
	_ "github.com/hasplock/hasp/redlock"
	_ "github.com/hasplock/hasp/spinlock"
)

// stores has a function for each registered strategy. It sets the store and the hooks of h.
var stores = map[string]func(t *testing.T, h *conformance.Harness){
	"memlock":  inMemory,
	"filelock": inDirectory,
	// The costs are the same as in the strategies' own tests.
	"spinlock":   inRedis(1, conformance.Cost{Waiting: 60}),
	"pubsublock": inRedis(1, conformance.Cost{Refused: 1, Waiting: 4}),
	"fairlock":   inRedis(1, conformance.Cost{Refused: 1, Waiting: 3}),
	"redlock":    inRedis(3, conformance.Cost{Acquire: 10.5, Renew: 4.5, Release: 3, Waiting: 36}),
}

func TestEveryStrategyConforms(t *testing.T) {
	for _, strategy := range hasp.Strategies() {
		t.Run(strategy, func(t *testing.T) {
			t.Parallel()
			store, ok := stores[strategy]
			if !ok {
				t.Fatal("registered, and no store to check it on: add one")
			}
			h := conformance.Harness{Open: opener(strategy, patient)}
			switch {
			case strategy == "redlock":
				// A restarted node does not vote for max_ttl, and the suite waits for 20 s.
				h.Open = opener(strategy, map[string]string{"timeout": "20s", "max_ttl": "10s"})
				h.Cannot = map[string]string{
					"restart-with-data": "when the nodes vote again, every term has ended",
				}
			case slices.Contains(onRedis(), strategy):
				h.Others = map[string]func(context.Context, string) (backend.Driver, error){}
				for _, other := range onRedis() {
					if other != strategy {
						h.Others[other] = opener(other, patient)
					}
				}
			}
			store(t, &h)
			conformance.Run(t, h)
		})
	}
}

// patient has the parameters for drivers whose servers may be slow.
var patient = map[string]string{"timeout": "20s"}

// opener returns a Harness.Open that opens a strategy as users do.
func opener(
	strategy string, p map[string]string,
) func(ctx context.Context, store string) (backend.Driver, error) {
	return func(ctx context.Context, store string) (backend.Driver, error) {
		return hasp.Config{Strategy: strategy, Nodes: []string{store}, Params: p}.Driver(ctx)
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
