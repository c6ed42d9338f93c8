package strategytest

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redisstore"
	"github.com/hasplock/hasp/internal/redistest"
)

// rig is the Rig of the tests in this package.
type rig = Rig[backend.Inspector]

func (s Strategy) open(rdb redis.UniversalClient) backend.Inspector {
	return await.Value(s.New(rdb, 0)).(backend.Inspector)
}

func (s Strategy) setup(t *testing.T, o *redistest.Options) rig { return Setup(t, o, s.open) }

// kinds contains functions that make claims, without and with a fence.
var kinds = map[string]func(key string) backend.Claim{"unfenced": Claim, "fenced": Fenced}

// RecordAndRefusal proves that an Acquire makes the record that Has expects. A refusal says who
// holds the key and for how long, also after a release with KeepUntil. The owner is only a label:
// calls with another owner succeed.
func (s Strategy) RecordAndRefusal(t *testing.T) {
	r := s.setup(t, nil)
	for kind, claim := range kinds {
		first := claim(kind)
		first.Owner = "host/7/job #3 \xff"
		refused := func(c backend.Claim, term time.Duration) {
			t.Helper()
			kept := term > Term
			rests := func(left time.Duration) bool { return left > term/2 && left <= term }

			var held *backend.HeldError
			_, err := r.Driver.Acquire(t.Context(), c)
			switch {
			case !errors.As(err, &held):
				t.Errorf("%s: got %v", kind, err)
			case held.Owner != first.Owner, held.Kept != kept, !rests(held.RetryAfter):
				t.Errorf("%s: got %+v", kind, held)
			}

			st, err := r.Driver.Inspect(t.Context(), kind)
			ours := st.Owner == first.Owner && s.Since != st.Since.IsZero()
			if err != nil || !ours || st.Kept != kept || !rests(st.TTL) {
				t.Errorf("%s: inspect: got %+v, %v", kind, st, err)
			}
		}

		r.Acquire(t, first)
		if !s.Has(t.Context(), r.Redis, first) {
			t.Errorf("%s: another record", kind)
		}

		for _, second := range kinds {
			refused(second(kind), Term)
		}

		refused(first, Term)

		nameless := backend.Claim{Key: kind, Token: first.Token, TTL: Term}
		Want(t, "renew", r.Renew(t, nameless), nil)
		r.Redis.Persist(t.Context(), kind) // a release with KeepUntil sets a term again
		Want(t, "release", r.Driver.Release(t.Context(), Kept(nameless, 4*Term)), nil)
		refused(Claim(kind), 4*Term)
		if s.Has(t.Context(), r.Redis, first) {
			t.Errorf("%s: the record has its token still", kind)
		}

		Want(t, "break", r.Driver.Break(t.Context(), kind), nil)
		r.Acquire(t, first)
		Want(t, "release", r.Driver.Release(t.Context(), nameless), nil)
	}
}

// RenewAlwaysWrites proves that a renewal writes even if the present term is longer. From Redis 7.2
// on, WAIT asks the replicas only about the last write of its own connection. Therefore replicas
// would confirm a renewal that writes nothing, although they may lack the hold, for instance after
// an Extend that they did not confirm. A record without a term stays without one.
func (s Strategy) RenewAlwaysWrites(t *testing.T) {
	r := s.setup(t, real)
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

	r.Redis.Persist(t.Context(), "k")
	if err := r.Renew(t, c); err != nil || r.Left(t, "k") != -1 {
		t.Errorf("without end: %v, %v left", err, r.Left(t, "k"))
	}
}

// Kept returns c for a Release, with a KeepUntil that is d after the present time.
func Kept(c backend.Claim, d time.Duration) backend.Claim {
	c.KeepUntil = time.Now().Add(d)
	return c
}

// endless is the kind of a foreign value that would be a shared record if it had an end.
const endless = "sorted set of tokens"

// foreign contains commands that write values which are no record of any strategy. The key must be
// inserted after the first word.
var foreign = map[string][]any{
	"string":                       {"set", "a secret#with a mark"},
	"short string":                 {"set", "user#7"},
	"empty string":                 {"set", ""},
	"long string":                  {"set", strings.Repeat("x", 1<<20)},
	"list":                         {"lpush", "x"},
	"set":                          {"sadd", "x"},
	"stream":                       {"xadd", "*", "a", "b"},
	endless:                        {"zadd", 1, "token-of-a-reader#owner"},
	"sorted set of names and tags": {"zadd", 1, "rekkles#EUW", 2, "caps#EUW", 3, "token#owner"},
	"sorted set of another form":   {"zadd", 1, "a b#c"},
	"sorted set without a mark":    {"zadd", 1, "x"},
	"sorted set without a token":   {"zadd", 1, "#x"},
}

// put runs a command with key inserted after the first word.
func (r Rig[D]) put(t *testing.T, key string, command ...any) {
	t.Helper()
	r.Do(t, slices.Insert(slices.Clone(command), 1, any(key))...)
}

