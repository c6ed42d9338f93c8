package pubsublock_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/pubsublock"
)

// On a cluster of Redis 7 a release is published on a sharded channel. Subscribers
// of unsharded channels, such as Redisson before 3.22, receive it if PublishBoth
// is set.
func TestReleasesOnAClusterArePublishedBothWaysIfAsked(t *testing.T) {
	t.Parallel()
	set := redistest.StartCluster(t, &redistest.Options{Bare: true})
	const key, name = "orders", "redisson_lock__channel:{orders}"
	var addrs []string
	for _, srv := range set.Servers {
		addrs = append(addrs, srv.Addr)
	}
	rdb := redis.NewClusterClient(&redis.ClusterOptions{Addrs: addrs})
	defer rdb.Close()
	open := func(params hasp.Params) backend.Driver {
		d, err := hasp.Config{Strategy: "pubsublock", Nodes: []string{set.URL()}, Params: params}.Driver(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { d.Close() })
		return d
	}

	// Listeners of both kinds; the one without shards is at a node of another
	// slot, which has the message over the bus of the cluster.
	sharded := rdb.SSubscribe(t.Context(), name)
	defer sharded.Close()
	elsewhere := set.Servers[0]
	if elsewhere == set.Master(key) {
		elsewhere = set.Servers[1]
	}
	plain := elsewhere.Client().Subscribe(t.Context(), name)
	defer plain.Close()
	for _, sub := range []*redis.PubSub{sharded, plain} {
		if _, err := sub.Receive(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	gets := func(sub *redis.PubSub, want string) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		if m, err := sub.ReceiveMessage(ctx); err != nil || m.Channel != name || m.Payload != want {
			t.Errorf("got %v, %v, want %q", m, err, want)
		}
	}

	for what, d := range map[string]backend.Driver{
		"by URL": open(hasp.Params{"publish": "both"}), "handed in": pubsublock.New(rdb, &pubsublock.Options{PublishBoth: true}), "not asked": open(nil),
	} {
		both := what != "not asked"
		for _, free := range []func(backend.Claim) error{
			func(c backend.Claim) error { return d.Release(t.Context(), c) },
			func(c backend.Claim) error { return d.(backend.Inspector).Break(t.Context(), c.Key) },
		} {
			c := claim(key)
			if _, err := d.Acquire(t.Context(), c); err != nil {
				t.Fatal(what, err)
			}
			if err := free(c); err != nil {
				t.Fatal(what, err)
			}
			gets(sharded, "0")
			if both {
				gets(plain, "0")
			}
			// From one node messages come in order: there was no other one.
			if err := set.Master(key).Client().Publish(t.Context(), name, "end").Err(); err != nil {
				t.Fatal(err)
			}
			gets(plain, "end")
		}
	}
}

func TestPublishTakesOneWord(t *testing.T) {
	_, err := hasp.Config{Strategy: "pubsublock", Nodes: []string{"redis://localhost:1"}, Params: hasp.Params{"publish": "all"}}.Driver(t.Context())
	if !errors.Is(err, backend.ErrInvalid) {
		t.Errorf("got %v", err)
	}
}
