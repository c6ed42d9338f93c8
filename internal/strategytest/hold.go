package strategytest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redistest"
)

// rig is a Rig for the shared tests, which know no more of a driver.
type rig = Rig[backend.Inspector]

func (s Strategy) open(rdb redis.UniversalClient) backend.Inspector { return s.New(rdb, 0) }

func (s Strategy) setup(t *testing.T, o *redistest.Options) rig { return Setup(t, o, s.open) }

// kinds are the two kinds of claims.
var kinds = map[string]func(key string) backend.Claim{"unfenced": Claim, "fenced": Fenced}

// RecordAndTerm proves that the record is that of the claim, and that its
// term is rounded up.
func (s Strategy) RecordAndTerm(t *testing.T) {
	r := s.setup(t, nil)
	for key, kind := range kinds {
		c := kind(key)
		c.TTL = Term + time.Microsecond
		r.Acquire(t, c)
		if !s.Has(t.Context(), r.Redis, c) {
			t.Errorf("%s: another record", key)
		}
		if left := r.Left(t, key); left <= Term/2 || left > Term+time.Millisecond {
			t.Errorf("%s: %v left", key, left)
		}
	}
}

// HeldErrorNamesOwnerAndTerm proves that a refusal says who holds the key and
// for how long.
func (s Strategy) HeldErrorNamesOwnerAndTerm(t *testing.T) {
	r := s.setup(t, nil)
	for _, second := range kinds {
		first := Claim("k")
		first.Owner = "host/7/job #3 \xff"
		r.Acquire(t, first)
		for _, c := range []backend.Claim{second("k"), first} {
			var held *backend.HeldError
			_, err := r.Driver.Acquire(t.Context(), c)
			if !errors.Is(err, backend.ErrHeld) || !errors.As(err, &held) {
				t.Fatalf("got %v", err)
			}
			if held.Owner != first.Owner || held.RetryAfter <= Term/2 || held.RetryAfter > Term {
				t.Errorf("got %+v", held)
			}
		}
		r.Release(t, first)
	}
}

// ReleaseNeedsTheToken proves that key and token are the proof of a hold, and
// nothing else.
func (s Strategy) ReleaseNeedsTheToken(t *testing.T) {
	r := s.setup(t, nil)
	c := Claim("k")
	Lost(t, "nothing held", r.Driver.Release(t.Context(), c))
	r.Acquire(t, c)
	for _, token := range []string{c.Token + "1", c.Token[:3], "other", ""} {
		other := c
		other.Token = token
		Lost(t, fmt.Sprintf("release of token %q", token), r.Driver.Release(t.Context(), other))
		Lost(t, fmt.Sprintf("renewal of token %q", token), r.Renew(t, other))
	}
	if r.Left(t, "k") <= 0 {
		t.Fatal("released by another token")
	}

	// The owner is a label, so a release works without it.
	Want(t, "release", r.Driver.Release(t.Context(), backend.Claim{Key: "k", Token: c.Token}), nil)
	Lost(t, "a second time", r.Driver.Release(t.Context(), c))
	r.Acquire(t, Claim("k"))
}

// RenewNeverShortensAndNeverRevives proves that a renewal makes a term longer
// or leaves it.
func (s Strategy) RenewNeverShortensAndNeverRevives(t *testing.T) {
	r := s.setup(t, nil)
	c := Claim("k")
	r.Acquire(t, c)
	c.TTL = 10 * Term
	if err := r.Renew(t, c); err != nil || r.Left(t, "k") <= 9*Term {
		t.Errorf("longer: %v, %v left", err, r.Left(t, "k"))
	}
	c.TTL = time.Second
	if err := r.Renew(t, c); err != nil || r.Left(t, "k") <= 9*Term {
		t.Errorf("shorter: %v, %v left", err, r.Left(t, "k"))
	}
	r.Redis.Persist(t.Context(), "k")
	if err := r.Renew(t, c); err != nil || r.Left(t, "k") != -1 {
		t.Errorf("without end: %v, %v left", err, r.Left(t, "k"))
	}
	r.Redis.Del(t.Context(), "k")
	if err := r.Renew(t, c); !errors.Is(err, backend.ErrLost) || r.Redis.Exists(t.Context(), "k").Val() != 0 {
		t.Errorf("gone: %v", err)
	}
	r.Acquire(t, Claim("k"))
	Lost(t, "taken by another", r.Renew(t, c))
}

