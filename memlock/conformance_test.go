package memlock

import (
	"context"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/conformance"
)

func harness() conformance.Harness {
	s := NewStore()
	return conformance.Harness{
		Open: func(context.Context, string) (backend.Driver, error) { return s.Driver(), nil },
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
		Timeout: time.Second, // the clause on leftovers waits for two of them
	}
}

func TestConformance(t *testing.T) { conformance.Run(t, harness()) }

func BenchmarkConformance(b *testing.B) { conformance.Bench(b, harness()) }
