package acceptance

import (
	"context"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

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
		{"spinlock", 100 * time.Millisecond, func(rdb redis.UniversalClient) backend.Driver { return spinlock.New(rdb, nil) }},
		{"pubsublock", time.Second, func(rdb redis.UniversalClient) backend.Driver { return pubsublock.New(rdb, nil) }},
		{"fairlock", 5 * time.Second / 3, func(rdb redis.UniversalClient) backend.Driver { return fairlock.New(rdb, nil) }},
	}
)

// sharer is a strategy, with the longest interval at which its waiters check a key
// without a message.
type sharer struct {
	name  string
	looks time.Duration
	over  func(rdb redis.UniversalClient) backend.Driver
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

// TestWaitersLookByThemselves: the holder uses another strategy, so its release
// sends no message to the waiters. In virtual time the bounds are exact.
func TestWaitersLookByThemselves(t *testing.T) {
	for _, holder := range sharing {
		for _, waiter := range sharing {
			if holder.name == waiter.name {
				continue
			}
			t.Run(waiter.name+" after "+holder.name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					v := redistest.Virtual(t)
					a, b := hasp.New(holder.over(v.Client()), nil), hasp.New(waiter.over(v.Client()), nil)
					defer a.Close()
					defer b.Close()
					for _, held := range []time.Duration{0, 40 * time.Millisecond, 1234 * time.Millisecond, 35 * time.Second} {
						if took := handOver(t, a, b, held); took > waiter.looks+10*time.Millisecond {
							t.Errorf("%v after the release of a key that was held for %v, want %v", took, held, waiter.looks)
						}
					}
				})
			})
		}
	}
}

// handOver returns the time from a's release until b, which waits, has the key.
func handOver(t *testing.T, a, b *hasp.Client, held time.Duration) time.Duration {
	t.Helper()
	lease := lock(t, a, "key")
	had := make(chan time.Time, 1)
	go func() {
		lease, err := b.Lock(t.Context(), "key")
		if err != nil {
			t.Error(err)
			had <- time.Time{}
			return
		}
		had <- time.Now()
		unlock(t, lease)
	}()
	time.Sleep(held + 10*time.Millisecond)
	unlock(t, lease)
	released := time.Now()
	at := <-had
	synctest.Wait()
	return at.Sub(released)
}
