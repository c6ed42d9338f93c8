package caslock_test

import (
	"encoding/json"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/caslock"
	"github.com/hasplock/hasp/caslock/internal/memkv"
	"github.com/hasplock/hasp/internal/await"
)

// ahead returns mem as a process reads it whose wall clock is ahead: each time in it is earlier.
func ahead(mem *memkv.Store, by time.Duration) caslock.Store {
	return reads{mem, func(e *caslock.Entry) {
		var r map[string]json.RawMessage
		var items []map[string]any
		if json.Unmarshal(e.Value, &r) != nil || json.Unmarshal(r["items"], &items) != nil {
			return
		}
		for _, it := range items {
			it["ends"] = await.Value(time.Parse(time.RFC3339Nano, it["ends"].(string))).Add(-by)
		}
		r["items"], _ = json.Marshal(items)
		e.Value, _ = json.Marshal(r)
	}}
}

// A min hold lasts for an observer whose clock is ahead. To a caller that asks only once, it ends
// soon after its end.
func TestAMinHoldByOtherClocks(t *testing.T) {
	for _, by := range []time.Duration{0, 31 * time.Second} {
		synctest.Test(t, func(t *testing.T) {
			ctx, mem := t.Context(), memkv.New()
			c := claim("key", "first")
			first, other := open(t, mem), open(t, ahead(mem, by))
			await.Value(first.Acquire(ctx, c))
			c.KeepUntil = time.Now().Add(30 * time.Second)
			await.Must(t, first.Release(ctx, c))

			c.Token = "next"
			for range 29 {
				if _, err := other.Acquire(ctx, c); !errors.Is(err, backend.ErrHeld) {
					t.Errorf("clock ahead by %v: the min hold has ended early: %v", by, err)
				}
				time.Sleep(time.Second)
			}
			time.Sleep(62*time.Second - by)
			await.Value(open(t, ahead(mem, by)).Acquire(ctx, c))
		})
	}
}

// A store that has lost its last writes has the hold of a dead process again. That hold ends a term
// after this process has first seen it there.
func TestAHoldThatComesBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, mem := t.Context(), memkv.New()
		dead, other := open(t, mem), open(t, mem)
		c := claim("key", "dead")
		await.Value(dead.Acquire(ctx, c))
		lost := await.Value(mem.Get(ctx, "key"))
		await.Must(t, dead.Release(ctx, c))
		await.Value(other.Acquire(ctx, c))
		await.Must(t, other.Release(ctx, c))

		now := await.Value(mem.Get(ctx, "key"))
		await.Value(mem.Put(ctx, "key", lost.Value, now.Version))
		c.Token = "next"
		await.ErrorIs(t, "beside the hold that came back",
			await.ErrorOf(other.Acquire(ctx, c)), backend.ErrHeld)
		time.Sleep(c.TTL)
		await.Value(other.Acquire(ctx, c))
	})
}
