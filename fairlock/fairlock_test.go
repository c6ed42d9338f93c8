package fairlock_test

import (
	"context"
	"os"
	"regexp"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/fairlock"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/internal/strategytest"
)

func TestMain(m *testing.M) { os.Exit(redistest.Main(m)) }

var strategy = strategytest.Strategy{
	Name: "fairlock",
	New: func(rdb redis.UniversalClient, fenceTTL time.Duration) (backend.Driver, error) {
		return fairlock.NewDriver(rdb, &fairlock.Options{FenceTTL: fenceTTL})
	},
	Misuse: map[string]func() (backend.Driver, error){
		"window": func() (backend.Driver, error) {
			return fairlock.NewDriver(redis.NewClient(&redis.Options{}), &fairlock.Options{Window: 299 * time.Millisecond})
		},
	},
	BadURLs: map[string][]string{
		"+redis://joe:hunter2@h?window=soon":  {"window", "300ms", "5s"},
		"+redis://joe:hunter2@h?window=299ms": {"window"},
	},
	Has: func(ctx context.Context, rdb *redis.Client, c backend.Claim) bool {
		r, ok := parseRecord(rdb.Get(ctx, c.Key).Val())
		return ok && r.token == c.Token && r.owner == c.Owner && r.mark == "-" && (r.fence == "0") == !c.Fenced
	},
	Foreign: map[string][]any{
		"hash": {
			"hset", "token", "token", "owner", "an owner", "since", "1", "fence", "1",
		},
		"string of another strategy": {"set", "fairlock-#1 token 1 1 owner"},
		"almost a record":            {"set", "fairlock- 0000000000000 token 0 soon an owner"},
	},
	Waiting: 3, // polls, and the PING of the subscriber
	Since:   true,
}

func TestStrategy(t *testing.T) { strategytest.Run(t, strategy) }

// rig is a driver on a Redis, and a client of the same Redis.
type rig struct {
	strategytest.Rig[Driver]
}

// Driver is all that the driver can do.
type Driver interface {
	backend.Waiter
	backend.Inspector
	backend.Lister
}

func open(rdb redis.UniversalClient) Driver {
	return await.Value(fairlock.NewDriver(rdb, nil)).(Driver)
}

func setup(t *testing.T, o *redistest.Options) rig { return rig{strategytest.Setup(t, o, open)} }

// Short names for the tests of this package.
var (
	claim, fenced = strategytest.Claim, strategytest.Fenced
	atLast        = await.Until
	outage, want  = strategytest.Outage, strategytest.Want
)

func errOf[T any](g T, err error) error { return strategytest.ErrOf(g, err) }

// status returns what Inspect reports on "k".
func (r rig) status(t *testing.T) backend.Status {
	t.Helper()
	return await.Value(r.Driver.Inspect(t.Context(), "k"))
}

// hold takes a hold of "k" that outlasts the test.
func (r rig) hold(t *testing.T) backend.Claim {
	t.Helper()
	c := claim("k")
	c.TTL = time.Hour
	r.Acquire(t, c)
	return c
}

// counter is the key of the fence counter of key k.
const counter = "hasp:{k}:fence:k"

// record is what is stored under the key of a lock.
type record struct{ mark, since, token, fence, term, owner string }

var recordFormat = regexp.MustCompile(`(?s)^fairlock([-+]) (\d{13}) (\S+) (\d+) (\d+) (.*)$`)

func parseRecord(text string) (record, bool) {
	m := recordFormat.FindStringSubmatch(text)
	if m == nil {
		return record{}, false
	}
	return record{m[1], m[2], m[3], m[4], m[5], m[6]}, true
}

// recordOf returns the record of key, or none if the key is free.
func recordOf(t *testing.T, rdb *redis.Client, key string) record {
	t.Helper()
	text := rdb.Get(t.Context(), key).Val()
	r, ok := parseRecord(text)
	if !ok && text != "" {
		t.Errorf("%q is no record", text)
	}
	return r
}
