package redlock

import (
	"os"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/conformance"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/internal/strategytest"
)

func TestMain(m *testing.M) { os.Exit(redistest.Main(m)) }

// One node must leave the values of other programs alone, as the strategies on one Redis do.
func TestForeignValues(t *testing.T) {
	s := strategytest.Strategy{
		Name: "redlock",
		New: func(rdb redis.UniversalClient, _ time.Duration) (backend.Driver, error) {
			return NewDriver([]redis.UniversalClient{rdb}, &Options{MaxTTL: longTerm, AllowUnsafeNodes: true})
		},
		Foreign: map[string][]any{"hash": {"hset", "token-of-a-holder#owner", 1}},
	}
	t.Run("held", s.ForeignValueIsHeld)
	t.Run("reports", s.ReportsWriteNothing)
}

func TestConformance(t *testing.T) {
	// An acquire sends SET, GET and INFO to each of three nodes. A renewal sends a script, and may
	// send another one to repair a minority. A waiter subscribes on each node and polls: often at
	// first, later once a second. A poll costs an attempt on one node and a script on each.
	cost := conformance.Cost{Acquire: 10.5, Renew: 4.5, Release: 3, Waiting: 36}
	strategytest.Conform(t, 3, conformance.Harness{Cost: cost}, func(nodes []redis.UniversalClient) backend.Driver {
		return await.Value(NewDriver(nodes, &Options{MaxTTL: longTerm})).(*driver)
	})
}
