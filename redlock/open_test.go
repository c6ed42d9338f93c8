package redlock_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redisstore"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/internal/strategytest"
	"github.com/hasplock/hasp/redlock"
)

func TestOpenByURL(t *testing.T) {
	nodes := redistest.StartNodes(t, 3, &redistest.Options{User: "ann", Password: "p@ss/w%rd?&,"})
	u := "redlock+" + nodes.URL() + "?max_ttl=1m&timeout=20s"
	c := await.Value(hasp.Open(t.Context(), u+"&ttl=20s&prefix=app:&fence_ttl=2h", nil))
	defer c.Close()
	lease := strategytest.Lock(t, c, hasp.WithFence())
	eventually(t, "all nodes have the key for 20 s and a fence for 2 h", func() error {
		for i, srv := range nodes.Servers {
			rdb := srv.Client()
			term, fence := rdb.PTTL(t.Context(), "app:k").Val(), rdb.PTTL(t.Context(), "hasp:{app:k}:fence:app:k").Val()
			if term <= 0 || term > 20*time.Second || fence <= time.Hour || fence > 2*time.Hour {
				return fmt.Errorf("node %d has the key for %v and the fence for %v", i, term, fence)
			}
		}
		return nil
	})
	strategytest.Unlock(t, lease)
	_, err := hasp.Open(t.Context(), u+"&ttl=61s", nil)
	says(t, "a ttl longer than max_ttl", err, true, "above 1m0s")
}

// A lock and an unlock of a free key send SET and GET to each node, and run a script of two
// commands there. INFO is sent once for each connection of hasp's own.
func TestAPairMakesFewCommands(t *testing.T) {
	nodes := redistest.StartNodes(t, 3, redistest.Real)
	// total returns how many commands the nodes have executed, with those of scripts, when the Client
	// has locked some keys and is closed, so that no call is in flight.
	total := func(c *hasp.Client, pairs int) (n int) {
		for i := range pairs {
			strategytest.Unlock(t, await.Value(c.Lock(t.Context(), fmt.Sprint("k", i))))
		}
		c.Close()
		for _, srv := range nodes.Servers {
			stats := srv.Client().Info(t.Context(), "stats").Val()
			n += await.Value(strconv.Atoi(redisstore.InfoField(stats, "total_commands_processed")))
		}
		return n
	}
	o := hasp.Options{Timeout: 20 * time.Second}
	byURL := func() *hasp.Client { return await.Value(hasp.Open(t.Context(), "redlock+"+nodes.URL(), &o)) }
	passed := func() *hasp.Client {
		return await.Value(redlock.New(nodes.Clients(), &redlock.Options{Client: o}))
	}
	for want, open := range map[int]func() *hasp.Client{5: byURL, 6: passed} { // on each node
		before := total(open(), 1) // the nodes get their marks
		few := total(open(), 10)
		many := total(open(), 110)
		spent := many - 2*few + before
		// Round, because either run may make more connections than the other, with a few commands
		// each.
		if got := (spent + 150) / 300; got != want {
			t.Errorf("%d commands for 100 pairs on three nodes, want %d for each", spent, want)
		}
	}
}

// works locks and unlocks a key by the Client of an Open, and closes the Client.
func works(t *testing.T, c *hasp.Client, err error) {
	t.Helper()
	await.Must(t, err)
	strategytest.Unlock(t, strategytest.Lock(t, c))
	strategytest.Want(t, "close", c.Close(), nil)
}

// Each node has a password of its own, and one of them speaks TLS.
func TestOpenByConfig(t *testing.T) {
	config := hasp.Config{Strategy: "redlock", Params: map[string]string{"ttl": "30s", "timeout": "20s"}}
	for i, password := range []string{"one", "tw@o,", ""} {
		srv := redistest.Start(t, &redistest.Options{Own: true, Password: password, TLS: i == 1})
		config.Nodes = append(config.Nodes, srv.URL())
		maps.Copy(config.Params, srv.Params())
	}
	c, err := config.Open(t.Context(), nil)
	works(t, c, err)
}

