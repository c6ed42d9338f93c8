package strategytest

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/spinlock"
)

// counter is the key of the fence counter of key k.
const counter = "hasp:{k}:fence:k"

// counterKept fails the test unless the counter is kept for want.
func counterKept(t *testing.T, r rig, want time.Duration) {
	t.Helper()
	if left := r.Left(t, counter); left <= want-time.Minute || left > want {
		t.Errorf("the counter is kept for %v, want %v", left, want)
	}
}

// FenceGrows proves that a fence is larger than every earlier one, whatever
// ended the hold before. All strategies on one Redis share a counter.
func (s Strategy) FenceGrows(t *testing.T) {
	r := s.setup(t, nil)
	last := uint64(0)
	grows := func(what string, d backend.Inspector) {
		t.Helper()
		c := Fenced("k")
		g, err := d.Acquire(t.Context(), c)
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if g.Fence <= last {
			t.Errorf("%s: fence %d after %d", what, g.Fence, last)
		}
		last = g.Fence
		if got, err := r.Driver.Inspect(t.Context(), "k"); got.Fence != last {
			t.Errorf("%s: inspect: %+v, %v", what, got, err)
		}
		Want(t, "release", d.Release(t.Context(), c), nil)
	}
	spin := spinlock.New(r.Redis, nil)

	grows("first", r.Driver)
	grows("after a release", r.Driver)
	grows("of spinlock", spin)
	grows("after one of spinlock", r.Driver)

	last = r.Acquire(t, Fenced("k")).Fence
	r.Redis.PExpire(t.Context(), "k", time.Millisecond)
	await.Until(t, "the hold has expired", func() bool { return r.Redis.Exists(t.Context(), "k").Val() == 0 })
	grows("after an expiry", r.Driver)

	r.Acquire(t, Claim("k"))
	r.Redis.Del(t.Context(), "k")
	grows("after an unfenced hold that was deleted", r.Driver)
	r.Redis.FlushAll(t.Context())
	grows("after the data was lost", r.Driver)

	ahead := uint64(time.Now().Add(time.Hour).UnixMicro())
	r.Redis.Set(t.Context(), counter, ahead, 0)
	grows("after the server's clock was set back", r.Driver)
	if last != ahead+1 {
		t.Errorf("got %d, want %d", last, ahead+1)
	}
	grows("of spinlock, after that", spin)
	if last != ahead+2 {
		t.Errorf("got %d, want %d", last, ahead+2)
	}
	grows("after one of spinlock", r.Driver)
	counterKept(t, r, s.DefaultFenceTTL)
}

// FenceOnlyOnRequest proves that an unfenced claim neither gets a fence nor
// leaves a counter.
func (s Strategy) FenceOnlyOnRequest(t *testing.T) {
	r := s.setup(t, nil)
	if g := r.Acquire(t, Claim("k")); g.Fence != 0 {
		t.Errorf("got %d", g.Fence)
	}
	if n := r.Redis.Exists(t.Context(), counter).Val(); n != 0 {
		t.Error("there is a counter")
	}
}

// FenceTTLIsAnOption proves that the option FenceTTL sets how long the counter is kept.
func (s Strategy) FenceTTLIsAnOption(t *testing.T) {
	r := s.setup(t, nil)
	r.Driver = s.New(r.Redis, time.Hour)
	r.Acquire(t, Fenced("k"))
	counterKept(t, r, time.Hour)
}

// NewFenceCounterIsTheServersTime proves that a counter that was lost begins
// with the server's time in microseconds. That is above all earlier fences.
func (s Strategy) NewFenceCounterIsTheServersTime(t *testing.T) {
	r := s.setup(t, nil)
	from := r.Redis.Time(t.Context()).Val()
	g := r.Acquire(t, Fenced("k"))
	to := r.Redis.Time(t.Context()).Val()
	if g.Fence < uint64(from.UnixMicro()) || g.Fence > uint64(to.UnixMicro()) {
		t.Errorf("fence %d, want one from %d to %d", g.Fence, from.UnixMicro(), to.UnixMicro())
	}
}

