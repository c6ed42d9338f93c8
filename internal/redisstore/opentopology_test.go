package redisstore

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
)

func TestOpenSaysWhatIsWrongWithASet(t *testing.T) {
	redistest.NeedSets(t)
	set := redistest.StartSentinel(t, &redistest.Options{
		User: "ann", Password: "other", SentinelUser: "sen", SentinelPassword: "right",
	})
	_, sentinels, _ := strings.Cut(set.URL(), "@")
	start := func(args string) *redistest.Server {
		return redistest.Start(t, &redistest.Options{Own: true, Args: strings.Fields(args)})
	}
	evicts := start("--maxmemory 100mb --maxmemory-policy volatile-lru")
	opened(t, evicts.URL(), map[string]string{"allow_eviction": "true"})
	opened(t, start("--maxmemory 100mb").URL(), nil)
	partly := start("--cluster-enabled yes")
	await.Must(t, partly.Client().ClusterAddSlots(t.Context(), 7).Err())

	openSays(t, map[string]string{
		"master":    set.Servers[0].Addr,
		"replica":   set.Servers[1].Addr,
		"sentinels": strings.TrimSuffix(sentinels, "/mymaster/0"),
		"right":     "sentinel_user=sen&sentinel_password=right",
		"evicts":    evicts.Addr,
		"partly":    partly.Addr,
		"empty":     start("--cluster-enabled yes").Addr,
		"locked":    redistest.Start(t, &redistest.Options{Password: "other"}).Addr,
		"plain":     start("").Addr,
		"dead":      deadPort + ",127.0.0.1:2",
		"hangs":     redistest.Serve(t, hang),
		"page":      redistest.Serve(t, page),
		"parrot":    redistest.Serve(t, parrot("-ERR what do you mean by ")),
	}, []wrongURL{
		{"redis://$evicts", "$evicts: it may evict … volatile-lru … set noeviction"},
		{"redis://$plain?replicas=1", "$plain: 0 of 1 replicas"},
		{"redis://ann:other@$replica", "$replica: it is a replica of $master … redis-sentinel://"},

		{"redis-sentinel://ann:hunter2@$dead/m",
			"redis m: none of 2 sentinels can be used: sentinel 127.0.0.1: … connection refused"},
		{"redis-sentinel://ann:hunter2@$hangs/m", "redis m: sentinel $hangs: no answer within"},
		{"redis-sentinel://ann:hunter2@$plain/m", "sentinel $plain: … not a sentinel"},
		{"redis-sentinel://ann:hunter2@$page/m", "sentinel $page: … is that a Redis"},
		{"redis-sentinel://ann:hunter2@$sentinels/m",
			"sentinel 127.0.0.1: … NOAUTH … sentinel_password"},
		{"redis-sentinel://ann:hunter2@$sentinels/not?$right",
			"redis not: … No such master … check the name"},
		{"redis-sentinel://ann:hunter2@$sentinels/m?sentinel_password=hunter2",
			"sentinel 127.0.0.1: … WRONGPASS … sentinel_password"},
		{"redis-sentinel://ann:hunter2@$parrot/m?sentinel_password=hunter2",
			"what do you mean … ***"},
		{"redis-sentinel://ann:hunter2@$sentinels/mymaster?$right",
			"redis $master: WRONGPASS … check user and password in the URL: redis-sentinel://"},
		{"redis-sentinel://ann:other@$sentinels/mymaster?$right&replicas=3",
			"redis $master: 2 of 3 replicas"},

		{"redis-cluster://ann:hunter2@$dead",
			"redis cluster: none of 2 nodes can be used: 127.0.0.1: … connection refused"},
		{"redis-cluster://ann:hunter2@$hangs", "redis cluster: $hangs: no answer within"},
		{"redis-cluster://$plain", "$plain: … cluster support disabled … redis://host:port"},
		{"redis-cluster://$empty", "$empty: the cluster is down"},
		{"redis-cluster://$partly", "$partly: CLUSTERDOWN … try again later"},
		{"redis-cluster://ann:hunter2@$locked",
			"$locked: WRONGPASS … check user and password in the URL: redis-cluster://"},
	})
}

// openWithout opens a set in which a server hangs, by a context that does not end soon.
func openWithout(t *testing.T, url string) (s *Store) {
	t.Helper()
	returns(t, "Open", func() {
		ctx, cancel := context.WithTimeout(t.Context(), hour)
		defer cancel()
		s = await.Value(Open(ctx, url, nil))
	})
	t.Cleanup(func() { s.Close() })
	return s
}

// Open passes over a sentinel that is dead and one that hangs.
func TestSentinelsThatDoNotAnswer(t *testing.T) {
	t.Parallel()
	set := redistest.StartSentinel(t, nil)
	set.Sentinels[0].Kill()
	set.Sentinels[1].Pause()
	s := openWithout(t, set.URL())
	expect(t, s, "set", "OK", "set", "k", "v")

	// If no sentinel answers, Open waits for all of them.
	set.Sentinels[2].Pause()
	time.AfterFunc(1500*time.Millisecond, func() {
		set.Sentinels[1].Resume()
		set.Sentinels[2].Resume()
	})
	openWithout(t, set.URL())
}

