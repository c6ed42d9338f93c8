package conformance_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/conformance"
	"github.com/hasplock/hasp/memlock"
)

// harness describes a driver in memory. If other processes can reach the store, Harness.Store
// starts it and returns its address, and the suite passes the address to Open.
func harness() conformance.Harness {
	store := new(memlock.Store)
	return conformance.Harness{
		Open: func(_ context.Context, _ string) (backend.Driver, error) {
			return store.Driver(), nil
		},
	}
}

// A driver's own test is one call, in a function such as
//
//	func TestConformance(t *testing.T) { conformance.Run(t, harness()) }
func ExampleRun() {
	_ = func(t *testing.T) { conformance.Run(t, harness()) }
}

// Outside of tests, Check reports the result of each clause. This example selects some clauses.
func ExampleCheck() {
	h := harness()
	h.Only = func(clause string) bool { return strings.HasPrefix(clause, "release-") }
	err := conformance.Check(context.Background(), h, func(r conformance.Result) {
		fmt.Println(r.Status, r.Name)
	})
	fmt.Println("error:", err)
	// Output:
	// pass release-lost
	// pass release-for-good
	// error: <nil>
}
