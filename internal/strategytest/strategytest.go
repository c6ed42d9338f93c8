// Package strategytest tests what all strategies on one Redis promise, beyond
// what package conformance asks of every backend: how they use Redis, how they
// are opened, and what they do when a server fails.
//
// A strategy's own tests cover what is particular to it.
package strategytest

import (
	"context"
	"reflect"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
)

// Strategy describes the strategy under test.
type Strategy struct {
	// Name is the name that it is registered under.
	Name string

	// New returns a driver over rdb. A fenceTTL of 0 is the default.
	New func(rdb redis.UniversalClient, fenceTTL time.Duration) (backend.Driver, error)

	// Misuse has calls of New that must be refused, besides those with a nil client
	// or a bad fence TTL.
	Misuse map[string]func() (backend.Driver, error)

	// BadURLs are URLs that Open must refuse as invalid, without the name of the
	// strategy in front. Each has the texts that the error must contain.
	BadURLs map[string][]string

	// Has reports whether the record of c.Key is exactly the record of c.
	Has func(ctx context.Context, rdb *redis.Client, c backend.Claim) bool

	// Foreign writes values that are not a record of this strategy, but of the
	// same type of Redis.
	Foreign map[string]func(ctx context.Context, rdb *redis.Client, key string) error

	// Since says that Inspect reports when a hold began.
	Since bool

	// Intents is the term of the intent of a caller that shared holds refuse; 0 if it leaves none.
	Intents time.Duration
}

// Run runs the tests. Each is a subtest with the name of its method.
func Run(t *testing.T, s Strategy) {
	t.Parallel() // each test has a server of its own, and the slow ones wait
	tests := []func(*testing.T){
		s.RecordAndRefusal, s.RenewAlwaysWrites, s.ForeignValueIsHeld, s.NewRefusesMisuse,
		s.FenceCounter, s.ForeignFenceCounterIsRefused,
		s.RefusalsOfTheServerAreOutages,
		s.ListNamesOnlyOurOwn,
		s.OpenByURL, s.OpenErrors, s.LingersUntilOthersWantTheKey,
		s.SharedHolds, s.SharedWithoutRights,
	}
	if s.Intents > 0 {
		tests = append(tests, s.WaitingWriterKeepsReadersOut)
	}
	for _, f := range tests {
		// The name of a method value is package.Type.Method-fm.
		name := runtime.FuncForPC(reflect.ValueOf(f).Pointer()).Name()
		name = strings.TrimSuffix(name[strings.LastIndexByte(name, '.')+1:], "-fm")
		t.Run(name, f)
	}
}
