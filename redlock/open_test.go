package redlock_test

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/internal/strategytest"
	"github.com/hasplock/hasp/redlock"
)

func TestOpenByURL(t *testing.T) {
	for name, o := range map[string]*redistest.Options{
		"plain": nil, "password": {Password: "p@ss/w%rd?&,"}, "user": {User: "ann", Password: "p@ss/w%rd?&,"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			nodes := redistest.StartNodes(t, 3, o)
			c, err := hasp.Open(t.Context(), "redlock+"+nodes.URL()+"?ttl=20s&prefix=app:&fence_ttl=2h&max_ttl=1m&timeout=20s", nil)
			await.Must(t, err)
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
			if err := lease.Unlock(t.Context()); err != nil || lease.Fence() == 0 {
				t.Errorf("unlock: %v, fence %d", err, lease.Fence())
			}
			if _, err := hasp.Open(t.Context(), "redlock+"+nodes.URL()+"?ttl=61s&max_ttl=1m&timeout=20s", nil); !errors.Is(err, hasp.ErrInvalid) || !strings.Contains(err.Error(), "above 1m0s") {
				t.Errorf("opened with a ttl longer than max_ttl: %v", err)
			}
			if _, err := c.Lock(t.Context(), "k", hasp.WithTTL(61*time.Second)); !errors.Is(err, hasp.ErrInvalid) || !strings.Contains(err.Error(), "max_ttl") {
				t.Errorf("a term longer than max_ttl: %v", err)
			}
		})
	}
}

// A lock and an unlock of a free key send SET and GET to each node, and run a script of two
// commands there. INFO is sent once for each connection of hasp's own.
func TestAPairMakesFewCommands(t *testing.T) {
	nodes := redistest.StartNodes(t, 3, &redistest.Options{Real: true})
	byURL := func() *hasp.Client {
		return await.Value(hasp.Open(t.Context(), "redlock+"+nodes.URL()+"?timeout=20s", nil))
	}
	passed := func() *hasp.Client {
		return await.Value(redlock.New(nodes.Clients(), &redlock.Options{Client: hasp.Options{Timeout: 20 * time.Second}}))
	}
	for _, c := range []struct {
		name string
		open func() *hasp.Client
		want int // on each node
	}{{"by URL", byURL, 5}, {"passed", passed, 6}} {
		// spent returns how many commands the nodes execute, with those of scripts, until the Client
		// is closed and no call is in flight.
		spent := func(pairs int) (n int) {
			for _, srv := range nodes.Servers {
				srv.Client().ConfigResetStat(t.Context())
			}
			client := c.open()
			for i := range pairs {
				strategytest.Unlock(t, await.Value(client.Lock(t.Context(), fmt.Sprint("k", i))))
			}
			client.Close()
			for _, srv := range nodes.Servers {
				for line := range strings.Lines(srv.Client().Info(t.Context(), "commandstats").Val()) {
					_, calls, _ := strings.Cut(line, ":calls=")
					calls, _, _ = strings.Cut(calls, ",")
					all, _ := strconv.Atoi(calls)
					n += all
				}
			}
			return n
		}
		spent(1) // the nodes get their marks
		few, many := spent(10), spent(110)
		// Round, because either run may make more connections than the other, with a few commands each.
		if got := (many - few + 150) / 300; got != c.want {
			t.Errorf("%s: %d commands for 100 pairs on three nodes, want %d for each", c.name, many-few, c.want)
		}
	}
}

// Each node has a password of its own, and one of them speaks TLS.
func TestOpenByConfig(t *testing.T) {
	var nodes []string
	params := map[string]string{"ttl": "30s", "timeout": "20s"}
	for i, password := range []string{"one", "tw@o,", ""} {
		srv := redistest.Start(t, &redistest.Options{Own: true, Password: password, TLS: i == 1})
		nodes = append(nodes, srv.URL())
		for name, value := range srv.Params() {
			params[name] = value
		}
	}
	c, err := hasp.Config{Strategy: "redlock", Nodes: nodes, Params: params}.Open(t.Context(), nil)
	await.Must(t, err)
	strategytest.Unlock(t, strategytest.Lock(t, c))
	strategytest.Want(t, "close", c.Close(), nil)
}

