package spinlock_test

import (
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/internal/strategytest"
	"github.com/hasplock/hasp/spinlock"
)

// spring does with plain commands what the RedisLockRegistry of Spring Integration does
// in its scripts. The record under registryKey:path is the id of the registry.
type spring struct {
	rig
	id string
}

func (s spring) obtain(t *testing.T, key string, ttl time.Duration) bool {
	ctx := t.Context()
	switch holder := s.Redis.Get(ctx, key); {
	case holder.Val() == s.id:
		return s.Redis.PExpire(ctx, key, ttl).Val()
	case holder.Err() == nil:
		return false
	}
	return s.Redis.Set(ctx, key, s.id, ttl).Val() == "OK"
}

func (s spring) renew(t *testing.T, key string, ttl time.Duration) bool {
	return s.Redis.Get(t.Context(), key).Val() == s.id && s.Redis.PExpire(t.Context(), key, ttl).Val()
}

func (s spring) unlock(t *testing.T, key string) bool {
	return s.Redis.Get(t.Context(), key).Val() == s.id && s.Redis.Unlink(t.Context(), key).Val() == 1
}

func TestSpringsRegistryAndHaspExcludeEachOther(t *testing.T) {
	r := setup(t, nil)
	java := spring{r, "8c0b3f0e-5d0c-4f6e-9a0e-0f3f0c8d9b1a"}
	const key = "registry:orders"

	if !java.obtain(t, key, time.Minute) {
		t.Fatal("spring cannot take a free key")
	}
	strategytest.Want(t, "held by spring", strategytest.ErrOf(r.Driver.Acquire(t.Context(), claim(key))), backend.ErrHeld)
	// The id of a registry is no token, even if another program knows it.
	strategytest.Lost(t, "release with spring's id", r.Driver.Release(t.Context(), backend.Claim{Key: key, Token: java.id}))
	if !java.renew(t, key, time.Minute) || !java.unlock(t, key) {
		t.Error("spring has lost its hold")
	}

	for _, c := range []backend.Claim{claim(key), fenced(key)} {
		r.Acquire(t, c)
		if java.obtain(t, key, time.Minute) || java.renew(t, key, time.Minute) || java.unlock(t, key) {
			t.Error("spring takes, renews or frees what hasp holds")
		}
		r.Release(t, c)
		if !java.obtain(t, key, time.Minute) || !java.unlock(t, key) {
			t.Error("spring cannot take what hasp freed")
		}
	}
}

// A registry of the type PUB_SUB_LOCK subscribes to a pattern. A message names a
// key, and the registry wakes the threads that wait for that key.
func TestReleasesWakeSpringsRegistryIfAsked(t *testing.T) {
	r := setup(t, redistest.Real)
	const key = "registry:orders"
	sub := r.Redis.PSubscribe(t.Context(), "registry-channel:*")
	defer sub.Close()
	await.Value(sub.Receive(t.Context()))
	config := hasp.Config{
		Strategy: "spinlock",
		Nodes:    []string{r.Server.URL()},
		Params:   map[string]string{"registry": "registry"},
	}
	byURL := await.Value(config.Driver(t.Context()))
	defer byURL.Close()
	heard := func(want bool, what string) {
		t.Helper()
		// Messages of one connection arrive in order.
		r.Redis.Publish(t.Context(), "registry-channel:end", "end")
		ctx := await.Timeout(t, 20*time.Second)
		var all []*redis.Message
		for {
			m := await.Value(sub.ReceiveMessage(ctx))
			if m.Payload == "end" {
				break
			}
			all = append(all, m)
		}
		if want != (len(all) == 1) || want && (all[0].Channel != "registry-channel:"+key || all[0].Payload != key) {
			t.Errorf("%s: spring was sent %v", what, all)
		}
	}
	handedIn := await.Value(spinlock.NewDriver(r.Redis, &spinlock.Options{Registry: "registry"})).(Driver)
	for name, d := range map[string]backend.Driver{"by URL": byURL, "handed in": handedIn, "not asked": r.Driver} {
		asked := name != "not asked"
		c := claim(key)
		await.Value(d.Acquire(t.Context(), c))
		heard(false, name+": acquire")
		strategytest.Lost(t, name, d.Release(t.Context(), claim(key)))
		heard(false, name+": release of another's hold")
		strategytest.Want(t, "release", d.Release(t.Context(), c), nil)
		heard(asked, name+": release")
		one, two := shared(key), shared(key)
		r.Acquire(t, one)
		r.Acquire(t, two)
		strategytest.Want(t, "release", d.Release(t.Context(), one), nil)
		heard(false, name+": release of the first of two readers")
		strategytest.Want(t, "release", d.Release(t.Context(), two), nil)
		heard(asked, name+": release of the last reader")
		r.Acquire(t, claim(key))
		for i := range 2 {
			strategytest.Want(t, "break", d.(backend.Inspector).Break(t.Context(), key), nil)
			heard(asked && i == 0, name+": break")
		}
	}

	// Without the right to publish, the key is still freed.
	r.Forbid(t, "-publish")
	c := claim(key)
	r.Acquire(t, c)
	strategytest.Want(t, "release", handedIn.Release(t.Context(), c), nil)
	r.Acquire(t, c)
}
