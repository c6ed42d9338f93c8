package strategytest

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
)

// counter is the Redis key of the fence counter of the key k.
const counter = "hasp:{k}:fence:k"

// FenceCounter proves that the first fence is the server's time in microseconds. Therefore this
// fence is larger than all earlier fences even if the counter was lost. If the clock was set back,
// each later fence is one larger than the fence before. The counter is kept for the FenceTTL. All
// strategies on one Redis share the counter. A claim without a fence does not touch it.
func (s Strategy) FenceCounter(t *testing.T) {
	r := s.setup(t, nil)
	byOption := await.Value(s.New(r.Redis, time.Hour)).(backend.Inspector)

	for _, shared := range []bool{false, true} {
		c := Claim("k")
		c.Shared = shared
		if g := r.Acquire(t, c); g.Fence != 0 || r.Redis.Exists(t.Context(), counter).Val() != 0 {
			t.Errorf("shared %t: fence %d, or a counter, for a claim without a fence", shared,
				g.Fence)
		}

		r.Release(t, c)

		c.Fenced = true
		from := r.Redis.Time(t.Context()).Val()
		g := r.Acquire(t, c)
		to := r.Redis.Time(t.Context()).Val()
		if g.Fence < uint64(from.UnixMicro()) || g.Fence > uint64(to.UnixMicro()) {
			t.Errorf("shared %t: fence %d, want one from %d to %d", shared, g.Fence,
				from.UnixMicro(), to.UnixMicro())
		}

		r.Release(t, c)

		next := uint64(to.Add(time.Hour).UnixMicro())
		r.Redis.Set(t.Context(), counter, next, 0)
		for d, kept := range map[backend.Inspector]time.Duration{
			r.Driver: 30 * 24 * time.Hour, byOption: time.Hour,
		} {
			next++
			g, err := d.Acquire(t.Context(), c)
			if err != nil || g.Fence != next {
				t.Errorf("shared %t: fence %d, %v, want %d", shared, g.Fence, err, next)
			}
			if left := r.Left(t, counter); left <= kept-time.Minute || left > kept {
				t.Errorf("shared %t: the counter is kept for %v, want %v", shared, left, kept)
			}

			Want(t, "break", r.Driver.Break(t.Context(), "k"), nil)
			if st, err := r.Driver.Inspect(t.Context(), "k"); st.Held || st.Fence != next {
				t.Errorf("shared %t: inspect: %+v, %v", shared, st, err)
			}
		}

		r.Redis.Del(t.Context(), counter)
	}
}

// ForeignFenceCounterIsRefused proves that a value of another program under the counter's key is
// neither used nor overwritten. Until that value is removed, a fenced claim neither takes the key
// nor waits for the key.
func (s Strategy) ForeignFenceCounterIsRefused(t *testing.T) {
	r := s.setup(t, nil)
	ctx := t.Context()
	calls := map[string]func(context.Context, backend.Claim) (backend.Grant, error){
		"acquire": r.Driver.Acquire,
	}

	if w, ok := r.Driver.(backend.Waiter); ok {
		calls["wait"] = w.Wait
	}

	for _, odd := range []string{
		"x", "-1", "1.5", "1e3", " 7", "7 ", "9007199254740991", "12345678901234567",
		strings.Repeat("9", 400), "hash",
	} {
		r.Redis.FlushAll(ctx)
		if odd == "hash" {
			r.Redis.HSet(ctx, counter, "a", "b")
		} else {
			r.Redis.Set(ctx, counter, odd, 0)
		}

		before := r.Redis.Dump(ctx, counter).Val()
		for name, call := range calls {
			for _, shared := range []bool{false, true} {
				c := Fenced("k")
				c.Shared = shared
				_, err := call(ctx, c)
				names := strings.Contains(fmt.Sprint(err), strconv.Quote(counter))
				if !errors.Is(err, backend.ErrInvalid) || !names {
					t.Errorf("%q: %s, shared %t: got %v", odd, name, shared, err)
				}
			}
		}

		n := r.Redis.Exists(ctx, "k").Val()
		if n != 0 || r.Redis.Dump(ctx, counter).Val() != before {
			t.Errorf("%q: something was written", odd)
		}
		if got, err := r.Driver.Inspect(ctx, "k"); err != nil || got.Held {
			t.Errorf("%q: inspect: %+v, %v", odd, got, err)
		}

		r.Acquire(t, Claim("k")) // an unfenced claim does not read the counter
	}

	r.Redis.FlushAll(ctx)
	r.Redis.Set(ctx, counter, "9007199254740990", 0)
	if g := r.Acquire(t, Fenced("k")); g.Fence != 9007199254740991 {
		t.Errorf("the last fence: got %d", g.Fence)
	}
}
