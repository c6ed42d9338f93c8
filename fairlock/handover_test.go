package fairlock

import (
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/redisstore"
	"github.com/hasplock/hasp/internal/redistest"
)

// A poll continues a hand-over where it stopped, unless the queue has changed.
func TestHandOverContinuesWhereItStopped(t *testing.T) {
	srv := redistest.Start(t, &redistest.Options{Own: true})
	rdb, ctx := srv.Client(), t.Context()
	sub := rdb.Subscribe(ctx, "c0", "c1", "c2")
	defer sub.Close()
	for range 3 {
		if _, err := sub.Receive(ctx); err != nil {
			t.Fatal(err)
		}
	}
	d := New(rdb, nil)
	defer d.Close()
	entry := func(i int) string { return fmt.Sprintf("t%d PUBLISH c%d 1 60000 0 owner of t%d", i, i, i) }
	for _, c := range []struct {
		position int
		before   string
		want     string
	}{{0, "", "t0"}, {1, entry(0), "t1"}, {2, entry(1), "t2"}, {2, entry(0), "t0"}, {1, "", "t0"}, {3, entry(2), ""}, {4, entry(3), "t0"}} {
		rdb.FlushAll(ctx)
		call := d.call("k", noCommand, "", redisstore.Millis(d.window), c.position, c.before)
		for i := range 3 {
			channel := fmt.Sprint("c", i)
			rdb.ZAdd(ctx, call.Keys[2], redis.Z{Score: float64(i + 1), Member: entry(i)})
			rdb.ZAdd(ctx, call.Keys[3], redis.Z{Score: float64(time.Now().Add(time.Hour).UnixMilli()), Member: channel})
		}
		reply, err := d.store.Run(ctx, pollScript, call)
		if s, ok := reportOf(reply); err != nil || !ok || s.token != c.want || c.want != "" && s.owner != "owner of "+c.want {
			t.Errorf("from position %d after %q: %+v, %v; want %q", c.position, c.before, s, err, c.want)
		}
	}
}
