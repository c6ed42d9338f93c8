package hasp_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

func TestSharedLeasesHoldAKeyTogether(t *testing.T) {
	withClient(t, nil, func(t *testing.T, f *faulty, c *hasp.Client) {
		one, two := lockNow(t, c, "k", hasp.WithShared()), lockNow(t, c, "k", hasp.WithShared(), hasp.WithTTL(time.Minute))
		var held *backend.HeldError
		if _, err := c.TryLock(t.Context(), "k"); !errors.As(err, &held) || !held.Shared || held.RetryAfter != time.Minute {
			t.Errorf("an exclusive TryLock: got %v (%+v)", err, held)
		}
		unlock(t, one)
		want(t, "TryLock beside one reader", errOf(c.TryLock(t.Context(), "k")), hasp.ErrHeld)
		unlock(t, two)

		alone := lockNow(t, c, "k")
		want(t, "a shared TryLock beside an exclusive lease", errOf(c.TryLock(t.Context(), "k", hasp.WithShared())), hasp.ErrHeld)
		unlock(t, alone)
		freed(t, f, "k", "the key is held after all Unlocks")
		nothingLeft(t, c)
	})
}

// Each shared lease is renewed and lost by itself.
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

func TestBreakEndsEverySharedLease(t *testing.T) {
	withClient(t, nil, func(t *testing.T, f *faulty, c *hasp.Client) {
		leases := []*hasp.Lease{lockNow(t, c, "k", hasp.WithShared()), lockNow(t, c, "k", hasp.WithShared())}
		if err := c.Break(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second) // a renewal comes at once
		for _, l := range leases {
			want(t, "Err", l.Err(), hasp.ErrLost)
			want(t, "Unlock", l.Unlock(t.Context()), hasp.ErrLost)
		}
		nothingLeft(t, c)
	})
}

func TestReentryOfSharedLeases(t *testing.T) {
	withClient(t, nil, func(t *testing.T, f *faulty, c *hasp.Client) {
		outer := lockNow(t, c, "k", hasp.WithShared())
		inner := lockIn(t, c, outer.Context(), "k", hasp.WithShared())
		_, err := c.Lock(inner.Context(), "k")
		want(t, "exclusive under shared", err, hasp.ErrInvalid)
		want(t, "TryLock", errOf(c.TryLock(inner.Context(), "k")), hasp.ErrInvalid)
		want(t, "WithoutReentry", errOf(c.TryLock(inner.Context(), "k", hasp.WithoutReentry())), hasp.ErrHeld)
		if n := len(f.acquired); n != 2 { // of outer, and of the stranger
			t.Errorf("%d attempts at the store", n)
		}
		other := lockIn(t, c, inner.Context(), "other") // another key is no business of theirs
		unlock(t, other)
		unlock(t, inner)
		unlock(t, outer)
		freed(t, f, "k", "held after Unlock")

		alone := lockNow(t, c, "k")
		under := lockIn(t, c, alone.Context(), "k", hasp.WithShared())
		if st, _ := f.Inspect(t.Context(), "k"); len(st.Shared) > 0 {
			t.Errorf("shared under exclusive: %+v", st)
		}
		unlock(t, under)
		unlock(t, alone)
		nothingLeft(t, c)
	})
}

func TestSharedWithOtherOptions(t *testing.T) {
	withClient(t, nil, func(t *testing.T, f *faulty, c *hasp.Client) {
		for name, o := range map[string]hasp.Option{"min hold": hasp.WithMinHold(time.Second), "slots": hasp.WithSlots(2)} {
			want(t, name, errOf(c.Lock(t.Context(), "k", hasp.WithShared(), o)), hasp.ErrInvalid)
		}
		err := hasp.Lead(t.Context(), c, "k", func(context.Context, *hasp.Lease) error { return nil }, hasp.WithShared())
		want(t, "Lead", err, hasp.ErrInvalid)

		a := lockNow(t, c, "k", hasp.WithShared(), hasp.WithFence())
		b := lockNow(t, c, "k", hasp.WithShared(), hasp.WithFence())
		if a.Fence() == 0 || b.Fence() <= a.Fence() {
			t.Errorf("fences %d and %d", a.Fence(), b.Fence())
		}
		unlock(t, a)
		unlock(t, b)
		after := lockNow(t, c, "k", hasp.WithFence())
		if after.Fence() <= b.Fence() {
			t.Errorf("the next fence is %d, after %d", after.Fence(), b.Fence())
		}
		unlock(t, after)
	})
}

// unshared is a driver without Traits.Shared.
type unshared struct{ *faulty }

func (u unshared) Traits() backend.Traits { return backend.Traits{Reach: backend.Network} }

func TestSharedWithoutTheTrait(t *testing.T) {
	f := newFaulty()
	c := hasp.New(unshared{f}, nil)
	defer c.Close()
	want(t, "Lock", errOf(c.Lock(t.Context(), "k", hasp.WithShared())), errors.ErrUnsupported)
	if len(f.acquired) > 0 {
		t.Error("the store was asked")
	}
}

