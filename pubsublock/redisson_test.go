package pubsublock_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
)

// redisson is one thread of one Redisson. It does with plain commands what RLock does in
// its scripts.
type redisson struct {
	rig
	key, channel string
	field        string // id:thread
}

// lock returns zero if it has taken the lock, and otherwise the rest of the holder's term.
func (j redisson) lock(t *testing.T, ttl time.Duration) time.Duration {
	t.Helper()
	ctx := t.Context()
	if j.Redis.Exists(ctx, j.key).Val() != 0 && !j.Redis.HExists(ctx, j.key, j.field).Val() {
		return j.Left(t, j.key)
	}
	await.Must(t, j.Redis.HIncrBy(ctx, j.key, j.field, 1).Err())
	j.Redis.PExpire(ctx, j.key, ttl)
	return 0
}

// renew renews the lock as the watchdog does.
func (j redisson) renew(t *testing.T, ttl time.Duration) bool {
	return j.Redis.HExists(t.Context(), j.key, j.field).Val() && j.Redis.PExpire(t.Context(), j.key, ttl).Val()
}

// unlock reports whether the thread held the lock.
func (j redisson) unlock(t *testing.T) bool {
	ctx := t.Context()
	if !j.Redis.HExists(ctx, j.key, j.field).Val() {
		return false
	}
	if j.Redis.HIncrBy(ctx, j.key, j.field, -1).Val() > 0 {
		return j.Redis.PExpire(ctx, j.key, time.Minute).Val()
	}
	return j.Redis.Del(ctx, j.key).Val() == 1 && j.Redis.Publish(ctx, j.channel, "0").Err() == nil
}

// threads has keys, and the channels that Redisson uses for them.
func threads(r rig) []redisson {
	const field = "8c0b3f0e-5d0c-4f6e-9a0e-0f3f0c8d9b1a:57"
	return []redisson{
		{r, "orders", "redisson_lock__channel:{orders}", field},
		{r, "app:{orders}:1", "redisson_lock__channel:app:{orders}:1", field},
		{r, "a}b", "redisson_lock__channel:{a}b}", field},
		{r, "a{b", "redisson_lock__channel:a{b", field},
	}
}

func TestRedissonAndHaspExcludeEachOther(t *testing.T) {
	r := setup(t, nil)
	for _, java := range threads(r) {
		for range 2 {
			if java.lock(t, time.Minute) != 0 {
				t.Fatal("redisson cannot take a free key, and again")
			}
		}
		// The name of a thread is no token, even if another program knows it.
		lost(t, "release with redisson's id", r.Driver.Release(t.Context(), backend.Claim{Key: java.key, Token: java.field}))
		if !java.renew(t, time.Minute) || !java.unlock(t) {
			t.Error("redisson has lost its hold")
		}
		want(t, "locked twice and unlocked once",
			await.ErrorOf(r.Driver.Acquire(t.Context(), claim(java.key))), backend.ErrHeld)
		if !java.unlock(t) {
			t.Error("redisson has lost its hold")
		}

		for _, c := range []backend.Claim{claim(java.key), fenced(java.key)} {
			r.Acquire(t, c)
			if left := java.lock(t, time.Minute); left <= term/2 || left > term {
				t.Errorf("redisson asks for what hasp holds, and hears %v", left)
			}
			if java.renew(t, time.Minute) || java.unlock(t) {
				t.Error("redisson renews or frees what hasp holds")
			}
			r.Release(t, c)
			if java.lock(t, time.Minute) != 0 || !java.unlock(t) {
				t.Error("redisson cannot take what hasp freed")
			}
		}
	}
}

func TestRedissonAndHaspWakeEachOther(t *testing.T) {
	bubble(t, func(t *testing.T, v *redistest.VirtualServer, a, b rig) {
		for _, java := range threads(b) {
			java.lock(t, time.Minute)
			java.lock(t, time.Minute)
			w := a.wait(t, java.key)
			time.Sleep(3500 * time.Millisecond)
			java.unlock(t)
			w.waits(t)
			time.Sleep(3500 * time.Millisecond)
			java.unlock(t)
			w.granted(t, time.Now(), 0, 0)

			sub := java.Redis.Subscribe(t.Context(), java.channel)
			await.Value(sub.Receive(t.Context()))
			heard := make(chan *redis.Message, 10)
			go func() {
				for {
					m, err := sub.ReceiveMessage(t.Context())
					if err != nil {
						return
					}
					heard <- m
				}
			}()
			unlock(t, w.lease)
			synctest.Wait()
			if len(heard) != 1 || (<-heard).Payload != "0" {
				t.Errorf("redisson has heard of a release of hasp's %d times", len(heard))
			}
			c := claim(java.key)
			a.Acquire(t, c)
			want(t, "break", a.Driver.Break(t.Context(), java.key), nil)
			// A call that frees nothing publishes nothing.
			lost(t, "release after a break", a.Driver.Release(t.Context(), c))
			want(t, "break of a free key", a.Driver.Break(t.Context(), java.key), nil)
			synctest.Wait()
			if len(heard) != 1 || (<-heard).Payload != "0" {
				t.Errorf("redisson has heard of a break %d times", len(heard))
			}
			sub.Close()
		}
	})
}
