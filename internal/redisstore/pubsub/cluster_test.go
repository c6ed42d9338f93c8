package pubsub_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redisstore"
	"github.com/hasplock/hasp/internal/redistest"
)

// After a failover Listeners are on the new master, also if the old one is still up.
func TestListenersFollowTheMaster(t *testing.T) {
	t.Parallel()
	set := redistest.StartSentinel(t, nil)
	var addrs []string
	for _, s := range set.Sentinels {
		addrs = append(addrs, s.Addr)
	}
	failover := redis.NewFailoverClient(&redis.FailoverOptions{
		MasterName: set.Name, SentinelAddrs: addrs,
	})
	defer failover.Close()
	byURL := await.Value(open(t, set.URL(), nil))
	handedIn := redisstore.New(failover)
	defer handedIn.Close()
	both := []*recorder{listenTo(t, byURL, "ch"), listenTo(t, handedIn, "ch")}
	there := func() {
		t.Helper()
		rdb := set.Master().Client()
		until(t, "two subscribers at "+rdb.Options().Addr, func() bool {
			return rdb.PubSubNumSub(t.Context(), "ch").Val()["ch"] == 2
		})
		for _, e := range both {
			getsSoon(t, rdb, e, "ch")
		}
	}
	there()
	set.Failover()
	there()
	for i, e := range both {
		// It may still be at the old master, which passes on what the new one publishes, while
		// the other one has two connections to the new master for a moment.
		until(t, fmt.Sprint(i, " learns of the gap"), func() bool { return e.count() > 0 })
	}
	there()
}

// Listeners are at the server of their slot, also if the slot moves, or if its server
// fails over or dies.
func TestListenersFollowTheirSlot(t *testing.T) {
	t.Parallel()
	set := redistest.StartCluster(t, nil)
	var addrs []string
	for _, s := range set.Servers {
		addrs = append(addrs, s.Addr)
	}
	cluster := redis.NewClusterClient(&redis.ClusterOptions{Addrs: addrs})
	defer cluster.Close()
	byURL := await.Value(open(t, set.URL(), nil))
	both := []*redisstore.Store{byURL, redisstore.New(cluster)}
	nodes := map[string]*redis.Client{}
	for _, s := range set.Servers {
		nodes[s.Addr] = s.Client()
	}
	names := []string{"a", "{a}x", "b", "c", "d", "e"}
	recorders := map[string][]*recorder{}
	for _, name := range names {
		for _, s := range both {
			recorders[name] = append(recorders[name], listenTo(t, s, name))
		}
	}
	there := func() {
		t.Helper()
		for _, name := range names {
			rdb := nodes[set.Master(name).Addr]
			until(t, "two subscribers of "+name+" at "+rdb.Options().Addr, func() bool {
				return rdb.PubSubShardNumSub(t.Context(), name).Val()[name] == 2
			})
			for _, e := range recorders[name] {
				until(t, "a message on "+name, func() bool {
					rdb.SPublish(t.Context(), name, "x")
					return strings.Contains(e.take(), "x")
				})
			}
		}
	}
	connections := func(rdb *redis.Client) int {
		list := rdb.Do(t.Context(), "client", "list", "type", "pubsub")
		return strings.Count(list.String(), "id=")
	}
	missed := func(name string, n int) {
		t.Helper()
		for i, e := range recorders[name] {
			if e.count() < n {
				t.Errorf("%d learned of %d gaps, want %d", i, e.count(), n)
			}
		}
	}
	for i, s := range both {
		if !s.Sharded(t.Context(), "a") {
			t.Fatalf("%d is not sharded", i)
		}
	}
	there()
	for _, rdb := range nodes {
		until(t, "one connection of each at most", func() bool { return connections(rdb) <= 2 })
	}
	set.Move("a")()
	there()
	missed("a", 1)
	missed("{a}x", 1)
	set.Failover("a")
	there()
	missed("a", 2)
	set.Master("b").Kill()
	set.Failover("b")
	there()
	missed("b", 1)
	for _, s := range both {
		s.Close()
	}
	for _, rdb := range nodes {
		if rdb.Ping(t.Context()).Err() == nil { // not the one that was killed
			until(t, "nothing left", func() bool { return connections(rdb) == 0 })
		}
	}
}

// Sharded asks the server that has the slot of the key, because another one may hang.
func TestShardedWhileAnotherServerHangs(t *testing.T) {
	set := redistest.StartCluster(t, &redistest.Options{Bare: true})
	s := await.Value(open(t, set.URL(), nil))
	hangs := set.Master("") // has the slot of the empty key
	key := ""
	for i := 0; key == "" || set.Master(key) == hangs; i++ {
		key = fmt.Sprint("key", i)
	}
	hangs.Pause()
	defer hangs.Resume()
	if !s.Sharded(t.Context(), key) {
		t.Error("not sharded")
	}
}
