package strategytest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redisstore"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/pubsublock"
	"github.com/hasplock/hasp/spinlock"
)

// Shared is Claim for a shared hold.
func Shared(key string) backend.Claim {
	c := Claim(key)
	c.Shared = true
	return c
}

// SharedFor is Shared with a term.
func SharedFor(key string, term time.Duration) backend.Claim {
	c := Shared(key)
	c.TTL = term
	return c
}

// waitingClaim is the claim of a caller that asks again if it is refused.
func waitingClaim(key string) backend.Claim {
	c := Claim(key)
	c.Waiting = true
	return c
}

// real is a server that has ACLs and compiles scripts as Redis does.
var real = &redistest.Options{Own: true, Real: true}

// refused fails the test unless c is refused, by readers if shared says so. It returns the
// error.
func refused(t *testing.T, what string, r rig, c backend.Claim, shared bool) backend.HeldError {
	t.Helper()
	var held *backend.HeldError
	if _, err := r.Driver.Acquire(t.Context(), c); !errors.As(err, &held) || held.Shared != shared {
		t.Fatalf("%s: got %#v, want a refusal with Shared %v", what, err, shared)
	}
	return *held
}

// SharedHoldsExcludeOthers proves that two readers hold a key together, that they and a
// writer exclude each other, and that the last reader's end frees the key.
func (s Strategy) SharedHoldsExcludeOthers(t *testing.T) {
	for kind, claim := range kinds {
		r := s.setup(t, real)
		a, b := Shared("k"), SharedFor("k", 2*Term)
		r.Acquire(t, a)
		r.Acquire(t, b)
		for range 3 { // the first refusal may be read by other commands than the next
			held := refused(t, kind, r, claim("k"), true)
			if held.Owner != a.Owner && held.Owner != b.Owner || held.RetryAfter <= Term || held.RetryAfter > 2*Term {
				t.Errorf("%s: got %+v", kind, held)
			}
		}
		st, err := r.Driver.Inspect(t.Context(), "k")
		slices.Sort(st.Shared)
		if err != nil || !st.Held || st.Owner != "" || st.TTL <= Term || len(st.Shared) != 2 || !slices.Contains(st.Shared, a.Owner) || !slices.Contains(st.Shared, b.Owner) {
			t.Errorf("inspect: %+v, %v", st, err)
		}

		r.Release(t, b)
		if left := r.Left(t, "k"); left > Term || left < Term/2 {
			t.Errorf("after the release of the longest hold, the term is %v", left)
		}
		refused(t, kind, r, claim("k"), true)
		Lost(t, "a second release", r.Driver.Release(t.Context(), b))
		r.Release(t, a)
		if n := r.Redis.Exists(t.Context(), "k").Val(); n != 0 {
			t.Error("the last release left the key")
		}

		w := claim("k")
		r.Acquire(t, w)
		if held := refused(t, "a reader", r, Shared("k"), false); held.Owner != w.Owner || held.RetryAfter <= 0 {
			t.Errorf("a reader: got %+v", held)
		}
		r.Release(t, w)
		r.Acquire(t, Shared("k"))
	}
}

// SharedTermsAreApart proves that neither a renewal nor a shorter hold changes the term of
// another reader, and that a reader that has died does not last.
func (s Strategy) SharedTermsAreApart(t *testing.T) {
	r := s.setup(t, real)
	long, dead := Shared("k"), SharedFor("k", backend.MinTTL)
	r.Acquire(t, long)
	r.Acquire(t, dead)
	if left := r.Left(t, "k"); left < Term/2 {
		t.Errorf("a shorter hold left %v", left)
	}
	time.Sleep(2 * backend.MinTTL)
	if st, err := r.Driver.Inspect(t.Context(), "k"); err != nil || !slices.Equal(st.Shared, []string{long.Owner}) {
		t.Errorf("inspect: %+v, %v", st, err)
	}

	longer := long
	longer.TTL = 10 * Term
	Want(t, "renew", r.Renew(t, longer), nil)
	if left := r.Left(t, "k"); left < 9*Term {
		t.Errorf("a renewal left %v", left)
	}
	Want(t, "a renewal for less", r.Renew(t, long), nil)
	if left := r.Left(t, "k"); left < 9*Term {
		t.Errorf("a renewal for less left %v", left)
	}
	Lost(t, "renewal of a dead hold", r.Renew(t, dead))
	Lost(t, "release of a dead hold", r.Driver.Release(t.Context(), dead))
	if n := r.Redis.ZCard(t.Context(), "k").Val(); n != 1 {
		t.Errorf("%d members", n)
	}

	// An exclusive renewal or release with a reader's token is none of its hold.
	alone := long
	alone.Shared = false
	Lost(t, "an exclusive renewal", r.Renew(t, alone))
	Lost(t, "an exclusive release", r.Driver.Release(t.Context(), alone))

	// The owner is a label.
	nameless := long
	nameless.Owner = "another"
	Want(t, "renewal with another owner", r.Renew(t, nameless), nil)
	Want(t, "release with another owner", r.Driver.Release(t.Context(), nameless), nil)

	brief := SharedFor("k", backend.MinTTL)
	r.Acquire(t, brief)
	await.Until(t, "the last term ends", func() bool { return r.Redis.Exists(t.Context(), "k").Val() == 0 })
	r.Acquire(t, Claim("k"))
	Lost(t, "renewal after a writer", r.Renew(t, brief))
	Lost(t, "release after a writer", r.Driver.Release(t.Context(), brief))
}