// RenewAlwaysWrites proves that a renewal writes even if the term is longer already. From
// Redis 7.2 on, WAIT covers the last write of its own connection. Replicas would confirm a
// renewal that writes nothing, although they may lack the hold: for instance after an
// Extend that they did not confirm.
func (s Strategy) RenewAlwaysWrites(t *testing.T) {
	r := s.setup(t, &redistest.Options{Own: true, Real: true})
	c := Claim("k")
	r.Acquire(t, c)
	writes := func() (n int) {
		for line := range strings.Lines(r.Redis.Info(t.Context(), "persistence").Val()) {
			fmt.Sscanf(line, "rdb_changes_since_last_save:%d", &n)
		}
		return n
	}

	before := writes()
	c.TTL /= 2
	Want(t, "renew", r.Renew(t, c), nil)
	if writes() == before {
		t.Error("a renewal for half of the term wrote nothing")
	}
	if left := r.Redis.PTTL(t.Context(), "k").Val(); left <= c.TTL {
		t.Errorf("it left %v of %v", left, Term)
	}
}

// RenewAnswersEachClaimOfABatch proves that each claim of a batch gets one
// answer of its own.
func (s Strategy) RenewAnswersEachClaimOfABatch(t *testing.T) {
	r := s.setup(t, nil)
	var cs []backend.Claim
	for i := range 300 {
		c := Claim(fmt.Sprint("k", i))
		r.Acquire(t, c)
		if c.TTL = 10 * Term; i%3 == 0 {
			r.Redis.Del(t.Context(), c.Key)
		}
		cs = append(cs, c)
	}
	for range 2 { // the first round has to send the script
		answers := make([]int, len(cs))
		r.Driver.Renew(t.Context(), cs, func(i int, g backend.Grant, err error) {
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
	if left := r.Left(t, "k1"); left < 9*Term {
		t.Errorf("%v left", left)
	}
}

// foreign writes values that are no strategy's record.
var foreign = map[string]func(ctx context.Context, rdb *redis.Client, key string) error{
	"string": func(ctx context.Context, rdb *redis.Client, key string) error {
		return rdb.Set(ctx, key, "a secret#with a mark", 0).Err()
	},
	"empty string": func(ctx context.Context, rdb *redis.Client, key string) error { return rdb.Set(ctx, key, "", 0).Err() },
	"long string": func(ctx context.Context, rdb *redis.Client, key string) error {
		return rdb.Set(ctx, key, strings.Repeat("x", 1<<20), 0).Err()
	},
	"list": func(ctx context.Context, rdb *redis.Client, key string) error { return rdb.LPush(ctx, key, "x").Err() },
	"set":  func(ctx context.Context, rdb *redis.Client, key string) error { return rdb.SAdd(ctx, key, "x").Err() },
	"zset": func(ctx context.Context, rdb *redis.Client, key string) error {
		return rdb.ZAdd(ctx, key, redis.Z{Member: "x"}).Err()
	},
	"stream": func(ctx context.Context, rdb *redis.Client, key string) error {
		return rdb.XAdd(ctx, &redis.XAddArgs{Stream: key, Values: []string{"a", "b"}}).Err()
	},
}

// ForeignValueIsHeld proves that a value of another program counts as a hold:
// it is reported without its content, and only Break removes it.
func (s Strategy) ForeignValueIsHeld(t *testing.T) {
	r := s.setup(t, nil)
	ctx := t.Context()
	values := maps.Clone(foreign)
	maps.Copy(values, s.Foreign)
	for kind, put := range values {
		if err := put(ctx, r.Redis, kind); err != nil {
			t.Fatal(err)
		}
		for _, c := range []backend.Claim{Claim(kind), Fenced(kind), {Key: kind, Token: "token", TTL: time.Second}} {
			var held *backend.HeldError
			if _, err := r.Driver.Acquire(ctx, c); !errors.As(err, &held) || *held != (backend.HeldError{}) {
				t.Errorf("%s: acquire: got %#v", kind, err)
			}
			Lost(t, kind+": renew", r.Renew(t, c))
			Lost(t, kind+": release", r.Driver.Release(ctx, c))
		}
		status, err := r.Driver.Inspect(ctx, kind)
		if err != nil || !status.Held || status.TTL >= 0 || status.Owner != "" {
			t.Errorf("%s: inspect: got %+v, %v", kind, status, err)
		}
		if err := r.Driver.Break(ctx, kind); err != nil {
			t.Errorf("%s: break: %v", kind, err)
		}
		r.Acquire(t, Claim(kind))
	}
}

// InspectAndBreak proves that Inspect reports a hold, and that Break ends it.
func (s Strategy) InspectAndBreak(t *testing.T) {
	r := s.setup(t, nil)
	ctx := t.Context()
	if got, err := r.Driver.Inspect(ctx, "k"); err != nil || got.Held || got.Fence != 0 || got.TTL != 0 || got.Owner != "" {
		t.Errorf("free: %+v, %v", got, err)
	}
	Want(t, "break of a free key", r.Driver.Break(ctx, "k"), nil)

	c := Fenced("k")
	g := r.Acquire(t, c)
	got, err := r.Driver.Inspect(ctx, "k")
	if err != nil || !got.Held || got.Owner != c.Owner || got.Fence != g.Fence || got.TTL <= Term/2 || got.TTL > Term || len(got.Waiters) > 0 {
		t.Errorf("held: %+v, %v", got, err)
	}
	// The server's clock may differ from ours, so the test asks the server.
	if now := r.Redis.Time(ctx).Val(); s.Since && (got.Since.After(now) || now.Sub(got.Since) > Term) || !s.Since && !got.Since.IsZero() {
		t.Errorf("since %v; the server's time is %v", got.Since, now)
	}

	Want(t, "break", r.Driver.Break(ctx, "k"), nil)
	Lost(t, "renew after break", r.Renew(t, c))
	if got, _ := r.Driver.Inspect(ctx, "k"); got.Held || got.Fence != g.Fence {
		t.Errorf("after break: %+v", got)
	}
}

// CommandsPerOperation proves that each operation takes one round trip, or
// Refusal for a refused Acquire.
func (s Strategy) CommandsPerOperation(t *testing.T) {
	srv := redistest.Start(t, &redistest.Options{Own: true})
	p := srv.Proxy()
	o := srv.ClientOptions()
	o.Addr = p.Addr()
	rdb := redis.NewClient(o)
	defer rdb.Close()
	r := rig{srv, rdb, s.open(rdb)}
	for round := range 2 {
		for i, kind := range kinds {
			c := kind(fmt.Sprint("k", round, i)) // a key that the driver has not been refused yet
			p.Commands()
			r.Acquire(t, c)
			acquired := p.Commands()
			_, err := r.Driver.Acquire(t.Context(), Claim(c.Key))
			refused := p.Commands()
			_ = r.Renew(t, c)
			renewed := p.Commands()
			if e := r.Driver.Release(t.Context(), c); e != nil || !errors.Is(err, backend.ErrHeld) {
				t.Error(e, err)
			}
			released := p.Commands()
			if round == 0 {
				continue // the first round has to send the scripts
			}
			if len(acquired) != 1 || len(refused) != s.Refusal || len(renewed) != 1 || len(released) != 1 {
				t.Errorf("acquired %q, refused %q, renewed %q, released %q", acquired, refused, renewed, released)
			}
		}
	}
}

// NewPanicsOnMisuse proves that New panics with a text that names it.
func (s Strategy) NewPanicsOnMisuse(t *testing.T) {
	calls := map[string]func(){
		"nil client": func() { s.New(nil, 0) },
		"fence ttl":  func() { s.New(redis.NewClient(&redis.Options{}), -time.Second) },
	}
	maps.Copy(calls, s.Misuse)
	for name, f := range calls {
		func() {
			defer func() {
				if v := recover(); v == nil || !strings.HasPrefix(fmt.Sprint(v), s.Name+": New: ") {
					t.Errorf("%s: got %v", name, v)
				}
			}()
			f()
		}()
	}
}

// CloseLeavesTheCallersClientOpen proves that a driver neither closes a client
// that the caller passed nor changes its settings.
func (s Strategy) CloseLeavesTheCallersClientOpen(t *testing.T) {
	r := s.setup(t, nil)
	before := *r.Redis.Options()
	r.Acquire(t, Claim("k"))
	Want(t, "close", r.Driver.Close(), nil)
	Want(t, "ping", r.Redis.Ping(t.Context()).Err(), nil)
	if after := r.Redis.Options(); after.MaxRetries != before.MaxRetries || after.ReadTimeout != before.ReadTimeout || after.ContextTimeoutEnabled != before.ContextTimeoutEnabled {
		t.Error("the settings have changed")
	}
}