// Open passes over one master of a cluster that hangs. Sharded asks the server that has the slot of
// the key.
func TestNodesThatDoNotAnswer(t *testing.T) {
	t.Parallel()
	set := redistest.StartCluster(t, &redistest.Options{Bare: true})
	away := set.Master("") // to which a call without a key would go
	key := "a"
	for set.Master(key) == away {
		key += "a"
	}
	away.Pause()
	s := openWithout(t, set.URL())
	expect(t, s, "set", "OK", "set", key, "v")
	if !s.Sharded(t.Context(), key) {
		t.Error("not sharded")
	}
	away.Resume()
	expect(t, s, "set", "OK", "set", "", "v")

	// Open refuses a cluster of which one master may evict keys.
	rdb := away.Client()
	rdb.ConfigSet(t.Context(), "maxmemory-policy", "allkeys-lru")
	rdb.ConfigSet(t.Context(), "maxmemory", "100mb")
	_, err := open(t, set.URL(), nil)
	wantsOutage(t, err, away.Addr+": it may evict")

	// If the URL or a client names the server alone, the error names the URL of the cluster. A type
	// of the program that wraps a ClusterClient would have one queue for all nodes.
	_, err = open(t, away.URL(), map[string]string{"allow_eviction": "true"})
	wantsOutage(t, err, "redis-cluster://")
	rdb.ConfigSet(t.Context(), "maxmemory", "0")
	cluster := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{away.Addr}})
	defer cluster.Close()
	for _, rdb := range []redis.UniversalClient{rdb, struct{ redis.UniversalClient }{cluster}} {
		_, err = New(rdb).Do(t.Context(), "get", key)
		wantsOutage(t, err, "it is one server of a cluster … redis-cluster://")
	}

	// A list over a client that was passed has the keys of all masters.
	keys, found := numbered("key", 40), map[Candidate]bool{}
	for _, key := range keys {
		record := strings.Repeat("A", minToken) + Mark
		expect(t, s, "set", "OK", "set", key, record, "px", "600000")
	}
	for page, err := range New(cluster).Scan(t.Context(), "key", soon, ByToken) {
		await.Must(t, err)
		for _, c := range page {
			found[c] = true
		}
	}
	if len(found) != len(keys) {
		t.Errorf("found %v", found)
	}
}

// Close ends calls, whether a caller waits for a reply, for a connection, for a flight, or for a
// search for the servers. It closes all connections.
func TestCloseEndsCalls(t *testing.T) {
	for _, url := range []string{"redis://%s", "redis-sentinel://%s/m", "redis-cluster://%s"} {
		for name, fault := range map[string]func(p *faultproxy.Proxy, s *Store){
			"the server hangs": func(p *faultproxy.Proxy, s *Store) { p.Stall() },
			"a dial hangs": func(p *faultproxy.Proxy, s *Store) {
				p.Stall()
				cutWires(s)
			},
			"the server is down": func(p *faultproxy.Proxy, s *Store) { p.Down() },
			"the server refuses": func(p *faultproxy.Proxy, s *Store) {
				p.Answer("", "-ERR no\r\n")
			},
		} {
			for _, callers := range []int{1, 100} { // of one flight, and of several
				t.Run(fmt.Sprintf("%s, %s, %d", url, name, callers), func(t *testing.T) {
					p := redistest.Start(t, redistest.Own).Proxy()
					s, _ := prepared(t, fmt.Sprintf(url, p.Addr()))
					if strings.HasPrefix(url, "redis://") {
						pings(t, s) // connects
					}
					fault(p, s)
					ctx, cancel := context.WithTimeout(t.Context(), hour)
					defer cancel()
					var calls sync.WaitGroup
					for range callers {
						calls.Go(func() {
							if _, err := s.Do(ctx, "get", "k"); err == nil {
								t.Error("no error")
							}
						})
					}
					if strings.Contains(name, "hangs") {
						until(t, "calls in progress", func() bool { return busy() >= callers })
					} else {
						returns(t, "the calls", calls.Wait)
					}
					returns(t, "Close", func() { s.Close() })
					returns(t, "the calls", calls.Wait)
					until(t, "the end of all goroutines", func() bool { return busy() == 0 })
					p.Flow()
					until(t, "the end of all connections", func() bool { return p.Conns() == 0 })
					await.ErrorIs(t, "after it", await.ErrorOf(s.Do(ctx, "get", "k")), redis.ErrClosed)
				})
			}
		}
	}
}

// cutWires ends the connections of a Store. go-redis notices this only when the next call begins.
func cutWires(s *Store) {
	for _, l := range s.opened.wires {
		l.mu.Lock()
		if l.conn != nil {
			l.conn.rawConn.Close()
		}
		l.mu.Unlock()
	}
}
