package spinlock_test

import (
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redisstore"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/internal/strategytest"
)

var shared = strategytest.Shared

// The grant to a writer that waits removes any intent, even of another one, so that readers need
// not wait until the intent ends.
func TestGrantRemovesAnyIntent(t *testing.T) {
	r := setup(t, redistest.Real)
	intent := redisstore.IntentKey("k")
	r.Redis.Set(t.Context(), intent, "another's", 0)
	c := claim("k")
	c.WillRetry, c.Contended = true, true
	r.Acquire(t, c)
	if n := r.Redis.Exists(t.Context(), intent).Val(); n != 0 {
		t.Error("the intent is still there")
	}
}

// The intent of a writer whose server is far away outlasts the sleep and the round trip until
// the next attempt.
func TestIntentOfAFarWriter(t *testing.T) {
	r, p := proxied(t, redistest.Real)
	p.Delay(200 * time.Millisecond)
	r.Acquire(t, shared("k"))
	await.Until(t, "an intent of more than 300 ms", func() bool {
		c := claim("k")
		c.WillRetry = true
		strategytest.Want(t, "a second Acquire", strategytest.ErrOf(r.Driver.Acquire(t.Context(), c)), backend.ErrHeld)
		// The intent began before the reply was delayed.
		return r.Redis.PTTL(t.Context(), redisstore.IntentKey("k")).Val() > redisstore.IntentTTL
	})
}
