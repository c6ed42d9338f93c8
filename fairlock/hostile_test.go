package fairlock_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
)

// If a key of the queue has a value of another type, waits report it, no script
// changes it, and holds are not affected.
func TestQueueOfAnotherTypeIsReportedAndLeftAlone(t *testing.T) {
	for _, kind := range []string{"queue", "entries", "alive"} {
		r := setup(t, nil)
		foreign := "hasp:{k}:" + kind + ":k"
		holder := claim("k")
		r.acquire(t, holder)
		r.rdb.Set(t.Context(), foreign, "foreign", 0)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		var held *backend.HeldError
		if _, err := r.d.Acquire(ctx, claim("k")); !errors.As(err, &held) {
			t.Errorf("%s: acquire: %v", kind, err)
		}
		if _, err := r.d.Wait(ctx, claim("k")); !errors.Is(err, backend.ErrInvalid) || !strings.Contains(err.Error(), foreign) {
			t.Errorf("%s: wait: %v", kind, err)
		}
		if s, err := r.d.Inspect(ctx, "k"); err != nil || s.Owner != holder.Owner || len(s.Waiters) > 0 {
			t.Errorf("%s: inspect: %+v, %v", kind, s, err)
		}
		if err := r.d.Release(ctx, holder); err != nil {
			t.Errorf("%s: release: %v", kind, err)
		}
		next := claim("k")
		switch _, err := r.d.Acquire(ctx, next); {
		case kind != "queue" && err != nil, kind == "queue" && !errors.Is(err, backend.ErrInvalid):
			t.Errorf("%s: acquire a free key: %v", kind, err)
		case err == nil:
			if err := r.d.Release(ctx, next); err != nil {
				t.Errorf("%s: release again: %v", kind, err)
			}
		}
		if got := r.rdb.Get(ctx, foreign).Val(); got != "foreign" {
			t.Errorf("%s: it holds %q", kind, got)
		}
		if left := r.rdb.Keys(ctx, "*").Val(); len(left) != 1 {
			t.Errorf("%s: left %q", kind, left)
		}
		r.rdb.Del(ctx, foreign)
		r.acquire(t, claim("k"))
		r.rdb.FlushAll(ctx)
	}
}

// The term of a foreign record may be longer than a Duration can be.
func TestTermBeyondADuration(t *testing.T) {
	r := setup(t, nil)
	r.rdb.Set(t.Context(), "k", "foreign", 0)
	r.rdb.Do(t.Context(), "pexpire", "k", int64(1)<<50)
	var held *backend.HeldError
	if _, err := r.d.Acquire(t.Context(), claim("k")); !errors.As(err, &held) || held.RetryAfter <= 0 {
		t.Errorf("got %#v", err)
	}
	if s, err := r.d.Inspect(t.Context(), "k"); err != nil || s.TTL <= 0 {
		t.Errorf("inspect: %+v, %v", s, err)
	}
}
