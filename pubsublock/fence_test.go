package pubsublock_test

import (
	"errors"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/pubsublock"
	"github.com/hasplock/hasp/spinlock"
)

const counter = "hasp:{k}:fence:k"

// The counter is one for all strategies of one Redis: a fence of either is
// larger than the last of the other.
func TestFenceGrowsOverReleaseExpiryLossAndStrategies(t *testing.T) {
	r := setup(t, nil)
	spin := spinlock.New(r.rdb, nil)
	last := uint64(0)
	next := func(what string, d backend.Inspector) {
		t.Helper()
		c := fenced("k")
		g, err := d.Acquire(t.Context(), c)
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if g.Fence <= last {
			t.Errorf("%s: fence %d after %d", what, g.Fence, last)
		}
		last = g.Fence
		if s, err := r.d.Inspect(t.Context(), "k"); s.Fence != last {
			t.Errorf("%s: inspect: %+v, %v", what, s, err)
		}
		if err := d.Release(t.Context(), c); err != nil {
			t.Error(err)
		}
	}
	next("first", r.d)
	next("after a release", r.d)
	next("of spinlock", spin)
	next("after spinlock's", r.d)
	r.acquire(t, fenced("k"))
	r.rdb.PExpire(t.Context(), "k", time.Millisecond)
	for r.rdb.Exists(t.Context(), "k").Val() == 1 {
		time.Sleep(time.Millisecond)
	}
	next("after an expiry", r.d)
	r.acquire(t, claim("k"))
	r.rdb.Del(t.Context(), "k")
	next("after an unfenced hold that was broken", r.d)
	r.rdb.FlushAll(t.Context())
	next("after the data was lost", r.d)

	ahead := uint64(time.Now().Add(time.Hour).UnixMicro())
	r.rdb.Set(t.Context(), counter, ahead, 0)
	next("after the server's clock was set back", r.d)
	if last != ahead+1 {
		t.Errorf("got %d, want %d", last, ahead+1)
	}
	next("of spinlock, after that", spin)
	if last != ahead+2 {
		t.Errorf("got %d, want %d", last, ahead+2)
	}
	next("after spinlock's", r.d)
	if left := r.left(t, counter); left <= pubsublock.DefaultFenceTTL-time.Minute || left > pubsublock.DefaultFenceTTL {
		t.Errorf("the counter is kept for %v", left)
	}
}

func TestFenceIsOnlyForThoseWhoAsk(t *testing.T) {
	r := setup(t, nil)
	if g := r.acquire(t, claim("k")); g.Fence != 0 {
		t.Errorf("got %d", g.Fence)
	}
	if n := r.rdb.Exists(t.Context(), counter).Val(); n != 0 {
		t.Error("a counter for nobody")
	}
}

func TestFenceTTLIsAnOption(t *testing.T) {
	r := setup(t, nil)
	r.d = pubsublock.New(r.rdb, &pubsublock.Options{FenceTTL: time.Hour})
	r.acquire(t, fenced("k"))
	if left := r.left(t, counter); left <= 59*time.Minute || left > time.Hour {
		t.Errorf("the counter is kept for %v", left)
	}
}

// What somebody else put where the counter goes is neither used nor
// overwritten, and nobody gets the key on the strength of it, nor waits for it.
func TestFenceCounterOfAnotherKindIsRefused(t *testing.T) {
	r := setup(t, nil)
	ctx := t.Context()
	for _, odd := range []string{"x", "-1", "1.5", "1e3", " 7", "7 ", "9007199254740991", "12345678901234567", strings.Repeat("9", 400), "hash"} {
		r.rdb.FlushAll(ctx)
		if odd == "hash" {
			r.rdb.HSet(ctx, counter, "a", "b")
		} else {
			r.rdb.Set(ctx, counter, odd, 0)
		}
		before := r.rdb.Dump(ctx, counter).Val()
		_, err := r.d.Acquire(ctx, fenced("k"))
		_, waited := r.d.Wait(ctx, fenced("k"))
		for _, err := range []error{err, waited} {
			if !errors.Is(err, backend.ErrInvalid) || !strings.Contains(err.Error(), strconv.Quote(counter)) {
				t.Errorf("%q: got %v", odd, err)
			}
		}
		if n := r.rdb.Exists(ctx, "k").Val(); n != 0 || r.rdb.Dump(ctx, counter).Val() != before {
			t.Errorf("%q: something was written", odd)
		}
		if s, err := r.d.Inspect(ctx, "k"); err != nil || s.Held {
			t.Errorf("%q: inspect: %+v, %v", odd, s, err)
		}
		r.acquire(t, claim("k")) // those who want no fence are not concerned
	}
	r.rdb.FlushAll(ctx)
	r.rdb.Set(ctx, counter, "9007199254740990", 0)
	if g := r.acquire(t, fenced("k")); g.Fence != 9007199254740991 {
		t.Errorf("the last fence there is: got %d", g.Fence)
	}
}
