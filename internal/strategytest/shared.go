package strategytest

import (
	"errors"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redisstore"
	"github.com/hasplock/hasp/internal/redistest"
)

// Shared is Claim for a shared hold.
func Shared(key string) backend.Claim { c := Claim(key); c.Shared = true; return c }

// The options real ask for a real Redis, because tests need ACLs and Redis's compiler of scripts.
var real = redistest.Real

// The function refused fails the test unless c is refused with a HeldError whose Shared has the
// given value. It returns this error.
func refused(t *testing.T, what string, r rig, c backend.Claim, shared bool) backend.HeldError {
	t.Helper()
	var held *backend.HeldError
	if _, err := r.Driver.Acquire(t.Context(), c); !errors.As(err, &held) || held.Shared != shared {
		t.Fatalf("%s: got %#v, want a refusal with Shared %v", what, err, shared)
	}
	return *held
}

// SharedHolds proves that an exclusive call with a reader's token returns ErrLost, and so does a
// shared call with the token of an exclusive hold. The owner of a reader is only a label.
func (s Strategy) SharedHolds(t *testing.T) {
	r := s.setup(t, real)
	for kind, claim := range kinds {
		for _, c := range []backend.Claim{Shared("k"), claim("k")} {
			r.Acquire(t, c)
			held := refused(t, kind, r, claim("k"), c.Shared)
			if held.Owner != c.Owner || held.RetryAfter <= Term/2 || held.RetryAfter > Term {
				t.Errorf("%s: got %+v", kind, held)
			}

			other := c
			other.Shared = !c.Shared
			Lost(t, "a renewal of the other kind", r.Renew(t, other))
			Lost(t, "a release of the other kind", r.Driver.Release(t.Context(), other))

			c.Owner = "another"
			Want(t, "renewal with another owner", r.Renew(t, c), nil)
			r.Release(t, c)
		}
	}
}

// WaitingWriterKeepsReadersOut proves that a refused caller with WillRetry leaves an intent, and
// that the grant to this caller ends the intent. A TryLock leaves no intent.
func (s Strategy) WaitingWriterKeepsReadersOut(t *testing.T) {
	if s.Intents == 0 {
		t.Skip("the strategy has no intents")
	}

	r := s.setup(t, real)
	intent := redisstore.IntentKey("k")
	began := time.Now()

	for kind, claim := range kinds {
		reader := Shared("k")
		w := claim("k")
		r.Acquire(t, reader)
		for range 3 {
			refused(t, kind, r, claim("k"), true)
		}

		if n := r.Redis.Exists(t.Context(), intent).Val(); n != 0 {
			t.Fatalf("%s: a TryLock left an intent", kind)
		}

		// Repeat the attempt if, on a slow machine, the intent expires before the test reads it.
		w.WillRetry = true
		w.Contended = true
		var left time.Duration
		await.Until(t, kind+": an intent", func() bool {
			refused(t, kind, r, w, true)
			left = r.Left(t, intent)
			return left > s.Intents*2/3 && r.Redis.PExpire(t.Context(), intent, Term).Val()
		})

		if got := r.Redis.Get(t.Context(), intent).Val(); got != w.Token {
			t.Fatalf("%s: the intent is %q", kind, got)
		}

		// spinlock prolongs the intent by twice the time of its last round trip, rounded up to a
		// millisecond. The time since the test began is longer than that round trip.
		if left > s.Intents+2*time.Since(began)+time.Millisecond {
			t.Errorf("%s: the intent lasts for %v", kind, left)
		}

		held := refused(t, kind+": a new reader", r, Shared("k"), false)
		if held.RetryAfter <= 0 || held.RetryAfter > Term {
			t.Errorf("%s: a new reader: got %+v", kind, held)
		}

		Want(t, "renewal beside an intent", r.Renew(t, reader), nil)

		// The intent also keeps readers out while the key is free.
		r.Release(t, reader)
		refused(t, kind+": a reader of a free key", r, Shared("k"), false)
		r.Acquire(t, w)
		if n := r.Redis.Exists(t.Context(), intent).Val(); n != 0 {
			t.Errorf("%s: the grant left the intent", kind)
		}

		r.Release(t, w)
	}

	// A user without the right to hasp's own keys can leave no intent. While there are readers, the
	// user's writer is refused. When the readers have left, the writer takes the key.
	reader := Shared("k")
	w := Claim("k")
	r.Acquire(t, reader)
	r.Forbid(t, "resetkeys", "~k")
	w.WillRetry = true

	for range 3 {
		refused(t, "a writer without a right to intents", r, w, true)
	}

	r.Release(t, reader)
	r.Acquire(t, w)
}
