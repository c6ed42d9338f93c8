// Package strategytest has the common tests of the strategies on one Redis. They test how these
// strategies use Redis, how they are opened, and what they do when a server fails. Package
// conformance tests what every driver must do.
//
// What differs between the strategies is tested in their own packages.
package strategytest

import (
	"context"
	"reflect"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
)

// Strategy describes the strategy under test.
type Strategy struct {
	// Name is the registered name of the strategy.
	Name string

	// New returns a driver over rdb. If fenceTTL is 0, the driver uses its default.
	New func(rdb redis.UniversalClient, fenceTTL time.Duration) (backend.Driver, error)

	// Misuse has calls that must be refused. A nil client and a bad fence TTL need no entry here.
	Misuse map[string]func() (backend.Driver, error)

	// BadURLs has URLs that Open must refuse as invalid, each with the texts that the error must
	// contain. The tests add the name of the strategy in front.
	BadURLs map[string][]string

	// Has reports whether the record under c.Key is exactly the record that c makes.
	Has func(ctx context.Context, rdb *redis.Client, c backend.Claim) bool

	// Foreign has commands that write values which are no record of this strategy, but have the
	// same Redis type as its records. The key must be inserted after the first word.
	Foreign map[string][]any

	// Waiting is the Cost of a caller that waits, as the conformance suite counts it.
	Waiting float64

	// Since is true if Inspect reports the time at which a hold began.
	Since bool

	// Intents is the term of an intent; 0 if the strategy has no intents.
	Intents time.Duration
}

// Run runs each method that is a test as a subtest with the method's name.
func Run(t *testing.T, s Strategy) {
	t.Parallel() // each test has its own server, and the slow tests mostly sleep
	v := reflect.ValueOf(s)
	for i := range v.NumMethod() {
		if f, ok := v.Method(i).Interface().(func(*testing.T)); ok {
			t.Run(v.Type().Method(i).Name, f)
		}
	}
}
