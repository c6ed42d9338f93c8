package redisstore

import (
	"fmt"
	"math/rand/v2"
	"net"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/redistest"
)

// startNode starts a cluster of one node, which has all slots.
func startNode(t *testing.T) (*redistest.Server, *redis.Client) {
	t.Helper()
	srv := redistest.Start(t, &redistest.Options{Own: true, Real: true, Args: []string{
		"--cluster-enabled", "yes", "--cluster-port", busPort(t), "--cluster-require-full-coverage", "no",
	}})
	rdb := srv.Client()
	if err := rdb.ClusterAddSlotsRange(t.Context(), 0, slots-1).Err(); err != nil {
		t.Fatal(err)
	}
	return srv, rdb
}

// busPort returns a free port that the system gives to nobody by itself.
func busPort(t *testing.T) string {
	t.Helper()
	for range 1000 {
		port := fmt.Sprint(20000 + rand.N(10000))
		if ln, err := net.Listen("tcp", "127.0.0.1:"+port); err == nil {
			ln.Close()
			return port
		}
	}
	t.Fatal("no port is free")
	return ""
}

// On a cluster messages stay on the node of their slot.
func TestListenOnACluster(t *testing.T) {
	t.Parallel()
	srv, rdb := startNode(t)
	cluster := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{srv.Addr}})
	defer cluster.Close()
	s := New(cluster)
	if !s.Sharded() {
		t.Fatal("not sharded")
	}
	ears := make([]*ear, 100)
	for i := range ears {
		ears[i] = listenTo(t, s, fmt.Sprint("ch", i))
	}
	says := func(i int) {
		t.Helper()
		comes(t, fmt.Sprint("message on ", i), func() bool {
			rdb.SPublish(t.Context(), fmt.Sprint("ch", i), "x")
			return strings.Contains(ears[i].take(), "x")
		})
	}
	for i := range ears {
		says(i)
	}
	comes(t, "one connection", func() bool {
		return strings.Count(rdb.Do(t.Context(), "client", "list", "type", "pubsub").String(), "id=") == 1
	})

	// The slot goes away, and comes back.
	before := ears[7].count()
	slot := Slot("ch7")
	if err := rdb.ClusterDelSlots(t.Context(), slot).Err(); err != nil {
		t.Fatal(err)
	}
	comes(t, "the end of the subscription", func() bool {
		return rdb.PubSubShardNumSub(t.Context(), "ch7").Val()["ch7"] == 0
	})
	if err := rdb.ClusterAddSlots(t.Context(), slot).Err(); err != nil {
		t.Fatal(err)
	}
	comes(t, "again", func() bool { return ears[7].count() > before })
	says(7)

	rdb.Do(t.Context(), "client", "kill", "type", "pubsub")
	for i, e := range ears {
		e.hearsAgain(t)
		says(i)
		e.Close()
	}
	comes(t, "no subscription", func() bool { return len(rdb.PubSubShardChannels(t.Context(), "*").Val()) == 0 })
	s.Close()
	s.subs.wg.Wait()
}

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
