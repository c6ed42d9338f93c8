package fairlock_test

import (
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/redistest"
)

// Who listens to a master that has become a replica hears what is published on
// the new one, which does not count it. Nobody is told of a grant that the
// script takes back.
func TestListenerOfAReplicaIsToldNothing(t *testing.T) {
	cluster := redistest.StartCluster(t, nil)
	ctx := t.Context()
	master := cluster.Master("k")
	replica := cluster.Servers[slices.Index(cluster.Servers, master)+len(cluster.Servers)/2]
	d, err := hasp.Config{Strategy: "fairlock", Nodes: []string{cluster.URL()}}.Driver(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	c := claim("k")
	if _, err := d.Acquire(ctx, c); err != nil {
		t.Fatal(err)
	}

	const channel = "hasp:{k}:grant:elsewhere"
	rdb := master.Client()
	pipe := rdb.Pipeline()
	pipe.RPush(ctx, queueKey, "waiter")
	pipe.HSet(ctx, entriesKey, "waiter", "SPUBLISH "+channel+" 1 60000 0 one elsewhere")
	pipe.ZAdd(ctx, aliveKey, redis.Z{Score: float64(time.Now().Add(time.Hour).UnixMilli()), Member: channel})
	if _, err := pipe.Exec(ctx); err != nil {
		t.Fatal(err)
	}
	listener := replica.Client().SSubscribe(ctx, channel)
	defer listener.Close()
	if _, err := listener.Receive(ctx); err != nil {
		t.Fatal(err)
	}

	if err := d.Release(ctx, c); err != nil {
		t.Fatal(err)
	}
	if n := rdb.Exists(ctx, "k").Val(); n != 0 {
		t.Error("the key was handed to somebody who is not counted")
	}
	if err := rdb.SPublish(ctx, channel, "the end").Err(); err != nil {
		t.Fatal(err)
	}
	m, err := listener.ReceiveMessage(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if m.Payload != "the end" {
		t.Errorf("told of a grant: %q", m.Payload)
	}
}
