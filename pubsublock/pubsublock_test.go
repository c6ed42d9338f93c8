package pubsublock_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/internal/strategytest"
	"github.com/hasplock/hasp/pubsublock"
)

// hash returns a function that writes a hash with these fields.
func hash(fields ...string) func(ctx context.Context, rdb *redis.Client, key string) error {
	return func(ctx context.Context, rdb *redis.Client, key string) error {
		return rdb.HSet(ctx, key, fields).Err()
	}
}

var strategy = strategytest.Strategy{
	Name: "pubsublock",
	New: func(rdb redis.UniversalClient, fenceTTL time.Duration) backend.Inspector {
		return pubsublock.New(rdb, &pubsublock.Options{FenceTTL: fenceTTL})
	},
	DefaultFenceTTL: pubsublock.DefaultFenceTTL,
	Misuse: map[string]func(){
		"channel": func() { pubsublock.New(redis.NewClient(&redis.Options{}), &pubsublock.Options{Channel: "a{b}"}) },
	},
	BadURLs: map[string][]string{"+redis://joe:hunter2@h?channel={x}": {"channel", "brace"}},
	Has: func(ctx context.Context, rdb *redis.Client, c backend.Claim) bool {
		got := rdb.HGetAll(ctx, c.Key).Val()
		return len(got) == 1 && got[c.Token+"#"+c.Owner] == "1"
	},
	Foreign: map[string]func(ctx context.Context, rdb *redis.Client, key string) error{
		"hash":        hash("8c0b3f0e-5d0c:57", "1"),
		"empty field": hash("", "1"),
		"long field":  hash(strings.Repeat("x", 1<<20), "1"),
		"two fields":  hash("token#owner", "1", "mode", "write"),
	},
	Acquire: "evalsha",
	Refusal: 1,
	Waiting: 4, // to subscribe, and a poll once a second
	Late:    100 * time.Millisecond,
}

func TestStrategy(t *testing.T) { strategytest.Run(t, strategy) }

func TestConformance(t *testing.T) { strategy.Conform(t, nil) }

func BenchmarkUncontended(b *testing.B) { strategy.BenchmarkUncontended(b) }

// rig is a driver on a Redis, and a client of the same Redis.
type rig struct {
	strategytest.Rig[*pubsublock.Driver]
}

func open(rdb redis.UniversalClient) *pubsublock.Driver { return pubsublock.New(rdb, nil) }

func setup(t *testing.T, o *redistest.Options) rig { return rig{strategytest.Setup(t, o, open)} }

func virtual(t *testing.T, f func(t *testing.T, v *redistest.VirtualServer, a, b *hasp.Client)) {
	strategytest.Virtual(t, open, f)
}

// Short names for the tests of this package.
var (
	claim, fenced = strategytest.Claim, strategytest.Fenced
	lock, unlock  = strategytest.Lock, strategytest.Unlock
	outage        = strategytest.Outage
	eventually    = strategytest.Eventually
)

const term = strategytest.Term

// Params name the channel.
func TestChannelByURL(t *testing.T) {
	r := setup(t, nil)
	c, err := hasp.Open(t.Context(), "pubsublock+"+r.Server.URL()+"?prefix=app:&channel=free", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	lease := lock(t, c)
	sub := r.Redis.Subscribe(t.Context(), "free:{app:k}")
	defer sub.Close()
	if _, err := sub.Receive(t.Context()); err != nil {
		t.Fatal(err)
	}
	unlock(t, lease)
	if m, err := sub.ReceiveMessage(strategytest.Bounded(t, 20*time.Second)); err != nil || m.Payload != "0" {
		t.Errorf("the release published %v, %v", m, err)
	}
}
