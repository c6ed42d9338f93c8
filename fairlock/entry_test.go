package fairlock

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/redisstore"
	"github.com/hasplock/hasp/internal/redistest"
)

// An entry that replaces others of its token keeps the earliest of their places. The
// queue keeps its end, even if it had no other entry.
func TestEntryIsReplacedInItsPlace(t *testing.T) {
	srv := redistest.Start(t, &redistest.Options{Own: true})
	rdb, ctx := srv.Client(), t.Context()
	d := New(rdb, nil)
	defer d.Close()
	entry := func(token string, round int) string {
		return fmt.Sprint(token, " PUBLISH channel ", round, " 60000 0 an owner")
	}
	for _, c := range []struct {
		before []string
		older  []any
		after  []string
	}{
		{nil, nil, []string{entry("x", 3)}},
		{nil, []any{entry("x", 1)}, []string{entry("x", 3)}},
		{[]string{entry("x", 1)}, []any{entry("x", 1)}, []string{entry("x", 3)}},
		{[]string{entry("x", 3)}, nil, []string{entry("x", 3)}},
		{[]string{entry("a", 1), entry("b", 1)}, nil, []string{entry("a", 1), entry("b", 1), entry("x", 3)}},
		{[]string{entry("a", 1), entry("x", 3), entry("b", 1)}, nil, []string{entry("a", 1), entry("x", 3), entry("b", 1)}},
		{[]string{entry("a", 1), entry("x", 2), entry("b", 1)}, []any{entry("x", 1), entry("x", 2)}, []string{entry("a", 1), entry("x", 3), entry("b", 1)}},
		{[]string{entry("x", 2), entry("a", 1), entry("x", 1)}, []any{entry("x", 1), entry("x", 2)}, []string{entry("x", 3), entry("a", 1)}},
	} {
		for _, full := range []int{0, 1} {
			rdb.FlushAll(ctx)
			rdb.Set(ctx, "k", "fairlock- 0000000000000 holder 0 60000 its owner", time.Minute)
			args := append([]any{entry("x", 3), 60000, 5000, full}, c.older...)
			call := d.call("k", args...)
			for i, e := range c.before {
				rdb.ZAdd(ctx, call.Keys[2], redis.Z{Score: float64(7 + i), Member: e})
				rdb.PExpire(ctx, call.Keys[2], time.Minute)
			}
			if _, err := d.store.Run(ctx, enqueueScript, call); err != nil {
				t.Fatal(err)
			}
			if after := rdb.ZRange(ctx, call.Keys[2], 0, -1).Val(); !slices.Equal(after, c.after) {
				t.Errorf("%q and %q: got %q, want %q", c.before, c.older, after, c.after)
			}
			if left := rdb.PTTL(ctx, call.Keys[2]).Val(); left <= 0 {
				t.Errorf("%q and %q: the queue ends after %v", c.before, c.older, left)
			}
		}
	}
}

// newEntryLocked keeps every entry that may be in the queue, and never the new one.
func TestEntriesOfAWaiter(t *testing.T) {
	w := &waiter{entry: "c", older: []string{"a", "b"}}
	for _, c := range []struct {
		next string
		want []string
	}{{"c", []string{"a", "b", "c"}}, {"a", []string{"b", "c", "a"}}, {"d", []string{"b", "c", "a", "d"}}} {
		w.replaceEntryLocked(c.next)
		if got := w.entriesLocked(); !slices.Equal(got, c.want) {
			t.Errorf("after %q: %q, want %q", c.next, got, c.want)
		}
	}
}

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
