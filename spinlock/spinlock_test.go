package spinlock_test

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redisstore"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/internal/strategytest"
	"github.com/hasplock/hasp/spinlock"
)

func TestMain(m *testing.M) { os.Exit(redistest.Main(m)) }

var strategy = strategytest.Strategy{
	Name: "spinlock",
	New: func(rdb redis.UniversalClient, fenceTTL time.Duration) (backend.Driver, error) {
		return spinlock.NewDriver(rdb, &spinlock.Options{FenceTTL: fenceTTL})
	},
	Has: func(ctx context.Context, rdb *redis.Client, c backend.Claim) bool {
		value := rdb.Get(ctx, c.Key).Val()
		return strings.HasPrefix(value, c.Token+"~") && strings.HasSuffix(value, "#"+c.Owner)
	},
	Foreign: map[string][]any{"hash": {"hset", "8c0b3f0e-5d0c:57", "1"}},
	Intents: redisstore.IntentTTL,

	// The first refused attempt also reads the owner: two commands. Later ones
	// within a second take one, about 20 times a second.
	Waiting: 60,
}

func TestStrategy(t *testing.T) { strategytest.Run(t, strategy) }

type rig = strategytest.Rig[Driver]

var claim, fenced = strategytest.Claim, strategytest.Fenced

// Driver is all that the driver can do.
type Driver interface {
	backend.Inspector
	backend.Lister
}

func open(rdb redis.UniversalClient) Driver {
	return await.Value(spinlock.NewDriver(rdb, nil)).(Driver)
}

func setup(t *testing.T, o *redistest.Options) rig { return strategytest.Setup(t, o, open) }

// proxied is setup with a driver that reaches the server through a proxy.
func proxied(t *testing.T, o *redistest.Options) (rig, *faultproxy.Proxy) {
	r := setup(t, o)
	p := r.Server.Proxy()
	options := r.Server.ClientOptions()
	options.Addr, options.MinRetryBackoff, options.ReadTimeout = p.Addr(), -1, 5*time.Second
	rdb := redis.NewClient(options)
	t.Cleanup(func() { rdb.Close() })
	r.Driver = open(rdb)
	return r, p
}

// A hold tells how long its Client waited. The hold of another program does not.
func TestHeldByAClientThatWaited(t *testing.T) {
	r := setup(t, nil)
	hold := claim("k")
	hold.Waited = 1500 * time.Millisecond
	r.Acquire(t, hold)
	r.Redis.Set(t.Context(), "spring", "6a0a6b0e-0001-4f0e-9a51-000000000000", time.Minute)
	r.Redis.Set(t.Context(), "redsync", "a~b", time.Minute)
	for key, want := range map[string]time.Duration{"k": hold.Waited, "spring": 0, "redsync": 0} {
		first := claim(key)
		waiting, later, fenced := first, first, fenced(key)
		waiting.WillRetry, later.Contended = true, true
		for _, c := range []backend.Claim{first, waiting, later, fenced} {
			var held *backend.HeldError
			if _, err := r.Driver.Acquire(t.Context(), c); !errors.As(err, &held) || held.Waited != want || held.RetryAfter <= 0 {
				t.Errorf("%s: got %+v, want a holder that waited for %v", key, err, want)
			}
		}
	}
}
