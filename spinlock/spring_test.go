package spinlock_test

import (
	"errors"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
)

// spring does with plain commands what Spring Integration's RedisLockRegistry
// does within its scripts: the record is the bare id of a registry, kept under
// registryKey:path, with the expiry in milliseconds.
type spring struct {
	rig
	id string
}

func (s spring) obtain(t *testing.T, key string, ttl time.Duration) bool {
	ctx := t.Context()
	switch holder := s.rdb.Get(ctx, key); {
	case holder.Val() == s.id:
		return s.rdb.PExpire(ctx, key, ttl).Val()
	case holder.Err() == nil:
		return false
	}
	return s.rdb.Set(ctx, key, s.id, ttl).Val() == "OK"
}

func (s spring) renew(t *testing.T, key string, ttl time.Duration) bool {
	return s.rdb.Get(t.Context(), key).Val() == s.id && s.rdb.PExpire(t.Context(), key, ttl).Val()
}

func (s spring) unlock(t *testing.T, key string) bool {
	return s.rdb.Get(t.Context(), key).Val() == s.id && s.rdb.Unlink(t.Context(), key).Val() == 1
}

func TestSpringsRegistryAndHaspExcludeEachOther(t *testing.T) {
	r := setup(t, nil)
	java := spring{r, "8c0b3f0e-5d0c-4f6e-9a0e-0f3f0c8d9b1a"}
	const key = "registry:orders"

	if !java.obtain(t, key, time.Minute) {
		t.Fatal("spring cannot take a free key")
	}
	for _, c := range []backend.Claim{claim(key), fenced(key)} {
		var held *backend.HeldError
		_, err := r.d.Acquire(t.Context(), c)
		if !errors.As(err, &held) || held.RetryAfter < 30*time.Second || held.RetryAfter > time.Minute {
			t.Errorf("held by spring: got %v", err)
		}
		if err := r.renew(t, c); !errors.Is(err, backend.ErrLost) {
			t.Errorf("renew of spring's hold: %v", err)
		}
		if err := r.d.Release(t.Context(), c); !errors.Is(err, backend.ErrLost) {
			t.Errorf("release of spring's hold: %v", err)
		}
	}
	// The id of a registry is no token, not even for whoever knows it.
	if err := r.d.Release(t.Context(), backend.Claim{Key: key, Token: java.id}); !errors.Is(err, backend.ErrLost) {
		t.Errorf("release with spring's id: %v", err)
	}
	if !java.renew(t, key, time.Minute) || !java.unlock(t, key) {
		t.Error("spring has lost its hold")
	}

	for _, c := range []backend.Claim{claim(key), fenced(key)} {
		r.acquire(t, c)
		if java.obtain(t, key, time.Minute) {
			t.Error("spring takes what hasp holds")
		}
		if java.renew(t, key, time.Minute) || java.unlock(t, key) {
			t.Error("spring renews or frees what hasp holds")
		}
		if err := r.renew(t, c); err != nil {
			t.Error(err)
		}
		if err := r.d.Release(t.Context(), c); err != nil {
			t.Error(err)
		}
		if !java.obtain(t, key, time.Minute) || !java.unlock(t, key) {
			t.Error("spring cannot take what hasp freed")
		}
	}
}
