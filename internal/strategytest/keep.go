package strategytest

import (
	"errors"
	"fmt"
	"maps"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redistest"
)

// Kept returns c with a KeepUntil in d, for a Release.
func Kept(c backend.Claim, d time.Duration) backend.Claim {
	c.KeepUntil = time.Now().Add(d)
	return c
}

// KeptRecord proves that a release with KeepUntil ends the hold of its token, and leaves a
// record with that end.
func (s Strategy) KeptRecord(t *testing.T) {
	r := s.setup(t, nil)
	ctx := t.Context()
	for what, before := range map[string]func(c backend.Claim){
		"a term":      func(backend.Claim) {},
		"a long term": func(c backend.Claim) { c.TTL = 10 * Term; _ = r.Renew(t, c) },
		"no end":      func(c backend.Claim) { r.Redis.Persist(ctx, c.Key) },
	} {
		for kind, claim := range kinds {
			for _, keep := range []time.Duration{Term / 2, 2 * Term} {
				what := fmt.Sprintf("%s, %s, kept for %v", what, kind, keep)
				c := claim(what)
				r.Acquire(t, c)
				before(c)
				Want(t, what+": release", r.Driver.Release(ctx, Kept(c, keep)), nil)

				if left := r.Left(t, c.Key); left > keep || left < keep-Term/4 {
					t.Errorf("%s: %v left", what, left)
				}
				if s.Has(ctx, r.Redis, c) {
					t.Errorf("%s: the record has its token still", what)
				}
				st, err := r.Driver.Inspect(ctx, c.Key)
				if err != nil || !st.Held || st.Owner != c.Owner || st.TTL > keep || s.Since && st.Since.IsZero() {
					t.Errorf("%s: inspect: got %+v, %v", what, st, err)
				}
				var held *backend.HeldError
				if _, err := r.Driver.Acquire(ctx, Claim(c.Key)); !errors.As(err, &held) || held.Owner != c.Owner || held.RetryAfter > keep || held.RetryAfter < keep/4 {
					t.Errorf("%s: acquire: got %+v", what, err)
				}
				Lost(t, what+": renew", r.Renew(t, c))
				Lost(t, what+": release again", r.Driver.Release(ctx, Kept(c, keep)))
				Lost(t, what+": release", r.Driver.Release(ctx, c))
				Want(t, what+": break", r.Driver.Break(ctx, c.Key), nil)
				r.Acquire(t, Claim(c.Key))
			}
		}
	}
}

// KeptForeignValue proves that a release with KeepUntil leaves the values of other programs
// alone, and frees the key if KeepUntil has passed.
func (s Strategy) KeptForeignValue(t *testing.T) {
	r := s.setup(t, nil)
	ctx := t.Context()
	values := maps.Clone(foreign)
	maps.Copy(values, s.Foreign)
	for kind, put := range values {
		if err := put(ctx, r.Redis, kind); err != nil {
			t.Fatal(err)
		}
		Lost(t, kind, r.Driver.Release(ctx, Kept(Claim(kind), time.Minute)))
		if left := r.Left(t, kind); left != -1 {
			t.Errorf("%s: %v left", kind, left)
		}
	}
	Lost(t, "free", r.Driver.Release(ctx, Kept(Claim("free"), time.Minute)))
	if n := r.Redis.Exists(ctx, "free").Val(); n != 0 {
		t.Error("a release made a record")
	}

	c := Claim("past")
	r.Acquire(t, c)
	Want(t, "past", r.Driver.Release(ctx, Kept(c, -time.Second)), nil)
	r.Acquire(t, Claim("past"))
}

// KeptAtOneCommand proves that a release with KeepUntil takes one round trip, and works
// without memory.
func (s Strategy) KeptAtOneCommand(t *testing.T) {
	srv := redistest.Start(t, &redistest.Options{Own: true, Real: true})
	p := srv.Proxy()
	o := srv.ClientOptions()
	o.Addr = p.Addr()
	rdb := redis.NewClient(o)
	defer rdb.Close()
	r := rig{srv, rdb, s.open(rdb)}

	var cs []backend.Claim
	for i := range 3 {
		cs = append(cs, Claim(fmt.Sprint("k", i)))
		r.Acquire(t, cs[i])
	}
	Want(t, "the first release", r.Driver.Release(t.Context(), Kept(cs[0], Term)), nil)
	p.Commands() // the first one has to send the script
	Want(t, "release", r.Driver.Release(t.Context(), Kept(cs[1], Term)), nil)
	if sent := p.Commands(); len(sent) != 1 {
		t.Errorf("sent %q", sent)
	}

	r.Do(t, "config", "set", "maxmemory", "1")
	defer r.Do(t, "config", "set", "maxmemory", "0")
	Want(t, "release without memory", r.Driver.Release(t.Context(), Kept(cs[2], Term/2)), nil)
	if left := r.Left(t, cs[2].Key); left > Term/2 || left <= 0 {
		t.Errorf("%v left", left)
	}
	Lost(t, "renew", r.Renew(t, cs[2]))
}
