package spinlock_test

import (
	"errors"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redistest"
)

// An attempt that follows a refusal is one command of the client. It finds the same
// hold, the hold of another, a foreign value, or a free key.
func TestAttemptAfterARefusal(t *testing.T) {
	srv := redistest.Start(t, &redistest.Options{Own: true, Real: true})
	p := srv.Proxy()
	o := srv.ClientOptions()
	o.Addr = p.Addr()
	behind := redis.NewClient(o)
	defer behind.Close()
	r := rig{Server: srv, Redis: srv.Client(), Driver: open(behind)}
	ctx := t.Context()

	refused := func(what, owner string, term bool) {
		t.Helper()
		// The server must know the script, and the driver must have been refused.
		_, _ = r.Driver.Acquire(ctx, claim("k"))
		_, _ = r.Driver.Acquire(ctx, claim("k"))
		p.Commands()
		_, err := r.Driver.Acquire(ctx, claim("k"))
		var held *backend.HeldError
		if !errors.As(err, &held) || held.Owner != owner || held.RetryAfter > 0 != term {
			t.Errorf("%s: got %#v", what, err)
		}
		if cmds := p.Commands(); len(cmds) != 1 && owner != "" {
			t.Errorf("%s: %q", what, cmds)
		}
	}

	first := claim("k")
	r.Acquire(t, first)
	refused("the same hold", first.Owner, true)

	second := claim("k")
	r.Redis.Set(ctx, "k", second.Token+"#"+second.Owner, time.Minute)
	_, err := r.Driver.Acquire(ctx, claim("k"))
	var held *backend.HeldError
	if !errors.As(err, &held) || held.Owner != second.Owner || held.RetryAfter <= 50*time.Second {
		t.Errorf("the hold of another: got %#v", err)
	}
	refused("that hold", second.Owner, true)

	r.Redis.Persist(ctx, "k")
	third := claim("k")
	r.Redis.Set(ctx, "k", third.Token+"#"+third.Owner, 0)
	refused("a hold without an end", third.Owner, false)

	for what, store := range map[string]func() error{
		"a hash":          func() error { return r.Redis.HSet(ctx, "k", "f", "v").Err() },
		"an empty string": func() error { return r.Redis.Set(ctx, "k", "", time.Minute).Err() },
	} {
		// The driver remembers the refusal by a string with an owner.
		r.Redis.Set(ctx, "k", third.Token+"#"+third.Owner, 0)
		_, _ = r.Driver.Acquire(ctx, claim("k"))
		r.Redis.Del(ctx, "k")
		if err := store(); err != nil {
			t.Fatal(err)
		}
		refused(what, "", what != "a hash")
	}

	r.Redis.Set(ctx, "k", third.Token+"#"+third.Owner, 0)
	refused("a hold", third.Owner, false)
	r.Redis.Del(ctx, "k")
	p.Commands()
	c := claim("k")
	r.Acquire(t, c)
	if cmds := p.Commands(); len(cmds) != 1 {
		t.Errorf("a free key: %q", cmds)
	}
	if got := r.Redis.Get(ctx, "k").Val(); got != c.Token+"#"+c.Owner || r.Redis.PTTL(ctx, "k").Val() <= 0 {
		t.Errorf("a free key: the record is %q", got)
	}
}

// A refusal is remembered for a second. Then the rest of the term is read again, because
// the holder may have renewed.
func TestTermOfARefusalIsReadAgain(t *testing.T) {
	r := setup(t, nil)
	r.Acquire(t, claim("k"))
	for _, term := range []time.Duration{time.Minute, time.Hour} {
		r.Redis.PExpire(t.Context(), "k", term)
		_, err := r.Driver.Acquire(t.Context(), claim("k"))
		var held *backend.HeldError
		if !errors.As(err, &held) || held.RetryAfter > term || held.RetryAfter < term-30*time.Second {
			t.Errorf("the term runs for %v: got %#v", term, err)
		}
		time.Sleep(1100 * time.Millisecond)
	}
}

// A RedisLockRegistry of Spring writes the same record for each of its holds. Another
// hold with that record is not taken for the one that was found before.
func TestRecordsThatAreUsedAgain(t *testing.T) {
	r := setup(t, nil)
	for _, term := range []time.Duration{time.Minute, time.Hour} {
		r.Redis.Set(t.Context(), "k", "6a0a6b0e-0001-4f0e-9a51-000000000000", term)
		_, err := r.Driver.Acquire(t.Context(), claim("k"))
		var held *backend.HeldError
		if !errors.As(err, &held) || held.RetryAfter > term || held.RetryAfter < term-30*time.Second {
			t.Errorf("the term runs for %v: got %#v", term, err)
		}
	}
}
