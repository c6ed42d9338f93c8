package pubsublock_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/pubsublock"
)

// rig is a driver on a Redis of its own, and a client beside it.
type rig struct {
	srv *redistest.Server
	rdb *redis.Client
	d   *pubsublock.Driver
}

func setup(t *testing.T, o *redistest.Options) rig {
	t.Helper()
	if o == nil {
		o = &redistest.Options{Own: true}
	}
	srv := redistest.Start(t, o)
	rdb := srv.Client()
	return rig{srv, rdb, pubsublock.New(rdb, nil)}
}

var serial atomic.Int64

// term is how long holds last. Half of it is left when a test looks, however
// slow the machine.
const term = time.Minute

// claim returns the claim of a new attempt.
func claim(key string) backend.Claim {
	n := serial.Add(1)
	return backend.Claim{Key: key, Token: fmt.Sprintf("token-%d", n), Owner: fmt.Sprintf("owner %d", n),
		TTL: term, Timeout: 3 * time.Second}
}

func fenced(key string) backend.Claim {
	c := claim(key)
	c.Fenced = true
	return c
}

func (r rig) acquire(t *testing.T, c backend.Claim) backend.Grant {
	t.Helper()
	g, err := r.d.Acquire(t.Context(), c)
	if err != nil {
		t.Fatalf("acquire %q: %v", c.Key, err)
	}
	return g
}

func (r rig) renew(t *testing.T, c backend.Claim) error {
	t.Helper()
	err := errors.New("not answered")
	r.d.Renew(t.Context(), []backend.Claim{c}, func(_ int, _ backend.Grant, e error) { err = e })
	return err
}