func TestOpenReportsWhatIsWrong(t *testing.T) {
	for _, c := range []struct {
		url  string
		want []string
	}{
		{"redlock://a,b,c", []string{"redis://"}},
		{"redlock://", []string{"no nodes"}},
		{"redlock+http://joe:hunter2@a,b,c", []string{"redis://"}},
		{"redlock+redis-sentinel://joe:hunter2@a,b,c/mymaster", []string{"redis://"}},
		{"redlock+redis-cluster://joe:hunter2@a,b,c", []string{"redis://"}},
		{"redlock+redis://joe:hunter2@a", []string{"1 node", "allow_unsafe_nodes"}},
		{"redlock+redis://joe:hunter2@a,b", []string{"2 nodes", "allow_unsafe_nodes"}},
		{"redlock+redis://joe:hunter2@a,b,c,d", []string{"4 nodes", "allow_unsafe_nodes"}},
		{"redlock+redis://joe:hunter2@a:1,b:1,a:1", []string{"a:1", "twice", "allow_unsafe_nodes"}},
		{"redlock+redis://joe:hunter2@a,b,a:6379", []string{"a:6379", "twice"}},
		{"redlock+redis://joe:hunter2@a,b,c:port", []string{"port"}},
		{"redlock+redis://joe:hunter2@a,b,c/db", []string{"database"}},
		{"redlock+redis://joe:hunter2@a,b,c?max_tll=1h", []string{"max_tll", "max_ttl"}},
		{"redlock+redis://joe:hunter2@a,b,c?max_ttl=soon", []string{"max_ttl", "30s"}},
		{"redlock+redis://joe:hunter2@a,b,c?max_ttl=99ms", []string{"max_ttl", "100ms"}},
		{"redlock+redis://joe:hunter2@a,b,c?max_ttl=-1m", []string{"max_ttl"}},
		{"redlock+redis://joe:hunter2@a,b,c?fence_ttl=soon", []string{"fence_ttl", "720h"}},
		{"redlock+redis://joe:hunter2@a,b,c?durable=true", []string{"unknown parameter", "durable"}},
		{"redlock+redis://joe:hunter2@a,b,c?allow_unsafe_nodes=yes!", []string{"allow_unsafe_nodes", "true"}},
		{"redlock+redis://joe:hunter2@a,b,c?ca=/x", []string{"rediss://"}},
		{"redlock+redis://joe:hunter2@a,b,c?replicas=1", []string{"replicas"}},
	} {
		_, err := hasp.Open(t.Context(), c.url, nil)
		says(t, c.url, err, true, c.want...)
	}
	for nodes, want := range map[[3]string]string{
		{"redis://:hunter2@a,b", "redis://:hunter2@c", "redis://:hunter2@d"}:       "4 nodes",
		{"redis://:hunter2@a", "redis://:hunter3@b", "redis://:hunter2@a:6379"}:    "twice",
		{"redis://:hunter2@a", "redis://:hunter2@b", "redlock+redis://:hunter2@c"}: "redis://",
		{"redis://:hunter2@a", "redis://:hunter2@b", ""}:                           "redis://",
	} {
		_, err := hasp.Config{Strategy: "redlock", Nodes: nodes[:]}.Open(t.Context(), nil)
		says(t, fmt.Sprint(nodes), err, true, want)
	}
}

func TestNewRefusesMisuse(t *testing.T) {
	clients := func(addrs ...string) []redis.UniversalClient {
		var all []redis.UniversalClient
		for _, addr := range addrs {
			rdb := redis.NewClient(&redis.Options{Addr: addr})
			t.Cleanup(func() { rdb.Close() })
			all = append(all, rdb)
		}
		return all
	}
	for name, c := range map[string]struct {
		clients []redis.UniversalClient
		o       *redlock.Options
		want    string
	}{
		"four":            {clients("a:1", "b:1", "c:1", "d:1"), nil, "4 nodes"},
		"nil":             {append(clients("a:1", "b:1"), nil), nil, "nil"},
		"the same":        {clients("a:1", "b:1", "a:1"), nil, "twice"},
		"a past FenceTTL": {clients("a:1", "b:1", "c:1"), &redlock.Options{FenceTTL: -time.Minute}, "fence_ttl"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := redlock.New(c.clients, c.o)
			if !errors.Is(err, hasp.ErrInvalid) || !strings.HasPrefix(err.Error(), "redlock: ") || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want an error about %q", err, c.want)
			}
		})
	}
	for name, all := range map[string][]redis.UniversalClient{"one": clients("a:1"), "four": clients("a:1", "b:1", "c:1", "d:1"), "the same": clients("a:1", "b:1", "a:1")} {
		if err := await.Value(redlock.NewDriver(all, &redlock.Options{AllowUnsafeNodes: true})).Close(); err != nil {
			t.Errorf("%s, allowed: %v", name, err)
		}
	}
}

// go-redis reports the same address for all clients that ask sentinels.
func TestNewTakesNodesThatSentinelsName(t *testing.T) {
	var all []redis.UniversalClient
	for _, sentinel := range []string{"a:1", "b:1", "c:1"} {
		rdb := redis.NewFailoverClient(&redis.FailoverOptions{MasterName: "mymaster", SentinelAddrs: []string{sentinel}})
		defer rdb.Close()
		all = append(all, rdb)
	}
	strategytest.Want(t, "close", await.Value(redlock.NewDriver(all, nil)).Close(), nil)
}

