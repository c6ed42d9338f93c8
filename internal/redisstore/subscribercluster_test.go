package redisstore

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/redistest"
)

// Names that scripts on a key can publish on are one for each slot of a
// cluster.
func TestChannel(t *testing.T) {
	one := New(redis.NewClient(&redis.Options{}))
	if got, want := one.Channel("grant:me", "k{1}"), "hasp:grant:me"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	cluster := New(redis.NewClusterClient(&redis.ClusterOptions{}))
	ring := New(redis.NewRing(&redis.RingOptions{}))
	for _, key := range []string{"k", "{k}a", "a{}b", "a{b", "{}}", "hasp:{1}:x", "}", ""} {
		for _, s := range []*Store{cluster, ring} {
			if got := s.Channel("grant:me", key); Slot(got) != Slot(LockKey(key)) || !strings.HasSuffix(got, "}:grant:me") {
				t.Errorf("key %q: %q is in slot %d, not %d", key, got, Slot(got), Slot(LockKey(key)))
			}
		}
	}
	if a, b := cluster.Channel("n", "{x}a"), cluster.Channel("n", "{x}b"); a != b {
		t.Errorf("%q and %q for one slot", a, b)
	}
}

// Listeners end up on the new master, also when the old one stays there.
func TestListenersFollowTheMaster(t *testing.T) {
	t.Parallel()
	set := redistest.StartSentinel(t, nil)
	var addrs []string
	for _, s := range set.Sentinels {
		addrs = append(addrs, s.Addr)
	}
	failover := redis.NewFailoverClient(&redis.FailoverOptions{MasterName: set.Name, SentinelAddrs: addrs})
	defer failover.Close()
	byURL, err := open(t, set.URL(), nil)
	if err != nil {
		t.Fatal(err)
	}
	handedIn := New(failover)
	defer handedIn.Close()
	both := []*ear{listenTo(t, byURL, "ch"), listenTo(t, handedIn, "ch")}
	there := func() {
		t.Helper()
		rdb := set.Master().Client()
		comes(t, "two subscribers at "+rdb.Options().Addr, func() bool {
			return rdb.PubSubNumSub(t.Context(), "ch").Val()["ch"] == 2
		})
		for _, e := range both {
			hearsSoon(t, rdb, e, "ch")
		}
	}
	there()
	set.Failover()
	there()
	for i, e := range both {
		if e.count() == 0 {
			t.Errorf("%d was not told", i)
		}
	}
}

// Listeners are where their slot is, though it moves, or its node fails over
// or dies.
func TestListenersFollowTheirSlot(t *testing.T) {
	t.Parallel()
	set := redistest.StartCluster(t, nil)
	var addrs []string
	for _, s := range set.Servers {
		addrs = append(addrs, s.Addr)
	}
	cluster := redis.NewClusterClient(&redis.ClusterOptions{Addrs: addrs})
	defer cluster.Close()
	byURL, err := open(t, set.URL(), nil)
	if err != nil {
		t.Fatal(err)
	}
	both := []*Store{byURL, New(cluster)}
	nodes := map[string]*redis.Client{}
	for _, s := range set.Servers {
		nodes[s.Addr] = s.Client()
	}
	names := []string{"a", "{a}x", "b", "c", "d", "e"}
	ears := map[string][]*ear{}
	for _, name := range names {
		for _, s := range both {
			ears[name] = append(ears[name], listenTo(t, s, name))
		}
	}
	there := func() {
		t.Helper()
		for _, name := range names {
			rdb := nodes[set.Master(name).Addr]
			comes(t, "two subscribers of "+name+" at "+rdb.Options().Addr, func() bool {
				return rdb.PubSubShardNumSub(t.Context(), name).Val()[name] == 2
			})
			for _, e := range ears[name] {
				comes(t, "a message on "+name, func() bool {
					rdb.SPublish(t.Context(), name, "x")
					return strings.Contains(e.take(), "x")
				})
			}
		}
	}
	connections := func(rdb *redis.Client) int {
		return strings.Count(fmt.Sprint(rdb.Do(t.Context(), "client", "list", "type", "pubsub")), "id=")
	}
	told := func(name string, n int) {
		t.Helper()
		for i, e := range ears[name] {
			if e.count() < n {
				t.Errorf("%d was told %d times, want %d", i, e.count(), n)
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
		comes(t, "one connection of each at most", func() bool { return connections(rdb) <= 2 })
	}
	set.Move("a")()
	there()
	told("a", 1)
	told("{a}x", 1)
	set.Failover("a")
	there()
	told("a", 2)
	set.Master("b").Kill()
	set.Failover("b")
	there()
	told("b", 1)
	for _, s := range both {
		s.Close()
	}
	for _, rdb := range nodes {
		if rdb.Ping(t.Context()).Err() == nil { // the one that was killed aside
			comes(t, "nothing left", func() bool { return connections(rdb) == 0 })
		}
	}
}

// What kind of cluster it is the server says that is concerned: another one may
// hang.
func TestShardedWhileAnotherServerHangs(t *testing.T) {
	set := redistest.StartCluster(t, &redistest.Options{Bare: true})
	s, err := open(t, set.URL(), nil)
	if err != nil {
		t.Fatal(err)
	}
	hangs := set.Master("") // is asked if no key is named
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

// One command is for channels of one slot, and not for all of them at once.
func TestBundle(t *testing.T) {
	c := &link{node: &node{b: &subscriber{}}}
	chs := []*channel{{name: "{a}1"}, {name: "b"}, {name: "{a}2"}, {name: "c", alone: true}}
	for kind, want := range map[int32]string{kindPlain: "[1 3]", kindSharded: "[1 1 2]"} {
		c.node.b.kind.Store(kind)
		var sizes []int
		for _, cmd := range c.bundle("subscribe", chs) {
			sizes = append(sizes, len(cmd.chs))
			for _, ch := range cmd.chs {
				if kind == kindSharded && Slot(ch.name) != Slot(cmd.chs[0].name) {
					t.Errorf("%s and %s in one command", ch.name, cmd.chs[0].name)
				}
			}
		}
		slices.Sort(sizes)
		if got := fmt.Sprint(sizes); got != want {
			t.Errorf("kind %d: got commands of %s channels, want %s", kind, got, want)
		}
	}
	c.node.b.kind.Store(kindPlain)
	many := make([]*channel, 2*perCommand+1)
	for i := range many {
		many[i] = &channel{name: fmt.Sprint(i)}
	}
	if n := len(c.bundle("subscribe", many)); n != 3 {
		t.Errorf("%d commands", n)
	}
}
