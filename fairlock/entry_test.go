package fairlock

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

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
