package memlock

import (
	"context"
	"maps"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/conformance"
	"github.com/hasplock/hasp/internal/await"
)

func harness() conformance.Harness {
	s := new(Store)
	return conformance.Harness{
		Open: func(context.Context, string) (backend.Driver, error) { return newDriver(s), nil },
		Entries: func(context.Context, string) ([]string, error) {
			s.mu.Lock()
			defer s.mu.Unlock()
			return slices.Collect(maps.Keys(s.keys)), nil
		},
		Sweep: func(context.Context, string) error {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.sweepLocked(time.Now())
			return nil
		},
	}
}

// The suite runs in virtual time here, without the clause that starts a process. Package acceptance
// runs the whole suite in real time.
func TestConformance(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := harness()
		h.Only = func(clause string) bool { return clause != "reach" }
		await.Must(t, conformance.Check(t.Context(), h, func(r conformance.Result) {
			if r.Status == "fail" {
				t.Errorf("%s: %v", r.Name, r.Err)
			}
		}))
	})
}
