package fairlock_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
)

// A subscriber at a replica receives what is published on the master, which does
// not count it. It must receive no grant that the script takes back.
func TestSubscriberAtAReplicaReceivesNoGrant(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t, nil)
	ctx := t.Context()
	master := cluster.Master("k")
	replica := cluster.Servers[slices.Index(cluster.Servers, master)+len(cluster.Servers)/2]
	d := await.Value(hasp.Config{Strategy: "fairlock", Nodes: []string{cluster.URL()}}.Driver(ctx))
	defer d.Close()

	const channel = "hasp:{k}:grant:elsewhere"
	rdb := master.Client()
	pipe := rdb.Pipeline()
	pipe.RPush(ctx, queueKey, "waiter SPUBLISH "+channel+" 1 60000 0 elsewhere")
	pipe.ZAdd(ctx, timeoutsKey, redis.Z{Score: float64(time.Now().Add(time.Hour).UnixMilli()), Member: "waiter"})
	await.Must(t, errOf(pipe.Exec(ctx)))
	sub := replica.Client().SSubscribe(ctx, channel)
	defer sub.Close()
	await.Must(t, errOf(sub.Receive(ctx)))

	for _, right := range []string{"+pubsub", "-pubsub"} {
		await.Must(t, rdb.Do(ctx, "acl", "setuser", "default", right).Err())
		c := claim("k")
		await.Must(t, rdb.Set(ctx, "k", "fairlock+ 0000000000000 "+c.Token+" 0 60000 owner", time.Minute).Err())
		await.Must(t, d.Release(ctx, c))
		if n := rdb.Exists(ctx, "k").Val(); n != 0 {
			t.Errorf("%s: the key was handed to a subscriber that the master does not count", right)
		}
		await.Must(t, rdb.SPublish(ctx, channel, "the end").Err())
		for payload := ""; payload != "the end"; {
			payload = await.Value(sub.ReceiveMessage(ctx)).Payload
			if strings.HasPrefix(payload, "waiter") {
				t.Errorf("%s: received %q", right, payload)
			}
		}
	}
}
