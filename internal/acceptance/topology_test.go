package acceptance

import (
	"context"
	"slices"
	"sync"
	"testing"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/conformance"
	"github.com/hasplock/hasp/internal/redistest"
)

// onRedis lists the strategies that keep a lock in one Redis, of any topology. They keep it
// under the same keys, so that a fleet can migrate from one to another while both run.
func onRedis() []string {
	apart := []string{"memlock", "filelock", "redlock"}
	return slices.DeleteFunc(hasp.Strategies(), func(strategy string) bool {
		return slices.Contains(apart, strategy)
	})
}

// topologies are sets of servers, by the kind in the URL, and the strategies that run on them. Keys
// and channels of a strategy decide their slots in a cluster. Behind Sentinel, a strategy sends a
// master what it sends a single server, over connections that all strategies share. So there, one
// of those that subscribe stands for all. The tests of rights and of failovers use all of them
// there.
var topologies = map[string]struct {
	start      func(t *testing.T) string
	strategies []string
}{
	"sentinel": {func(t *testing.T) string {
		return redistest.StartSentinel(t, nil).URL()
	}, []string{"fairlock"}},
	"cluster": {func(t *testing.T) string {
		return redistest.StartCluster(t, nil).URL()
	}, onRedis()},
}

func TestConformsOnEveryTopology(t *testing.T) {
	redistest.NeedSets(t)
	for name, on := range topologies {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			// All strategies use one set, which child processes must not start again.
			url := sync.OnceValue(func() string { return on.start(t) })
			for _, strategy := range on.strategies {
				t.Run(strategy, func(t *testing.T) {
					t.Parallel()
					conformance.Run(t, conformance.Harness{
						Store: func(context.Context) (string, func(), error) {
							return url(), func() {}, nil
						},
						Open: opener(strategy, patient),
					})
				})
			}
		})
	}
}