// WaitingWriterKeepsReadersOut proves that a caller that will ask again leaves an intent,
// that a TryLock leaves none, and that the caller's grant and its silence end the intent.
func (s Strategy) WaitingWriterKeepsReadersOut(t *testing.T) {
	r := s.setup(t, real)
	intent := redisstore.IntentKey("k")
	began := time.Now()
	for kind, claim := range kinds {
		reader := Shared("k")
		r.Acquire(t, reader)
		for range 3 {
			refused(t, kind, r, claim("k"), true)
		}
		if n := r.Redis.Exists(t.Context(), intent).Val(); n != 0 {
			t.Fatalf("%s: a TryLock left an intent", kind)
		}
		other := Shared("k")
		r.Acquire(t, other)
		r.Release(t, other)

		for _, end := range []string{"granted", "silent"} {
			w := claim("k")
			w.Waiting, w.Waited = true, time.Millisecond
			refused(t, kind, r, w, true)
			// A slow machine may let the intent lapse before it is read. Then w asks again.
			var left time.Duration
			await.Until(t, kind+": an intent", func() bool {
				refused(t, kind, r, w, true)
				left = r.Left(t, intent)
				return r.Redis.PExpire(t.Context(), intent, Term).Val()
			})
			if got := r.Redis.Get(t.Context(), intent).Val(); got != w.Token {
				t.Fatalf("%s: the intent is %q", kind, got)
			}
			// spinlock adds twice its last round trip, rounded up to a millisecond. That request
			// may have been any since the test began.
			if left > redisstore.IntentTTL+2*time.Since(began)+time.Millisecond {
				t.Errorf("%s: the intent lasts for %v", kind, left)
			}
			if held := refused(t, kind+": a new reader", r, Shared("k"), false); held.RetryAfter <= 0 || held.RetryAfter > Term {
				t.Errorf("%s: a new reader: got %+v", kind, held)
			}
			Want(t, "renewal beside an intent", r.Renew(t, reader), nil)
			if end == "silent" {
				r.Redis.PExpire(t.Context(), intent, redisstore.IntentTTL)
				await.Until(t, "the intent lapses", func() bool {
					_, err := r.Driver.Acquire(t.Context(), other)
					return err == nil
				})
				r.Release(t, other)
				r.Release(t, reader)
				continue
			}

			// The intent keeps readers out while the key is free, too.
			r.Release(t, reader)
			refused(t, kind+": a reader of a free key", r, Shared("k"), false)
			r.Acquire(t, w)
			if n := r.Redis.Exists(t.Context(), intent).Val(); n != 0 {
				t.Errorf("%s: the grant left the intent", kind)
			}
			r.Release(t, w)
			r.Acquire(t, reader)
		}
	}
}

// ForeignSortedSetIsHeld proves that a sorted set that is no shared record is held and
// untouched.
func (s Strategy) ForeignSortedSetIsHeld(t *testing.T) {
	r := s.setup(t, real)
	for what, member := range map[string]string{"no end": "token#owner", "another form": "a b#c", "no mark": "x", "no token": "#x"} {
		r.Redis.ZAdd(t.Context(), what, redis.Z{Score: 1, Member: member})
		if what != "no end" {
			r.Redis.Expire(t.Context(), what, time.Hour)
		}
		before := r.Left(t, what)
		for range 2 {
			for _, c := range []backend.Claim{Shared(what), Claim(what), Fenced(what), waitingClaim(what)} {
				if held := refused(t, what, r, c, false); held.Owner != "" {
					t.Errorf("%s: got %+v", what, held)
				}
			}
		}
		c := Shared(what)
		c.Token, c.Owner = "token", "owner"
		Lost(t, what+": renew", r.Renew(t, c))
		Lost(t, what+": release", r.Driver.Release(t.Context(), c))
		st, err := r.Driver.Inspect(t.Context(), what)
		if err != nil || !st.Held || st.Owner != "" || len(st.Shared) > 0 {
			t.Errorf("%s: inspect: %+v, %v", what, st, err)
		}
		if got := r.Redis.ZRange(t.Context(), what, 0, -1).Val(); !slices.Equal(got, []string{member}) || r.Left(t, what) > before || before-r.Left(t, what) > Term {
			t.Errorf("%s: left %q", what, got)
		}
		if n := r.Redis.Exists(t.Context(), redisstore.IntentKey(what)).Val(); n != 0 {
			t.Errorf("%s: an intent", what)
		}
	}
}