// ForeignFenceCounterIsRefused proves that a value of another program in the
// counter's place is neither used nor overwritten. No fenced claim gets the key
// or waits for it.
func (s Strategy) ForeignFenceCounterIsRefused(t *testing.T) {
	r := s.setup(t, nil)
	ctx := t.Context()
	calls := map[string]func(context.Context, backend.Claim) (backend.Grant, error){"acquire": r.Driver.Acquire}
	if w, ok := r.Driver.(backend.Waiter); ok {
		calls["wait"] = w.Wait
	}
	for _, odd := range []string{"x", "-1", "1.5", "1e3", " 7", "7 ", "9007199254740991", "12345678901234567", strings.Repeat("9", 400), "hash"} {
		r.Redis.FlushAll(ctx)
		if odd == "hash" {
			r.Redis.HSet(ctx, counter, "a", "b")
		} else {
			r.Redis.Set(ctx, counter, odd, 0)
		}
		before := r.Redis.Dump(ctx, counter).Val()
		for name, call := range calls {
			if _, err := call(ctx, Fenced("k")); !errors.Is(err, backend.ErrInvalid) || !strings.Contains(err.Error(), strconv.Quote(counter)) {
				t.Errorf("%q: %s: got %v", odd, name, err)
			}
		}
		if n := r.Redis.Exists(ctx, "k").Val(); n != 0 || r.Redis.Dump(ctx, counter).Val() != before {
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

	// A counter that may not be read is another error: there is nothing to remove.
	r = s.setup(t, &redistest.Options{Own: true, Real: true})
	r.Forbid(t, "-getrange")
	_, err := r.Driver.Acquire(ctx, Fenced("j"))
	Outage(t, "a counter that may not be read", err)
}

// OddKeysDoNotMeet proves that keys of any bytes are locks of their own with
// fences of their own, even if they look like the keys that hasp adds.
func (s Strategy) OddKeysDoNotMeet(t *testing.T) {
	r := s.setup(t, nil)
	keys := []string{"k", counter, "hasp:{k}:lock:k", "hasp:{" + counter + "}:fence:" + counter, "hasp:{", "hasp:{}", "hasp:{k}",
		"{", "}", "{}", "}{", "a{b}c", "a}b", "{a}b}c", "a\x00b", "a\r\nb", "\U0001f512", "\xff\xfe", " ", "*", strings.Repeat("k", 1000), strings.Repeat("}", 1000)}
	held := map[string]backend.Claim{}
	fences := map[string]uint64{}
	for round := range 2 {
		for _, key := range keys {
			c := Fenced(key)
			g := r.Acquire(t, c)
			if g.Fence <= fences[key] {
				t.Errorf("round %d: %.40q: fence %d after %d", round, key, g.Fence, fences[key])
			}
			held[key], fences[key] = c, g.Fence
		}
		for _, key := range keys {
			got, err := r.Driver.Inspect(t.Context(), key)
			if err != nil || !got.Held || got.Owner != held[key].Owner || got.Fence != fences[key] {
				t.Errorf("%.40q: %+v, %v; want owner %q, fence %d", key, got, err, held[key].Owner, fences[key])
			}
			if err := r.Renew(t, held[key]); err != nil {
				t.Errorf("%.40q: renew: %v", key, err)
			}
			if err := r.Driver.Release(t.Context(), held[key]); err != nil {
				t.Errorf("%.40q: release: %v", key, err)
			}

			// An unfenced lock leaves all counters as they are.
			c := Claim(key)
			r.Acquire(t, c)
			if err := r.Driver.Release(t.Context(), c); err != nil {
				t.Errorf("%.40q: %v", key, err)
			}
		}
	}
	if n := r.Redis.DBSize(t.Context()).Val(); n != int64(len(keys)) {
		t.Errorf("%d keys are left, want the %d counters", n, len(keys))
	}
	for _, name := range r.Redis.Keys(t.Context(), "*").Val() {
		if r.Left(t, name) <= 0 {
			t.Errorf("%.60q has no end", name)
		}
	}
}
