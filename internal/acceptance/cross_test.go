package acceptance

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/conformance"
	"github.com/hasplock/hasp/fairlock"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/pubsublock"
	"github.com/hasplock/hasp/spinlock"
)

// Each registered strategy is either sharing or apart. Sharing strategies keep
// their locks under the same keys of one Redis, so that a fleet can migrate from
// one to another while both run. The others have stores of their own.
var (
	apart   = []string{"memlock", "filelock", "redlock"}
	sharing = []sharer{
		{"spinlock", func(rdb redis.UniversalClient) backend.Driver { return spinlock.New(rdb, nil) }},
		{"pubsublock", func(rdb redis.UniversalClient) backend.Driver { return pubsublock.New(rdb, nil) }},
		{"fairlock", func(rdb redis.UniversalClient) backend.Driver { return fairlock.New(rdb, nil) }},
	}
)

// sharer is a strategy.
type sharer struct {
	name string
	over func(rdb redis.UniversalClient) backend.Driver
}

// open opens a driver as users do.
func (s sharer) open(ctx context.Context, store string) (backend.Driver, error) {
	return hasp.Config{Strategy: s.name, Nodes: []string{store}, Params: hasp.Params{"timeout": "20s"}}.Driver(ctx)
}

func TestEveryStrategyIsSharingOrApart(t *testing.T) {
	all := slices.Clone(apart)
	for _, s := range sharing {
		all = append(all, s.name)
	}
	slices.Sort(all)
	if got := hasp.Strategies(); !slices.Equal(got, all) {
		t.Errorf("registered are %q, and known here %q", got, all)
	}
}

// TestStrategiesThatShareExcludeEachOther tries every pair, in both orders, on
// one server.
func TestStrategiesThatShareExcludeEachOther(t *testing.T) {
	srv := redistest.Start(t, nil)
	for _, s := range sharing {
		t.Run(s.name, func(t *testing.T) {
			h := conformance.Harness{
				Store: func(context.Context) (string, func(), error) { return srv.URL(), func() {}, nil },
				Open:  s.open,
				Only:  func(clause string) bool { return strings.HasPrefix(clause, "others-") },
			}
			for _, other := range sharing {
				if other.name != s.name {
					h.Others = append(h.Others, conformance.Other{Name: other.name, Open: other.open})
				}
			}
			conformance.Run(t, h)
		})
	}
}
