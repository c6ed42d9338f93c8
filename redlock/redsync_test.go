package redlock_test

import (
	"errors"
	"testing"
	"time"

	"github.com/go-redsync/redsync/v4"
	redsyncredis "github.com/go-redsync/redsync/v4/redis"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/internal/strategytest"
	"github.com/hasplock/hasp/redlock"
)

// held fails the test unless the key is held, for hasp and for redsync.
func held(t *testing.T, what string, c *hasp.Client, rs *redsync.Redsync, key string) {
	t.Helper()
	_, err := c.TryLock(t.Context(), key)
	strategytest.Want(t, what+": hasp", err, hasp.ErrHeld)
	var taken *redsync.ErrTaken
	if err := rs.NewMutex(key).TryLock(); !errors.As(err, &taken) {
		t.Errorf("%s: redsync: got %v, want ErrTaken", what, err)
	}
}

func TestRedsyncAndHaspExcludeEachOther(t *testing.T) {
	nodes := redistest.StartNodes(t, 3, nil)
	c := await.Value(redlock.New(nodes.Clients(), &redlock.Options{Client: hasp.Options{Timeout: 20 * time.Second}}))
	defer c.Close()
	pools := make([]redsyncredis.Pool, 3)
	for i, rdb := range nodes.Clients() {
		pools[i] = goredis.NewPool(rdb)
	}
	rs := redsync.New(pools...)
	for _, key := range []string{"orders", "app:{orders}:1", "a}b", "a{b"} {
		m := rs.NewMutex(key, redsync.WithExpiry(2*time.Minute))
		for range 2 {
			await.Must(t, m.TryLock())
			held(t, "redsync holds it", c, rs, key)
			if s, err := c.Inspect(t.Context(), key); err != nil || !s.Held || s.Owner != "" || s.TTL <= time.Minute || s.TTL > 2*time.Minute {
				t.Errorf("inspect of what redsync holds: %+v, %v", s, err)
			}
			await.Value(m.Extend())
			await.Value(m.Unlock())

			lease := await.Value(c.TryLock(t.Context(), key, hasp.WithFence()))
			held(t, "hasp holds it", c, rs, key)
			// The former hold of redsync is gone.
			extended, _ := m.Extend()
			freed, _ := m.Unlock()
			if extended || freed {
				t.Errorf("redsync extends what hasp holds: %v, or frees it: %v", extended, freed)
			}
			strategytest.Want(t, "extend", lease.Extend(t.Context(), time.Minute/4), nil)
			strategytest.Unlock(t, lease)
		}
	}
}
