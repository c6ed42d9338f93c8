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

// followers are Listeners of two Stores: of a URL, and of a client that was passed.
type followers struct {
	stores    []*redisstore.Store
	recorders map[string][]*recorder // by channel
	sharded   bool                   // the channels are in slots
}

func follow(t *testing.T, url string, rdb redis.UniversalClient, channels ...string) *followers {
	t.Helper()
	t.Cleanup(func() { rdb.Close() })
	passed := redisstore.New(rdb)
	t.Cleanup(func() { passed.Close() })
	f := &followers{recorders: map[string][]*recorder{}}
	f.stores = []*redisstore.Store{await.Value(open(t, url, nil)), passed}
	for _, name := range channels {
		for _, s := range f.stores {
			f.recorders[name] = append(f.recorders[name], listenTo(t, s, name))
		}
	}
	return f
}

// areAt waits until both Stores are subscribed to a channel at the server, and get its messages.
func (f *followers) areAt(t *testing.T, srv *redistest.Server, name string) {
	t.Helper()
	rdb := srv.Client()
	subscribers, publish := rdb.PubSubNumSub, rdb.Publish
	if f.sharded {
		subscribers, publish = rdb.PubSubShardNumSub, rdb.SPublish
	}
	until(t, "two subscribers of "+name+" at "+srv.Addr, func() bool {
		return subscribers(t.Context(), name).Val()[name] == 2
	})
	for _, e := range f.recorders[name] {
		getsSoon(t, publish, e, name)
	}
}

// learned waits until both Listeners of a channel have learned of n gaps.
func (f *followers) learned(t *testing.T, name string, n int) {
	t.Helper()
	for i, e := range f.recorders[name] {
		until(t, fmt.Sprint(i, " learns of the gap"), func() bool { return e.count() >= n })
	}
}

func addrs(servers []*redistest.Server) (all []string) {
	for _, s := range servers {
		all = append(all, s.Addr)
	}
	return all
}

// After a failover Listeners are on the new master, also if the old one is still up.
func TestListenersFollowTheMaster(t *testing.T) {
	t.Parallel()
	set := redistest.StartSentinel(t, nil)
	f := follow(t, set.URL(), redis.NewFailoverClient(&redis.FailoverOptions{
		MasterName: set.Name, SentinelAddrs: addrs(set.Sentinels),
	}), "ch")
	f.areAt(t, set.Master(), "ch")
	set.Failover()
	f.areAt(t, set.Master(), "ch")
	// A Listener may still be at the old master, which passes on what the new one publishes, while
	// the other Listener has two connections to the new master for a moment.
	f.learned(t, "ch", 1)
	f.areAt(t, set.Master(), "ch")
}

// Listeners are at the server of their slot, also if the slot moves, or if its server
// fails over or dies.
func TestListenersFollowTheirSlot(t *testing.T) {
	t.Parallel()
	set := redistest.StartCluster(t, nil)
	names := []string{"a", "{a}x", "b", "c", "d", "e"}
	f := follow(t, set.URL(), redis.NewClusterClient(&redis.ClusterOptions{
		Addrs: addrs(set.Servers),
	}), names...)
	f.sharded = true
	nodes := map[string]*redis.Client{}
	for _, s := range set.Servers {
		nodes[s.Addr] = s.Client()
	}
	there := func() {
		t.Helper()
		for _, name := range names {
			f.areAt(t, set.Master(name), name)
		}
	}
	connections := func(rdb *redis.Client) int {
		list := rdb.Do(t.Context(), "client", "list", "type", "pubsub")
		return strings.Count(list.String(), "id=")
	}
	for i, s := range f.stores {
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
	f.learned(t, "a", 1)
	f.learned(t, "{a}x", 1)
	set.Failover("a")
	there()
	f.learned(t, "a", 2)
	set.Master("b").Kill()
	set.Failover("b")
	there()
	f.learned(t, "b", 1)
	for _, s := range f.stores {
		s.Close()
	}
	for _, rdb := range nodes {
		if rdb.Ping(t.Context()).Err() == nil { // not the one that was killed
			until(t, "nothing left", func() bool { return connections(rdb) == 0 })
		}
	}
}
