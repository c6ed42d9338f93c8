package fairlock_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
)

// If one node hangs, waiters for keys of another node keep their places.
func TestNodeThatHangsCostsNoPlaceElsewhere(t *testing.T) {
	await.Crowd(t)
	t.Parallel()
	cluster := redistest.StartCluster(t, &redistest.Options{Bare: true})
	ctx := t.Context()
	const window = time.Second
	open := func() backend.Waiter {
		d, err := hasp.Config{Strategy: "fairlock", Nodes: []string{cluster.URL()}, Params: hasp.Params{"window": window.String()}}.Driver(ctx)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { d.Close() })
		return d.(backend.Waiter)
	}
	here, there := cluster.Servers[0], cluster.Servers[1]
	var keys []string // many here, and one there
	for i := 0; len(keys) < 201; i++ {
		switch key := fmt.Sprint("key", i); cluster.Master(key) {
		case here:
			if len(keys) < 200 {
				keys = append(keys, key)
			}
		case there:
			if len(keys) == 200 {
				keys = append(keys, key)
			}
		}
	}

	holder, first, second := open(), open(), open()
	var held backend.Claim
	got := make(chan string, 2)
	wait := func(d backend.Waiter, owner, key string) {
		c := claim(key)
		c.Owner, c.Renewed = owner, true
		go func() {
			if _, err := d.Wait(ctx, c); err == nil {
				got <- owner
				d.Release(context.WithoutCancel(ctx), c)
			}
		}()
		atLast(t, owner+" waits for "+key, func() bool {
			s, err := d.(backend.Inspector).Inspect(ctx, key)
			return err == nil && slices.Contains(s.Waiters, owner)
		})
	}
	for _, key := range keys {
		held = claim(key)
		if _, err := holder.Acquire(ctx, held); err != nil {
			t.Fatal(err)
		}
		wait(first, "first", key)
	}
	wait(second, "second", held.Key)

	here.Pause()
	time.Sleep(3 * window) // a place without polls would be lost
	if err := holder.Release(ctx, held); err != nil {
		t.Fatal(err)
	}
	if owner := <-got; owner != "first" {
		t.Errorf("the %s got the key first", owner)
	}
	<-got
	here.Resume()
}

// A subscriber at a replica receives what is published on the master, which does
// not count it. It must receive no grant that the script takes back.
func TestSubscriberAtAReplicaReceivesNoGrant(t *testing.T) {
	t.Parallel()
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
	pipe.ZAdd(ctx, queueKey, redis.Z{Score: 1, Member: "waiter SPUBLISH " + channel + " 1 60000 0 elsewhere"})
	pipe.ZAdd(ctx, clientsKey, redis.Z{Score: float64(time.Now().Add(time.Hour).UnixMilli()), Member: channel})
	if _, err := pipe.Exec(ctx); err != nil {
		t.Fatal(err)
	}
	sub := replica.Client().SSubscribe(ctx, channel)
	defer sub.Close()
	if _, err := sub.Receive(ctx); err != nil {
		t.Fatal(err)
	}

	if err := d.Release(ctx, c); err != nil {
		t.Fatal(err)
	}
	if n := rdb.Exists(ctx, "k").Val(); n != 0 {
		t.Error("the key was handed to a subscriber that the master does not count")
	}
	if err := rdb.SPublish(ctx, channel, "the end").Err(); err != nil {
		t.Fatal(err)
	}
	m, err := sub.ReceiveMessage(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if m.Payload != "the end" {
		t.Errorf("received %q", m.Payload)
	}
}
