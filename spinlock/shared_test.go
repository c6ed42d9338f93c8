package spinlock_test

import (
	"errors"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redisstore"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/internal/strategytest"
	"github.com/hasplock/hasp/spinlock"
)

var shared = strategytest.Shared

// The last reader's release is published as Spring publishes its own. The others are not.
func TestLastReaderWakesSpring(t *testing.T) {
	r := setup(t, &redistest.Options{Own: true, Real: true})
	r.Driver = await.Value(spinlock.NewDriver(r.Redis, &spinlock.Options{Registry: "registry"})).(Driver)
	sub := r.Redis.Subscribe(t.Context(), "registry-channel:k")
	defer sub.Close()
	if _, err := sub.Receive(t.Context()); err != nil {
		t.Fatal(err)
	}
	a, b := shared("k"), shared("k")
	r.Acquire(t, a)
	r.Acquire(t, b)
	r.Release(t, a)
	r.Redis.Publish(t.Context(), "registry-channel:k", "between")
	r.Release(t, b)
	for _, want := range []string{"between", "k"} {
		if m, err := sub.ReceiveMessage(strategytest.Bounded(t, 20*time.Second)); err != nil || m.Payload != want {
			t.Errorf("got %v, %v, want %q", m, err, want)
		}
	}
}

// attempt makes one more attempt of a caller that waits. Readers refuse it, or a writer.
func attempt(t *testing.T, r rig, byReaders bool) {
	t.Helper()
	c := claim("k")
	c.WillRetry, c.Waited = true, time.Millisecond
	var held *backend.HeldError
	if _, err := r.Driver.Acquire(t.Context(), c); !errors.As(err, &held) || held.Shared != byReaders || held.Owner == "" {
		t.Fatalf("got %#v", err)
	}
}

// A caller that waits, for a writer and then for readers, leaves its intent. Each attempt but
// the first is one command.
func TestReadersAfterAWriter(t *testing.T) {
	r, p := proxied(t, &redistest.Options{Own: true, Real: true})
	writer := claim("k")
	r.Acquire(t, writer)
	attempt(t, r, false)
	attempt(t, r, false)
	r.Release(t, writer)
	reader := shared("k")
	r.Acquire(t, reader)
	p.Commands()
	attempt(t, r, true)
	attempt(t, r, true)
	if sent := p.Commands(); len(sent) != 2 {
		t.Errorf("sent %q", sent)
	}
	if _, err := r.Driver.Acquire(t.Context(), shared("k")); !errors.Is(err, backend.ErrHeld) {
		t.Errorf("a new reader: %v", err)
	}

	// A writer again.
	r.Redis.FlushAll(t.Context())
	r.Acquire(t, writer)
	attempt(t, r, false)
	attempt(t, r, false)
	p.Commands()
	attempt(t, r, false)
	if sent := p.Commands(); len(sent) != 1 {
		t.Errorf("sent %q", sent)
	}
}

// A writer left an intent, and another writer had the key before it. Its grant removes the
// intent nevertheless, so that readers need not wait until the intent ends.
func TestIntentOutlastsAnotherWriter(t *testing.T) {
	r := setup(t, &redistest.Options{Own: true, Real: true})
	other := await.Value(spinlock.NewDriver(r.Redis, nil)).(Driver)
	defer other.Close()
	reader, between := shared("k"), claim("k")
	r.Acquire(t, reader)
	attempt(t, r, true)
	began := time.Now()
	attempt(t, r, true)                                     // leaves the intent
	r.Redis.Persist(t.Context(), redisstore.IntentKey("k")) // only the grant may end it
	r.Release(t, reader)
	if _, err := other.Acquire(t.Context(), between); err != nil {
		t.Fatal(err)
	}
	attempt(t, r, false)
	attempt(t, r, false)
	if err := other.Release(t.Context(), between); err != nil {
		t.Fatal(err)
	}
	c := claim("k")
	c.WillRetry, c.Waited = true, time.Millisecond
	r.Acquire(t, c)
	took := time.Since(began)
	if n := r.Redis.Exists(t.Context(), redisstore.IntentKey("k")).Val(); n != 0 && took < redisstore.IntentTTL {
		t.Error("the intent is still there")
	}
}

// The intent of a writer whose server is far away outlasts the sleep and the round trip until
// the next attempt.
func TestIntentOfAFarWriter(t *testing.T) {
	r, p := proxied(t, &redistest.Options{Own: true, Real: true})
	p.Delay(200 * time.Millisecond)
	r.Acquire(t, shared("k"))
	await.Until(t, "an intent of more than 300 ms", func() bool {
		c := claim("k")
		c.WillRetry = true
		if _, err := r.Driver.Acquire(t.Context(), c); !errors.Is(err, backend.ErrHeld) {
			t.Fatal(err)
		}
		// The intent began before the reply was delayed.
		return r.Redis.PTTL(t.Context(), redisstore.IntentKey("k")).Val() > redisstore.IntentTTL
	})
}
