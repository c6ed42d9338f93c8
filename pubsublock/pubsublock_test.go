package pubsublock_test

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/internal/strategytest"
	"github.com/hasplock/hasp/pubsublock"
)

func TestMain(m *testing.M) { os.Exit(redistest.Main(m)) }

var strategy = strategytest.Strategy{
	Name: "pubsublock",
	New: func(rdb redis.UniversalClient, fenceTTL time.Duration) (backend.Driver, error) {
		return pubsublock.NewDriver(rdb, &pubsublock.Options{FenceTTL: fenceTTL})
	},
	Misuse: map[string]func() (backend.Driver, error){
		"channel": func() (backend.Driver, error) {
			return pubsublock.NewDriver(redis.NewClient(&redis.Options{}), &pubsublock.Options{Channel: "a{b}"})
		},
	},
	BadURLs: map[string][]string{
		"+redis://joe:hunter2@h?channel={x}": {"channel", "brace"},
	},
	Has: func(ctx context.Context, rdb *redis.Client, c backend.Claim) bool {
		got := rdb.HGetAll(ctx, c.Key).Val()
		return len(got) == 1 && got[c.Token+"#"+c.Owner] == "1"
	},
	Foreign: map[string][]any{
		"hash":        {"hset", "8c0b3f0e-5d0c:57", "1"},
		"empty field": {"hset", "", "1"},
		"long field":  {"hset", strings.Repeat("x", 1<<20), "1"},
		"two fields":  {"hset", "token#owner", "1", "mode", "write"},
	},
	Waiting: 4, // to subscribe, and a poll once a second
	Intents: 3 * time.Second,
}

func TestStrategy(t *testing.T) { strategytest.Run(t, strategy) }

// rig is a driver on a Redis, and clients of both.
type rig struct {
	strategytest.Rig[Driver]
	client *hasp.Client // if over has made the rig
}

// Driver is all that the driver can do.
type Driver interface {
	backend.Waker
	backend.Inspector
	backend.Lister
}

func open(rdb redis.UniversalClient) Driver {
	return await.Value(pubsublock.NewDriver(rdb, nil)).(Driver)
}

func setup(t *testing.T, o *redistest.Options) rig { return rig{Rig: strategytest.Setup(t, o, open)} }

// Short names for the tests of this package.
var (
	claim, fenced = strategytest.Claim, strategytest.Fenced
	lock, unlock  = strategytest.Lock, strategytest.Unlock
	want, lost    = strategytest.Want, strategytest.Lost
	eventually    = await.Until
)

const term = strategytest.Term