// SharedWithoutRights proves that a user that may not set terms leaves no record without
// an end, and that a server without memory renews and releases what it has.
func (s Strategy) SharedWithoutRights(t *testing.T) {
	r := s.setup(t, real)
	hold := Shared("held")
	r.Acquire(t, hold)
	longer := hold
	longer.TTL = 10 * Term

	r.Do(t, "config", "set", "maxmemory", "1")
	_, err := r.Driver.Acquire(t.Context(), Shared("k"))
	Outage(t, "acquire without memory", err)
	Want(t, "renew without memory", r.Renew(t, longer), nil)
	r.Do(t, "config", "set", "maxmemory", "0")
	if left := r.Left(t, "held"); left < 9*Term {
		t.Errorf("renewed without memory: %v left", left)
	}

	r.Forbid(t, "-pexpire")
	_, err = r.Driver.Acquire(t.Context(), Shared("k"))
	Outage(t, "acquire without pexpire", err)
	if n := r.Redis.Exists(t.Context(), "k").Val(); n != 0 {
		t.Error("a key is left")
	}
	longer.TTL = 100 * Term
	Outage(t, "renew without pexpire", r.Renew(t, longer))
	if left := r.Left(t, "held"); left < 9*Term || left > 10*Term {
		t.Errorf("a refused renewal left %v", left)
	}
	Want(t, "release without pexpire", r.Driver.Release(t.Context(), hold), nil)
	r.Forbid(t, "+pexpire", "-zrange")
	Outage(t, "renew without zrange", r.Renew(t, hold))
	Outage(t, "release without zrange", r.Driver.Release(t.Context(), hold))
}

// SharedFencesGrow proves that the fences of readers and writers grow together.
func (s Strategy) SharedFencesGrow(t *testing.T) {
	r := s.setup(t, real)
	last := uint64(0)
	for i := range 3 {
		var cs []backend.Claim
		for range 3 {
			c := Fenced("k")
			c.Shared = i != 1
			cs = append(cs, c)
			if g := r.Acquire(t, c); g.Fence <= last {
				t.Errorf("fence %d after %d", g.Fence, last)
			} else {
				last = g.Fence
			}
			if !c.Shared {
				break
			}
		}
		for _, c := range cs {
			r.Release(t, c)
		}
	}
	counterKept(t, r, s.DefaultFenceTTL)
	r.Redis.Set(t.Context(), counter, "x", 0)
	c := Fenced("k")
	c.Shared = true
	Want(t, "a foreign counter", ErrOf(r.Driver.Acquire(t.Context(), c)), backend.ErrInvalid)
	if n := r.Redis.Exists(t.Context(), "k").Val(); n != 0 {
		t.Error("a key is left")
	}
}

// SharedHoldsOfOtherStrategies proves that the readers of this strategy, of spinlock and of
// pubsublock hold a key together, and that a writer of one refuses readers of the others.
func (s Strategy) SharedHoldsOfOtherStrategies(t *testing.T) {
	r := s.setup(t, real)
	for i, d := range []backend.Inspector{spinlock.New(r.Redis, nil), pubsublock.New(r.Redis, nil)} {
		defer d.Close()
		other := rig{r.Server, r.Redis, d}
		a, b := Shared("k"), Shared("k")
		r.Acquire(t, a)
		other.Acquire(t, b)
		refused(t, "the other's writer", other, Claim("k"), true)
		refused(t, "a writer", r, Claim("k"), true)
		Want(t, "the other's renewal", other.Renew(t, a), nil)
		Want(t, "the other's release", d.Release(t.Context(), a), nil)
		r.Release(t, b)

		w := Claim("k")
		other.Acquire(t, w)
		if held := refused(t, fmt.Sprint("beside a writer of ", i), r, Shared("k"), false); held.Owner != w.Owner {
			t.Errorf("got %+v, want the owner %q", held, w.Owner)
		}
		other.Release(t, w)
	}
}

// SharedRenewalsOfABatch proves that shared and other claims of one batch get an answer
// each.
func (s Strategy) SharedRenewalsOfABatch(t *testing.T) {
	r := s.setup(t, real)
	var cs []backend.Claim
	for i := range 60 {
		c := Claim(fmt.Sprint("k", i/2))
		c.Shared = i/2%2 == 0
		if _, err := r.Driver.Acquire(context.Background(), c); err != nil && c.Shared {
			t.Fatal(err)
		}
		cs = append(cs, c)
	}
	answers := make(chan int, 2*len(cs))
	r.Driver.Renew(t.Context(), cs, func(i int, _ backend.Grant, err error) {
		if lost := errors.Is(err, backend.ErrLost); lost != (!cs[i].Shared && i%2 == 1) || !lost && err != nil {
			t.Errorf("claim %d: %v", i, err)
		}
		answers <- i
	})
	if len(answers) != len(cs) {
		t.Errorf("%d answers to %d claims", len(answers), len(cs))
	}
}