func TestOpenReportsWhatIsWrong(t *testing.T) {
	// Each URL has the texts that its error must contain.
	for u, texts := range map[string]string{
		"redlock://a,b,c":                  "redis://",
		"redlock://":                       "no nodes",
		"redlock+http://joe:hunter2@a,b,c": "redis://",
		"redlock+redis-sentinel://joe:hunter2@a,b,c/mymaster":       "redis://",
		"redlock+redis-cluster://joe:hunter2@a,b,c":                 "redis://",
		"redlock+redis://joe:hunter2@a":                             "1 node; allow_unsafe_nodes",
		"redlock+redis://joe:hunter2@a,b":                           "2 nodes; allow_unsafe_nodes",
		"redlock+redis://joe:hunter2@a,b,c,d":                       "4 nodes; allow_unsafe_nodes",
		"redlock+redis://joe:hunter2@a:1,b:1,a:1":                   "a:1; twice; allow_unsafe_nodes",
		"redlock+redis://joe:hunter2@a,b,a:6379":                    "a:6379; twice",
		"redlock+redis://joe:hunter2@a,b,c:port":                    "port",
		"redlock+redis://joe:hunter2@a,b,c/db":                      "database",
		"redlock+redis://joe:hunter2@a,b,c?max_tll=1h":              "max_tll; max_ttl",
		"redlock+redis://joe:hunter2@a,b,c?max_ttl=soon":            "max_ttl; 30s",
		"redlock+redis://joe:hunter2@a,b,c?max_ttl=99ms":            "max_ttl; 100ms",
		"redlock+redis://joe:hunter2@a,b,c?max_ttl=-1m":             "max_ttl",
		"redlock+redis://joe:hunter2@a,b,c?fence_ttl=soon":          "fence_ttl; 720h",
		"redlock+redis://joe:hunter2@a,b,c?durable=true":            "unknown parameter; durable",
		"redlock+redis://joe:hunter2@a,b,c?allow_unsafe_nodes=yes!": "allow_unsafe_nodes; true",
		"redlock+redis://joe:hunter2@a,b,c?ca=/x":                   "rediss://",
		"redlock+redis://joe:hunter2@a,b,c?replicas=1":              "replicas",
	} {
		_, err := hasp.Open(t.Context(), u, nil)
		says(t, u, err, true, strings.Split(texts, "; ")...)
	}
	// Here each node has a URL of its own.
	for nodes, text := range map[string]string{
		"redis://:hunter2@a,b redis://:hunter2@c redis://:hunter2@d":       "4 nodes",
		"redis://:hunter2@a redis://:hunter2@b redis://:hunter2@c?ttl=1s":  "into params",
		"redis://:hunter2@a redis://:hunter3@b redis://:hunter2@a:6379":    "twice",
		"redis://:hunter2@a redis://:hunter2@b redlock+redis://:hunter2@c": "redis://",
		"redis://:hunter2@a redis://:hunter2@b ":                           "redis://",
	} {
		_, err := hasp.Config{Strategy: "redlock", Nodes: strings.Split(nodes, " ")}.Open(t.Context(), nil)
		says(t, nodes, err, true, text)
	}
}

func TestNewRefusesMisuse(t *testing.T) {
	for _, c := range []struct {
		nodes string
		o     redlock.Options
		want  string // in the error
	}{
		{nodes: "a b nil", want: "nil"},
		{nodes: "a b a", want: "twice"},
		{nodes: "a b c", o: redlock.Options{FenceTTL: -time.Minute}, want: "fence_ttl"},
		{nodes: "a b c d", o: redlock.Options{AllowUnsafeNodes: true}},
		{nodes: "a b a", o: redlock.Options{AllowUnsafeNodes: true}},
		{nodes: "sentinel:1 sentinel:2 sentinel:3"}, // go-redis reports the same address for all of them
	} {
		var clients []redis.UniversalClient
		for _, name := range strings.Fields(c.nodes) {
			var rdb redis.UniversalClient
			switch {
			case strings.HasPrefix(name, "sentinel"):
				rdb = redis.NewFailoverClient(&redis.FailoverOptions{MasterName: "mymaster", SentinelAddrs: []string{name}})
			case name != "nil":
				rdb = redis.NewClient(&redis.Options{Addr: name + ":1"})
			}
			clients = append(clients, rdb)
		}
		d, err := redlock.NewDriver(clients, &c.o)
		if c.want == "" {
			await.Must(t, err)
			strategytest.Want(t, "close", d.Close(), nil)
		} else if !errors.Is(err, hasp.ErrInvalid) || !strings.HasPrefix(err.Error(), "redlock: ") || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want an error about %q", c.nodes, err, c.want)
		}
	}
}

