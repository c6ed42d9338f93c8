package hasp_test

import (
	"context"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

// afterTrip makes a call that takes a round trip. The first also takes what it takes to dial.
func afterTrip(dial time.Duration) callHook {
	return func(_ context.Context, _ backend.Claim, send func() (backend.Grant, error)) (backend.Grant, error) {
		time.Sleep(dial + 200*time.Microsecond)
		dial = 0
		return send()
	}
}

// One slow answer must not make a later Lock leave a free key alone for long.
func TestAGapIsShortAfterASlowAnswer(t *testing.T) {
	withRival(t, hooked{traits: inNoOrder, acquire: afterTrip(2 * time.Second)}, func(t *testing.T, c *hasp.Client, rival *hasp.Lease) {
		first := lockSoon(t, c, t.Context(), "k")
		time.Sleep(2100 * time.Millisecond)
		rival.Unlock(t.Context())
		l := <-first
		time.Sleep(100 * time.Millisecond)
		l.Unlock(t.Context())

		began := time.Now()
		unlock(t, lockNow(t, c, "k"))
		within(t, "Lock of a free key that nobody else wants", began, 150*time.Millisecond)
	})
}

// A key is contended if its holder had to wait for it, however long ago that was. A caller
// that comes back leaves it to others for a gap.
func TestGapAfterALongHold(t *testing.T) {
	withRival(t, hooked{traits: inNoOrder, acquire: afterTrip(0)}, func(t *testing.T, c *hasp.Client, rival *hasp.Lease) {
		time.AfterFunc(time.Second, func() { rival.Unlock(context.Background()) })
		for _, gap := range []bool{true, false} {
			l := lockNow(t, c, "k")
			time.Sleep(time.Minute)
			l.Unlock(t.Context())

			began := time.Now()
			l = lockNow(t, c, "k")
			// Without a gap, the Lock takes one round trip of 200 µs.
			if took := time.Since(began); (took > 500*time.Microsecond) != gap {
				t.Errorf("the key was taken again after %v, gap: %v", took, gap)
			}
			time.Sleep(time.Minute)
			l.Unlock(t.Context())
			time.Sleep(time.Minute)
		}
	})
}
