package fairlock_test

import (
	"errors"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/fairlock"
)

const counter = "hasp:{k}:fence:k"

func TestFenceGrowsOverReleaseExpiryAndLoss(t *testing.T) {
	r := setup(t, nil)
	last := uint64(0)
	next := func(what string) {
		t.Helper()
		c := fenced("k")
		g := r.acquire(t, c)
		if g.Fence <= last {
			t.Errorf("%s: fence %d after %d", what, g.Fence, last)
		}
		last = g.Fence
		if s, err := r.d.Inspect(t.Context(), "k"); s.Fence != last {
			t.Errorf("%s: inspect: %+v, %v", what, s, err)
		}
		if err := r.d.Release(t.Context(), c); err != nil {
			t.Error(err)
		}
	}
	next("first")
	next("after a release")
	c := fenced("k")
	last = r.acquire(t, c).Fence
	r.rdb.PExpire(t.Context(), "k", time.Millisecond)
	for r.rdb.Exists(t.Context(), "k").Val() == 1 {
		time.Sleep(time.Millisecond)
	}
	next("after an expiry")
	r.acquire(t, claim("k"))
	r.rdb.Del(t.Context(), "k")
	next("after an unfenced hold that was broken")
	r.rdb.FlushAll(t.Context())
	next("after the data was lost")

	ahead := uint64(time.Now().Add(time.Hour).UnixMicro())
	r.rdb.Set(t.Context(), counter, ahead, 0)
	next("after the server's clock was set back")
	if last != ahead+1 {
		t.Errorf("got %d, want %d", last, ahead+1)
	}
	if left := r.left(t, counter); left <= fairlock.DefaultFenceTTL-time.Minute || left > fairlock.DefaultFenceTTL {
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
	r.d = fairlock.New(r.rdb, &fairlock.Options{FenceTTL: time.Hour})
	r.acquire(t, fenced("k"))
	if left := r.left(t, counter); left <= 59*time.Minute || left > time.Hour {
		t.Errorf("the counter is kept for %v", left)
	}
}

// What somebody else put where the counter goes is neither used nor
// overwritten, and nobody gets the key on the strength of it.
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
		if !errors.Is(err, backend.ErrInvalid) || !strings.Contains(err.Error(), strconv.Quote(counter)) {
			t.Errorf("%q: got %v", odd, err)
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

// A counter that was lost begins with the server's time in microseconds, which
// is above all fences that were given before.
func TestFenceOfANewCounterIsTheServersTime(t *testing.T) {
	r := setup(t, nil)
	from := r.rdb.Time(t.Context()).Val()
	g := r.acquire(t, fenced("k"))
	to := r.rdb.Time(t.Context()).Val()
	if g.Fence < uint64(from.UnixMicro()) || g.Fence > uint64(to.UnixMicro()) {
		t.Errorf("fence %d, want one from %d to %d", g.Fence, from.UnixMicro(), to.UnixMicro())
	}
}

// Keys of any bytes are locks of their own, with fences of their own, also
// those that look like what hasp keeps beside a lock.
func TestOddKeysDoNotMeet(t *testing.T) {
	r := setup(t, nil)
	keys := []string{"k", counter, "hasp:{k}:lock:k", "hasp:{" + counter + "}:fence:" + counter, "hasp:{", "hasp:{}", "hasp:{k}",
		"{", "}", "{}", "}{", "a{b}c", "a}b", "{a}b}c", "a\x00b", "a\r\nb", "\U0001f512", "\xff\xfe", " ", "*", strings.Repeat("k", 1000), strings.Repeat("}", 1000)}
	held := map[string]backend.Claim{}
	fences := map[string]uint64{}
	for round := range 2 {
		for _, key := range keys {
			c := fenced(key)
			g := r.acquire(t, c)
			if g.Fence <= fences[key] {
				t.Errorf("round %d: %.40q: fence %d after %d", round, key, g.Fence, fences[key])
			}
			held[key], fences[key] = c, g.Fence
		}
		for _, key := range keys {
			s, err := r.d.Inspect(t.Context(), key)
			if err != nil || !s.Held || s.Owner != held[key].Owner || s.Fence != fences[key] {
				t.Errorf("%.40q: %+v, %v; want owner %q, fence %d", key, s, err, held[key].Owner, fences[key])
			}
			if err := r.renew(t, held[key]); err != nil {
				t.Errorf("%.40q: renew: %v", key, err)
			}
			if err := r.d.Release(t.Context(), held[key]); err != nil {
				t.Errorf("%.40q: release: %v", key, err)
			}
			// An unfenced lock beside the counters disturbs none of them.
			c := claim(key)
			r.acquire(t, c)
			if err := r.d.Release(t.Context(), c); err != nil {
				t.Errorf("%.40q: %v", key, err)
			}
		}
	}
	if n := r.rdb.DBSize(t.Context()).Val(); n != int64(len(keys)) {
		t.Errorf("%d keys are left, want the %d counters", n, len(keys))
	}
	for _, name := range r.rdb.Keys(t.Context(), "*").Val() {
		if r.left(t, name) <= 0 {
			t.Errorf("%.60q has no end", name)
		}
	}
}