// With two names of one server, one vote would count twice.
func TestOneServerUnderTwoNamesIsRefused(t *testing.T) {
	nodes := redistest.StartNodes(t, 2, nil)
	addr := nodes.Servers[0].Addr
	for name, u := range map[string]string{
		"by localhost":  strings.Join([]string{addr, nodes.Servers[1].Addr, strings.Replace(addr, "127.0.0.1", "localhost", 1)}, ","),
		"by its proxy":  strings.Join([]string{addr, nodes.Servers[1].Addr, nodes.Proxies[0].Addr()}, ","),
		"by a database": "", // two databases of one server are one node
	} {
		t.Run(name, func(t *testing.T) {
			c := hasp.Config{Strategy: "redlock", Nodes: []string{"redis://" + u}, Params: map[string]string{"timeout": "20s"}}
			if u == "" {
				c.Nodes = []string{"redis://" + addr + "/0", "redis://" + nodes.Servers[1].Addr, "redis://" + addr + "/1"}
			}
			_, err := c.Open(t.Context(), nil)
			if !errors.Is(err, hasp.ErrInvalid) || !strings.Contains(fmt.Sprint(err), "allow_unsafe_nodes") || !strings.Contains(fmt.Sprint(err), addr) {
				t.Errorf("got %v", err)
			}
			t.Log(err)
		})
	}
	client, err := hasp.Open(t.Context(), "redlock+redis://"+addr+"?allow_unsafe_nodes=true&timeout=20s", nil)
	await.Must(t, err)
	defer client.Close()
	lease, err := client.TryLock(t.Context(), "k")
	await.Must(t, err)
	strategytest.Unlock(t, lease)
}

// A node that answers with an error, or that must not store locks, will not change by waiting. A node
// that does not answer may be back soon.
func TestOpenRefusesANodeThatCanNeverVote(t *testing.T) {
	good := redistest.StartNodes(t, 2, &redistest.Options{Own: true, Real: true})
	for want, spoil := range map[string]func(srv *redistest.Server){
		"NOAUTH":     func(srv *redistest.Server) { srv.Client().ConfigSet(t.Context(), "requirepass", "secret") },
		"WRONGPASS":  func(srv *redistest.Server) { srv.Client().ConfigSet(t.Context(), "requirepass", "secret") },
		"evict":      func(srv *redistest.Server) { srv.Client().ConfigSet(t.Context(), "maxmemory-policy", "allkeys-lru") },
		"is a repli": func(srv *redistest.Server) { srv.Client().ReplicaOf(t.Context(), "127.0.0.1", "1") },
		"":           (*redistest.Server).Kill,
	} {
		srv := redistest.Start(t, &redistest.Options{Own: true, Real: true})
		srv.Client().ConfigSet(t.Context(), "maxmemory", "90mb")
		spoil(srv)
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
		await.Must(t, err)
		strategytest.Unlock(t, strategytest.Lock(t, c))
		c.Close()
		if len(missing) != 1 || !strings.Contains(missing[0], srv.Addr) {
			t.Errorf("without a node: got the events %q, want one that names %s", missing, srv.Addr)
		}
	}
}

func TestOpenAsksAQuorum(t *testing.T) {
	const secret = "hunter2"
	nodes := redistest.StartNodes(t, 3, &redistest.Options{Password: secret})
	u := "redlock+" + nodes.URL() + "?timeout=20s"
	nodes.Servers[2].Kill()
	c, err := hasp.Open(t.Context(), u, nil)
	if err != nil {
		t.Fatalf("two of three are up: %v", err)
	}
	strategytest.Unlock(t, strategytest.Lock(t, c))
	c.Close()
	nodes.Servers[1].Kill()
	_, err = hasp.Open(t.Context(), u, nil)
	says(t, "one of three is up", err, false, nodes.Proxies[1].Addr(), nodes.Proxies[2].Addr())

	// All nodes refuse the password.
	all := redistest.StartNodes(t, 3, &redistest.Options{Password: "right"})
	u = strings.Replace(all.URL(), "right", secret, 1)
	_, err = hasp.Open(t.Context(), "redlock+"+u+"?timeout=20s", nil)
	says(t, "a wrong password", err, false, all.Proxies[0].Addr(), all.Proxies[1].Addr(), "WRONGPASS", "check user and password")

	_, err = hasp.Open(t.Context(), "redlock+redis://:hunter2@127.0.0.1:1,127.0.0.1:2,127.0.0.1:3?timeout=20s", nil)
	says(t, "nobody listens", err, false, "127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3", "connection refused")

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := hasp.Open(ctx, "redlock+"+nodes.URL(), nil); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

// says fails the test unless err is ErrInvalid, or else an outage, and contains all of
// want and no password.
func says(t *testing.T, what string, err error, invalid bool, want ...string) {
	t.Helper()
	t.Log(err)
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
