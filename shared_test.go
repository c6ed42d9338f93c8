package hasp_test

import (
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

func TestSharedLeasesAreRenewedApart(t *testing.T) {
	withClient(t, nil, func(t *testing.T, f *faulty, c *hasp.Client) {
		short := lockNow(t, c, "k", hasp.WithShared(), hasp.WithTTL(time.Second))
		dead := lockNow(t, c, "k", hasp.WithShared(), hasp.WithTTL(2*time.Second), hasp.WithoutRenewal())
		time.Sleep(10 * time.Second)
		want(t, "the renewed lease", short.Err(), nil)
		want(t, "the other one", dead.Err(), hasp.ErrLost)
		if st, _ := f.Inspect(t.Context(), "k"); len(st.Shared) != 1 || st.TTL > time.Second {
			t.Errorf("status %+v", st)
		}
		unlock(t, short)
		want(t, "Unlock", dead.Unlock(t.Context()), hasp.ErrLost)
	})
}

func TestSharedWithOtherOptions(t *testing.T) {
	withClient(t, nil, func(t *testing.T, f *faulty, c *hasp.Client) {
		for name, o := range map[string]hasp.Option{"min hold": hasp.WithMinHold(time.Second), "slots": hasp.WithSlots(2)} {
			want(t, name, errOf(c.Lock(t.Context(), "k", hasp.WithShared(), o)), hasp.ErrInvalid)
		}
	})
}

// Callers WithShared re-enter a lease of either kind. A shared lease cannot become exclusive.
func TestReentryOfASharedLease(t *testing.T) {
	withClient(t, nil, func(t *testing.T, f *faulty, c *hasp.Client) {
		for name, opts := range map[string][]hasp.Option{"exclusive": nil, "shared": {hasp.WithShared()}} {
			outer := lockNow(t, c, name, opts...)
			inner := lockIn(t, c, outer.Context(), name, hasp.WithShared())
			if opts != nil {
				want(t, "an exclusive Lock inside", errOf(c.Lock(inner.Context(), name)), hasp.ErrInvalid)
			}
			unlock(t, inner)
			unlock(t, outer)
		}
		if a, _, _ := f.calls(); a != 2 {
			t.Errorf("%d attempts, want 2", a)
		}
	})
}

// If readers have refused an exclusive caller, it asks again within SharedRetryEvery, whatever
// Backoff returns, because drivers refuse new readers only for a while.
func TestExclusiveCallerAsksAgainSoon(t *testing.T) {
	o := &hasp.Options{Backoff: func(int) time.Duration { return time.Hour }}
	withClient(t, o, func(t *testing.T, f *faulty, c *hasp.Client) {
		var asked []time.Time
		waiting := 0
		f.acquire = func(cl backend.Claim, send func() (backend.Grant, error)) (backend.Grant, error) {
			if !cl.Shared {
				asked = append(asked, time.Now())
				if cl.WillRetry {
					waiting++
				}
			}
			return send()
		}
		reader := lockNow(t, c, "k", hasp.WithShared())
		time.AfterFunc(time.Second, func() { unlock(t, reader) })
		unlock(t, lockNow(t, c, "k"))
		for i := 1; i < len(asked); i++ {
			if gap := asked[i].Sub(asked[i-1]); gap > backend.SharedRetryEvery {
				t.Errorf("%v between two attempts", gap)
			}
		}
		if waiting < len(asked)-1 || len(asked) < 10 {
			t.Errorf("%d of %d attempts were waiting", waiting, len(asked))
		}

		waiting = 0
		unlock(t, lockNow(t, c, "k"))
		_, _ = c.TryLock(t.Context(), "k")
		if waiting != 1 { // a TryLock does not ask again
			t.Errorf("waiting %d", waiting)
		}
	})
}
