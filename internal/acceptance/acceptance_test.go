package acceptance

import (
	"context"
	"os"
	"regexp"
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
			if strategy == "redlock" {
				conformsRedlock(t)
				return
			}

			h := conformance.Harness{Open: opener(strategy, patient)}
			if slices.Contains(onRedis(), strategy) {
				h.Others = map[string]func(context.Context, string) (backend.Driver, error){}
				for _, other := range onRedis() {
					if other != strategy {
						h.Others[other] = opener(other, patient)
					}
				}
			}
			conforms(t, strategy, h)
		})
	}
}

// losses matches the clauses that restart servers, or remove their data.
var losses = regexp.MustCompile("^(restart|flush|fence-restart|fence-data-loss)")

// conformsRedlock runs the suite in two parts. A server that was restarted does not vote for
// max_ttl, and the suite waits for 20 s. The other clauses have the default, because max_ttl bounds
// all terms, and so the time that a clause may take on a busy machine.
func conformsRedlock(t *testing.T) {
	for maxTTL, only := range map[string]func(clause string) bool{
		"10s": losses.MatchString,
		"31s": func(clause string) bool { return !losses.MatchString(clause) },
	} {
		t.Run("max_ttl="+maxTTL, func(t *testing.T) {
			t.Parallel()
			h := conformance.Harness{Only: only}
			h.Open = opener("redlock", map[string]string{"timeout": "20s", "max_ttl": maxTTL})
			h.Cannot = map[string]string{
				"restart-with-data": "when the nodes vote again, every term has ended",
			}
			conforms(t, "redlock", h)
		})
	}
}

func conforms(t *testing.T, strategy string, h conformance.Harness) {
	store, ok := stores[strategy]
	if !ok {
		t.Fatal("registered, and no store to check it on: add one")
	}
	store(t, &h)
	conformance.Run(t, h)
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