// left is what is left of the term of key.
func (r rig) left(t *testing.T, key string) time.Duration {
	t.Helper()
	d, err := r.rdb.PTTL(t.Context(), key).Result()
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestRecordIsOneFieldOfTokenAndOwner(t *testing.T) {
	r := setup(t, nil)
	for _, c := range []backend.Claim{claim("a"), fenced("b")} {
		c.TTL = term + time.Microsecond
		r.acquire(t, c)
		if got, err := r.rdb.HGetAll(t.Context(), c.Key).Result(); len(got) != 1 || got[c.Token+"#"+c.Owner] != "1" {
			t.Errorf("record: got %q, %v", got, err)
		}
		if left := r.left(t, c.Key); left <= term/2 || left > term+time.Millisecond {
			t.Errorf("term: %v left", left)
		}
	}
}

func TestHeldSaysByWhomAndHowLong(t *testing.T) {
	r := setup(t, nil)
	for _, second := range []func(string) backend.Claim{claim, fenced} {
		first := claim("k")
		first.Owner = "host/7/job #3 \xff"
		r.acquire(t, first)
		for _, c := range []backend.Claim{second("k"), first} {
			var held *backend.HeldError
			_, err := r.d.Acquire(t.Context(), c)
			if !errors.Is(err, backend.ErrHeld) || !errors.As(err, &held) {
				t.Fatalf("got %v", err)
			}
			if held.Owner != first.Owner || held.RetryAfter <= term/2 || held.RetryAfter > term {
				t.Errorf("got %+v", held)
			}
		}
		if err := r.d.Release(t.Context(), first); err != nil {
			t.Error(err)
		}
	}
}

func TestReleaseFreesOnlyTheTokensOwnHold(t *testing.T) {
	r := setup(t, nil)
	c := claim("k")
	if err := r.d.Release(t.Context(), c); !errors.Is(err, backend.ErrLost) {
		t.Errorf("nothing held: got %v", err)
	}
	r.acquire(t, c)
	for _, token := range []string{c.Token + "1", c.Token[:3], "other", ""} {
		other := c
		other.Token = token
		if err := r.d.Release(t.Context(), other); !errors.Is(err, backend.ErrLost) {
			t.Errorf("token %q: got %v", token, err)
		}
		if err := r.renew(t, other); !errors.Is(err, backend.ErrLost) {
			t.Errorf("token %q: renew: got %v", token, err)
		}
	}
	if r.left(t, "k") <= 0 {
		t.Fatal("freed by a stranger")
	}
	// Key and token are the proof; an owner is a label.
	if err := r.d.Release(t.Context(), backend.Claim{Key: "k", Token: c.Token}); err != nil {
		t.Error(err)
	}
	if err := r.d.Release(t.Context(), c); !errors.Is(err, backend.ErrLost) {
		t.Errorf("a second time: got %v", err)
	}
	r.acquire(t, claim("k"))
}

func TestRenewNeverShortensAndNeverRevives(t *testing.T) {
	r := setup(t, nil)
	c := claim("k")
	r.acquire(t, c)
	c.TTL = 10 * term
	if err := r.renew(t, c); err != nil || r.left(t, "k") <= 9*term {
		t.Errorf("longer: %v, %v left", err, r.left(t, "k"))
	}
	c.TTL = time.Second
	if err := r.renew(t, c); err != nil || r.left(t, "k") <= 9*term {
		t.Errorf("shorter: %v, %v left", err, r.left(t, "k"))
	}
	r.rdb.Persist(t.Context(), "k")
	if err := r.renew(t, c); err != nil || r.left(t, "k") != -1 {
		t.Errorf("without end: %v, %v left", err, r.left(t, "k"))
	}
	r.rdb.Del(t.Context(), "k")
	if err := r.renew(t, c); !errors.Is(err, backend.ErrLost) || r.rdb.Exists(t.Context(), "k").Val() != 0 {
		t.Errorf("gone: %v", err)
	}
	r.acquire(t, claim("k"))
	if err := r.renew(t, c); !errors.Is(err, backend.ErrLost) {
		t.Errorf("taken by another: %v", err)
	}
}

func TestRenewAnswersEachClaimOfABatch(t *testing.T) {
	r := setup(t, nil)
	var cs []backend.Claim
	for i := range 90 {
		c := claim(fmt.Sprint("k", i))
		r.acquire(t, c)
		if c.TTL = 10 * term; i%3 == 0 {
			r.rdb.Del(t.Context(), c.Key)
		}
		cs = append(cs, c)
	}
	for range 2 { // the first has to send the script along
		answers := make([]int, len(cs))
		r.d.Renew(t.Context(), cs, func(i int, g backend.Grant, err error) {
			answers[i]++
			if lost := errors.Is(err, backend.ErrLost); lost != (i%3 == 0) || !lost && err != nil || g != (backend.Grant{}) {
				t.Errorf("claim %d: %+v, %v", i, g, err)
			}
		})
		for i, n := range answers {
			if n != 1 {
				t.Errorf("claim %d was answered %d times", i, n)
			}
		}
	}
	if left := r.left(t, "k1"); left < 9*term {
		t.Errorf("%v left", left)
	}
}

func TestValueOfAnotherKindIsAStrangersHold(t *testing.T) {
	r := setup(t, nil)
	ctx := t.Context()
	for kind, put := range map[string]func(key string) error{
		"string":       func(key string) error { return r.rdb.Set(ctx, key, "somebody's secret#with a mark", 0).Err() },
		"empty string": func(key string) error { return r.rdb.Set(ctx, key, "", 0).Err() },
		"long string":  func(key string) error { return r.rdb.Set(ctx, key, strings.Repeat("x", 1<<20), 0).Err() },
		"hash":         func(key string) error { return r.rdb.HSet(ctx, key, "8c0b3f0e-5d0c:57", "1").Err() },
		"empty field":  func(key string) error { return r.rdb.HSet(ctx, key, "", "1").Err() },
		"long field":   func(key string) error { return r.rdb.HSet(ctx, key, strings.Repeat("x", 1<<20), "1").Err() },
		"two fields":   func(key string) error { return r.rdb.HSet(ctx, key, "token#owner", "1", "mode", "write").Err() },
		"list":         func(key string) error { return r.rdb.LPush(ctx, key, "x").Err() },
		"set":          func(key string) error { return r.rdb.SAdd(ctx, key, "x").Err() },
		"zset":         func(key string) error { return r.rdb.ZAdd(ctx, key, redis.Z{Member: "x"}).Err() },
		"stream": func(key string) error {
			return r.rdb.XAdd(ctx, &redis.XAddArgs{Stream: key, Values: []string{"a", "b"}}).Err()
		},
	} {
		if err := put(kind); err != nil {
			t.Fatal(err)
		}
		for _, c := range []backend.Claim{claim(kind), fenced(kind), {Key: kind, Token: "token", TTL: time.Second}} {
			var held *backend.HeldError
			if _, err := r.d.Acquire(ctx, c); !errors.As(err, &held) || *held != (backend.HeldError{}) {
				t.Errorf("%s: acquire: got %#v", kind, err)
			}
			if err := r.renew(t, c); !errors.Is(err, backend.ErrLost) {
				t.Errorf("%s: renew: got %v", kind, err)
			}
			if err := r.d.Release(ctx, c); !errors.Is(err, backend.ErrLost) {
				t.Errorf("%s: release: got %v", kind, err)
			}
		}
		s, err := r.d.Inspect(ctx, kind)
		if err != nil || !s.Held || s.TTL >= 0 || s.Owner != "" {
			t.Errorf("%s: inspect: got %+v, %v", kind, s, err)
		}
		if err := r.d.Break(ctx, kind); err != nil {
			t.Errorf("%s: break: %v", kind, err)
		}
		r.acquire(t, claim(kind))
	}
}

func TestInspectAndBreak(t *testing.T) {
	r := setup(t, nil)
	if s, err := r.d.Inspect(t.Context(), "k"); err != nil || s.Held || s.Fence != 0 || s.TTL != 0 || s.Owner != "" {
		t.Errorf("nobody: %+v, %v", s, err)
	}
	if err := r.d.Break(t.Context(), "k"); err != nil {
		t.Errorf("break of nothing: %v", err)
	}
	c := fenced("k")
	g := r.acquire(t, c)
	s, err := r.d.Inspect(t.Context(), "k")
	if err != nil || !s.Held || s.Owner != c.Owner || s.Fence != g.Fence || s.TTL <= term/2 || s.TTL > term || !s.Since.IsZero() {
		t.Errorf("held: %+v, %v", s, err)
	}
	if err := r.d.Break(t.Context(), "k"); err != nil {
		t.Error(err)
	}
	if err := r.renew(t, c); !errors.Is(err, backend.ErrLost) {
		t.Errorf("renew after break: %v", err)
	}
	if s, _ := r.d.Inspect(t.Context(), "k"); s.Held || s.Fence != g.Fence {
		t.Errorf("after break: %+v", s)
	}
}

// One round trip each to take, to hear that it is held, to renew and to give
// back.
func TestCommandsPerOperation(t *testing.T) {
	srv := redistest.Start(t, &redistest.Options{Own: true})
	p := srv.Proxy()
	o := srv.ClientOptions()
	o.Addr = p.Addr()
	rdb := redis.NewClient(o)
	defer rdb.Close()
	r := rig{srv, rdb, pubsublock.New(rdb, nil)}
	for round := range 2 {
		for _, kind := range []func(string) backend.Claim{claim, fenced} {
			c := kind("k")
			p.Commands()
			r.acquire(t, c)
			_, err := r.d.Acquire(t.Context(), claim("k"))
			_ = r.renew(t, c)
			if e := r.d.Release(t.Context(), c); e != nil || !errors.Is(err, backend.ErrHeld) {
				t.Error(e, err)
			}
			if all := p.Commands(); round > 0 && len(all) != 4 { // before that, the scripts travel
				t.Errorf("got %q", all)
			}
		}
	}
}

func TestNewPanicsOnMisuse(t *testing.T) {
	for name, f := range map[string]func(){
		"nil client": func() { pubsublock.New(nil, nil) },
		"channel": func() {
			pubsublock.New(redis.NewClient(&redis.Options{}), &pubsublock.Options{Channel: "a{b}"})
		},
		"fence ttl": func() {
			pubsublock.New(redis.NewClient(&redis.Options{}), &pubsublock.Options{FenceTTL: -time.Second})
		},
	} {
		func() {
			defer func() {
				if v := recover(); v == nil || !strings.HasPrefix(fmt.Sprint(v), "pubsublock: New: ") {
					t.Errorf("%s: got %v", name, v)
				}
			}()
			f()
		}()
	}
}

// A client that was handed in stays open, and its settings its own.
func TestCloseLeavesTheCallersClientOpen(t *testing.T) {
	r := setup(t, nil)
	before := *r.rdb.Options()
	r.acquire(t, claim("k"))
	if err := r.d.Close(); err != nil {
		t.Error(err)
	}
	if err := r.rdb.Ping(t.Context()).Err(); err != nil {
		t.Error(err)
	}
	if after := r.rdb.Options(); after.MaxRetries != before.MaxRetries || after.ReadTimeout != before.ReadTimeout || after.ContextTimeoutEnabled != before.ContextTimeoutEnabled {
		t.Error("settings were changed")
	}
}

func bounded(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}