// An exclusive caller that readers keep from the key asks again within AskAgain, whatever
// Backoff says, because drivers keep new readers away only for a while.
func TestExclusiveCallerAsksAgainSoon(t *testing.T) {
	o := &hasp.Options{Backoff: func(int) time.Duration { return time.Hour }}
	withClient(t, o, func(t *testing.T, f *faulty, c *hasp.Client) {
		var asked []time.Time
		waiting := 0
		f.acquire = func(cl backend.Claim, send func() (backend.Grant, error)) (backend.Grant, error) {
			if !cl.Shared {
				asked = append(asked, time.Now())
				if cl.Waiting {
					waiting++
				}
			}
			return send()
		}
		reader := lockNow(t, c, "k", hasp.WithShared())
		time.AfterFunc(time.Second, func() { unlock(t, reader) })
		unlock(t, lockNow(t, c, "k"))
		for i := 1; i < len(asked); i++ {
			if gap := asked[i].Sub(asked[i-1]); gap > backend.AskAgain {
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

// The end of the term that a caller finds differs with each attempt: readers renew, or a
// writer repeats its intent. The caller does not take that for another hold, and polls slowly.
func TestTermsOfReadersDoNotSetThePace(t *testing.T) {
	for who, o := range map[string][]hasp.Option{"a writer": nil, "a reader": {hasp.WithShared()}} {
		t.Run(who, func(t *testing.T) {
			withClient(t, nil, func(t *testing.T, f *faulty, c *hasp.Client) {
				attempts := 0
				f.acquire = func(cl backend.Claim, _ func() (backend.Grant, error)) (backend.Grant, error) {
					attempts++
					term := time.Duration(1+attempts%10) * time.Second
					return backend.Grant{}, &backend.HeldError{RetryAfter: term, Shared: !cl.Shared}
				}
				want(t, "Lock", errOf(c.Lock(t.Context(), "k", append(o, hasp.WithMaxWait(10*time.Second))...)), hasp.ErrHeld)
				// Some 55 attempts until the sleep is 50 ms, and then 20 a second.
				if attempts > 280 {
					t.Errorf("%d attempts in 10 s", attempts)
				}
			})
		})
	}
}

// Close ends shared leases, the wait for them, and nothing is left.
func TestCloseWithSharedLeases(t *testing.T) {
	withClient(t, &hasp.Options{Timeout: time.Second}, func(t *testing.T, f *faulty, c *hasp.Client) {
		var wg sync.WaitGroup
		leases := []*hasp.Lease{lockNow(t, c, "k", hasp.WithShared()), lockNow(t, c, "k", hasp.WithShared())}
		for _, o := range [][]hasp.Option{nil, {hasp.WithShared(), hasp.WithFence()}} {
			wg.Go(func() {
				l, err := c.Lock(t.Context(), "k", o...)
				if err == nil {
					unlock(t, l)
				} else {
					want(t, "Lock", err, hasp.ErrClosed)
				}
			})
		}
		time.Sleep(time.Second)
		for _, l := range leases {
			wg.Go(func() {
				<-l.Context().Done()
				want(t, "Err", l.Err(), hasp.ErrClosed)
				unlock(t, l)
			})
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		wg.Wait()
		nothingLeft(t, c)
	})
}

// Shared leases come and go all the time. Their events must not delay one another, and an
// exclusive lease between them must be alone in the order of events.
func TestEventsOfSharedLeases(t *testing.T) {
	var mu sync.Mutex
	var shared, alone, most int
	var bad []string
	o := &hasp.Options{Observe: func(_ context.Context, e hasp.Event) {
		mu.Lock()
		defer mu.Unlock()
		count := &alone
		if e.Shared {
			count = &shared
		}
		switch e.Kind {
		case hasp.EventAcquired:
			*count++
		case hasp.EventReleased:
			*count--
		}
		most = max(most, shared)
		if alone > 1 || alone > 0 && shared > 0 {
			bad = append(bad, e.Kind.String())
		}
	}}
	withClient(t, o, func(t *testing.T, f *faulty, c *hasp.Client) {
		f.release = func(_ backend.Claim, send func() error) error {
			time.Sleep(time.Millisecond) // others may get the key before the event
			err := send()
			time.Sleep(time.Millisecond)
			return err
		}
		var wg sync.WaitGroup
		for i := range 6 {
			wg.Go(func() {
				var opts []hasp.Option
				if i > 0 {
					opts = []hasp.Option{hasp.WithShared()}
				}
				for range 20 {
					l := lockNow(t, c, "k", opts...)
					time.Sleep(3 * time.Millisecond)
					unlock(t, l)
				}
			})
		}
		wg.Wait()
		if len(bad) > 0 || most < 2 {
			t.Errorf("%d events at which an exclusive lease was not alone: %v; at most %d shared at once", len(bad), slices.Compact(bad), most)
		}
		nothingLeft(t, c)
	})
}
