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
	New func(rdb redis.UniversalClient, fenceTTL time.Duration) backend.Inspector

	// DefaultFenceTTL is the default of the fence TTL.
	DefaultFenceTTL time.Duration

	// Misuse has calls of New that must panic, besides those with a nil client
	// or a bad fence TTL.
	Misuse map[string]func()

	// BadURLs are URLs that Open must refuse as invalid, without the name of the
	// strategy in front. Each has the texts that the error must contain.
	BadURLs map[string][]string

	// Has reports whether the record of c.Key is exactly the record of c.
	Has func(ctx context.Context, rdb *redis.Client, c backend.Claim) bool

	// Foreign writes values that are not a record of this strategy, but of the
	// same type of Redis.
	Foreign map[string]func(ctx context.Context, rdb *redis.Client, key string) error

	// Acquire begins the command that acquires a key without a fence.
	Acquire string

	// Refusal is the number of commands that a refused Acquire takes.
	Refusal int

	// Since says that Inspect reports when a hold began.
	Since bool

	// Late is how long after the end of a dead holder's term a waiter may get
	// the key.
	Late time.Duration

	// Intents says that there are shared holds, and that a caller that they refuse leaves
	// an intent.
	Intents bool
}

// Run runs the tests. Each is a subtest with the name of its method.
func Run(t *testing.T, s Strategy) {
	t.Parallel() // each test has a server of its own, and the slow ones wait
	tests := []func(*testing.T){
		// hold.go
		s.RecordAndTerm, s.HeldErrorNamesOwnerAndTerm, s.ReleaseNeedsTheToken, s.RenewNeverShortensAndNeverRevives,
		s.RenewAlwaysWrites,
		s.RenewAnswersEachClaimOfABatch, s.ForeignValueIsHeld, s.InspectAndBreak, s.CommandsPerOperation, s.NewPanicsOnMisuse,
		s.CloseLeavesTheCallersClientOpen,

		// keep.go
		s.KeptRecord, s.KeptForeignValue, s.KeptAtOneCommand,

		// fence.go
		s.FenceGrows, s.FenceOnlyOnRequest, s.FenceTTLIsAnOption, s.NewFenceCounterIsTheServersTime, s.ForeignFenceCounterIsRefused, s.OddKeysDoNotMeet,

		// fault.go
		s.ReplyLost, s.ServerHangs, s.RefusalsOfTheServerAreOutages, s.ServerIsGone,

		// lease.go
		s.WaiterTakesOverAfterTheLoss, s.LostRepliesLeaveNothing,
		s.HungServerBlocksNoCaller,

		// list.go
		s.ListNamesOnlyOurOwn, s.ListNeedsRights,

		// open.go
		s.OpenByURL, s.OpenByConfig, s.OpenErrors, s.ConfigWithTwoNodes,
	}
	if s.Intents {
		// shared.go
		tests = append(tests, s.SharedHoldsExcludeOthers, s.SharedTermsAreApart, s.WaitingWriterKeepsReadersOut, s.ForeignSortedSetIsHeld,
			s.SharedWithoutRights, s.SharedFencesGrow, s.SharedHoldsOfOtherStrategies, s.SharedRenewalsOfABatch)
	}
	for _, f := range tests {
		// The name of a method value is package.Type.Method-fm.
		name := runtime.FuncForPC(reflect.ValueOf(f).Pointer()).Name()
		name = strings.TrimSuffix(name[strings.LastIndexByte(name, '.')+1:], "-fm")
		t.Run(name, f)
	}
}