// With two names of one server, one vote would count twice.
func TestOneServerUnderTwoNamesIsRefused(t *testing.T) {
	nodes := redistest.StartNodes(t, 2, nil)
	addr, other := "redis://"+nodes.Servers[0].Addr, "redis://"+nodes.Servers[1].Addr
	params := map[string]string{"timeout": "20s"}
	for name, again := range map[string]string{
		"by localhost":  strings.Replace(addr, "127.0.0.1", "localhost", 1),
		"by its proxy":  "redis://" + nodes.Proxies[0].Addr(),
		"by a database": addr + "/1", // two databases of one server are one node
	} {
		_, err := hasp.Config{Strategy: "redlock", Nodes: []string{addr, other, again}, Params: params}.Open(t.Context(), nil)
		says(t, name, err, true, "allow_unsafe_nodes", nodes.Servers[0].Addr)
	}
	params["allow_unsafe_nodes"] = "true"
	c, err := hasp.Config{Strategy: "redlock", Nodes: []string{addr}, Params: params}.Open(t.Context(), nil)
	works(t, c, err)
}

// A node that answers with an error, or that must not store locks, will not change by waiting. A
// node that does not answer may be back soon.
func TestOpenRefusesANodeThatCanNeverVote(t *testing.T) {
	good := redistest.StartNodes(t, 2, redistest.Real)
	for want, command := range map[string][]any{
		"NOAUTH":     {"config", "set", "requirepass", "secret"},
		"WRONGPASS":  {"config", "set", "requirepass", "secret"},
		"evict":      {"config", "set", "maxmemory-policy", "allkeys-lru"},
		"is a repli": {"replicaof", "127.0.0.1", "1"},
		"":           {"shutdown", "nosave"},
	} {
		srv := redistest.Start(t, redistest.Real)
		srv.Client().ConfigSet(t.Context(), "maxmemory", "90mb")
		srv.Client().Do(t.Context(), command...)
		var missing []string
		o := &hasp.Options{Timeout: 20 * time.Second, Observe: func(_ context.Context, e hasp.Event) {
			if e.Kind == hasp.EventDegraded {
				missing = append(missing, e.Err.Error())
			}
		}}
		nodes := []string{good.URL(), "redis://" + srv.Addr}
		if want == "WRONGPASS" {
			nodes[1] = "redis://:hunter2@" + srv.Addr
		}
		c, err := hasp.Config{Strategy: "redlock", Nodes: nodes}.Open(t.Context(), o)
		if want != "" {
			says(t, want, err, false, want, srv.Addr, "can never vote")
			continue
		}
		works(t, c, err)
		if len(missing) != 1 || !strings.Contains(missing[0], srv.Addr) {
			t.Errorf("without a node: got the events %q, want one that names %s", missing, srv.Addr)
		}
	}
}

func TestOpenAsksAQuorum(t *testing.T) {
	nodes := redistest.StartNodes(t, 3, &redistest.Options{Password: "hunter2"})
	open := func(url string) (*hasp.Client, error) {
		return hasp.Open(t.Context(), "redlock+"+url+"?timeout=20s", nil)
	}
	nodes.Servers[2].Kill()
	c, err := open(nodes.URL())
	works(t, c, err)
	nodes.Servers[1].Kill()
	_, err = open(nodes.URL())
	says(t, "one of three is up", err, false, nodes.Proxies[1].Addr(), nodes.Proxies[2].Addr())

	// All nodes refuse the password.
	all := redistest.StartNodes(t, 3, &redistest.Options{Password: "right"})
	_, err = open(strings.Replace(all.URL(), "right", "hunter2", 1))
	says(t, "a wrong password", err, false, all.Proxies[0].Addr(), all.Proxies[1].Addr(), "WRONGPASS", "check user and password")

	_, err = open("redis://:hunter2@127.0.0.1:1,127.0.0.1:2,127.0.0.1:3")
	says(t, "nobody listens", err, false, "127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3", "connection refused")

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = hasp.Open(ctx, "redlock+"+nodes.URL(), nil)
	strategytest.Want(t, "cancelled", err, context.Canceled)
}

// says fails the test unless err is ErrInvalid, or else an outage, and contains all of
// want and no password.
func says(t *testing.T, what string, err error, invalid bool, want ...string) {
	t.Helper()
	if err == nil || errors.Is(err, hasp.ErrInvalid) != invalid || errors.Is(err, hasp.ErrHeld) {
		t.Errorf("%s: got %v, want an error, invalid: %v", what, err, invalid)
		return
	}
	for _, w := range append(want, "hasp: open redlock: ") {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("%s: %q does not say %q", what, err, w)
		}
	}
	if strings.Contains(err.Error(), "hunter") {
		t.Errorf("%s: %q tells the password", what, err)
	}
}

var eventually = await.Success