// foreignValues writes each value of the maps foreign and s.Foreign twice, without and with an end.
// It returns the keys.
func (s Strategy) foreignValues(t *testing.T, r rig) (keys []string) {
	t.Helper()
	all := maps.Clone(s.Foreign)
	maps.Copy(all, foreign)
	for kind, command := range all {
		r.put(t, kind, command...)
		keys = append(keys, kind)
		if kind != endless {
			key := kind + " with an end"
			r.put(t, key, command...)
			r.Redis.Expire(t.Context(), key, time.Hour)
			keys = append(keys, key)
		}
	}

	return keys
}

// ForeignValueIsHeld proves that a value of another program counts as a hold that is not shared.
// Reports do not show its content, and need no right to write. Only Break changes the value: it
// removes values of every kind.
func (s Strategy) ForeignValueIsHeld(t *testing.T) {
	r := s.setup(t, real)
	ctx := t.Context()
	keys := s.foreignValues(t, r)
	r.Forbid(t, "-@write")
	r.wantListed(t, "foreign values", "")

	for _, key := range keys {
		ends := r.Left(t, key) > 0
		status, err := r.Driver.Inspect(ctx, key)
		hasName := status.Owner != "" || len(status.Shared) > 0
		if err != nil || !status.Held || hasName {
			t.Errorf("%s: inspect: got %+v, %v", key, status, err)
		}
		if ends != (status.TTL > Term) {
			t.Errorf("%s: inspect: got %+v, %v", key, status, err)
		}
	}

	r.Forbid(t, "+@write")
	for _, key := range keys {
		before := r.Redis.Dump(ctx, key).Val()
		ends := r.Left(t, key) > 0
		waiting := Claim(key)
		exact := Shared(key)
		slot := Claim(key + "#0")
		waiting.WillRetry = true
		exact.Token = "token"
		exact.Owner = "owner"
		r.Do(t, "copy", key, slot.Key)
		for _, c := range []backend.Claim{
			Claim(key), Fenced(key), Shared(key), waiting, exact, slot,
			{Key: key, Token: "token", TTL: time.Second, Timeout: Term},
		} {
			var held *backend.HeldError
			_, err := r.Driver.Acquire(ctx, c)
			switch {
			case !errors.As(err, &held):
				t.Errorf("%s: acquire: got %v", key, err)
			case held.Owner != "", held.Shared, ends != (held.RetryAfter > Term):
				t.Errorf("%s: acquire: got %#v", key, held)
			}

			Lost(t, key+": renew", r.Renew(t, c))
			Lost(t, key+": release", r.Driver.Release(ctx, c))
			Lost(t, key+": release with KeepUntil", r.Driver.Release(ctx, Kept(c, Term)))
		}

		for _, key := range []string{key, slot.Key} {
			if r.Redis.Dump(ctx, key).Val() != before || ends != (r.Left(t, key) > Term) {
				t.Errorf("%s: it has changed", key)
			}
		}

		if n := r.Redis.Exists(ctx, redisstore.IntentKey(key)).Val(); n != 0 {
			t.Errorf("%s: an intent", key)
		}

		Want(t, key+": break", r.Driver.Break(ctx, key), nil)
		r.Acquire(t, Claim(key))
	}
}

// ReportsWriteNothing proves that Inspect and List need no right to write, even if the term of a
// shared hold has ended.
func (s Strategy) ReportsWriteNothing(t *testing.T) {
	r := s.setup(t, real)
	kept := Claim("kept")
	keys := []string{"alone", "kept"}

	for _, c := range []backend.Claim{Fenced("alone"), kept} {
		r.Acquire(t, c)
	}

	r.Release(t, Kept(kept, Term))
	ended := Shared("shared")
	shares := r.Driver.Traits().Shared
	if shares {
		keys = append(keys, "shared")
		r.Acquire(t, Shared("shared"))
		r.Do(t, "zadd", "shared", 1, ended.Token+"#"+ended.Owner)
	}

	r.Forbid(t, "-@write")
	r.wantListed(t, "all", "", keys...)
	if !shares {
		return
	}

	st, err := r.Driver.Inspect(t.Context(), "shared")
	if err != nil || len(st.Shared) != 1 || st.Shared[0] == ended.Owner {
		t.Errorf("inspect: %+v, %v", st, err)
	}
}

// NewRefusesMisuse proves that New refuses bad arguments, with an error that names the argument.
func (s Strategy) NewRefusesMisuse(t *testing.T) {
	calls := map[string]func() (backend.Driver, error){
		"nil client": func() (backend.Driver, error) { return s.New(nil, 0) },
		"fence ttl": func() (backend.Driver, error) {
			return s.New(redis.NewClient(&redis.Options{}), -time.Second)
		},
	}

	maps.Copy(calls, s.Misuse)
	for name, f := range calls {
		_, err := f()
		if !errors.Is(err, backend.ErrInvalid) || !strings.HasPrefix(err.Error(), s.Name+": ") {
			t.Errorf("%s: got %v", name, err)
		}
	}
}
