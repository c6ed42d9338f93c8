package hasp_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
)

// This file tests WithoutReentry.

func TestWithoutReentryACallerWaitsForItsOwnLease(t *testing.T) {
	withClient(t, nil, func(t *testing.T, f *faulty, c *hasp.Client) {
		outer := lockNow(t, c, "k")
		want(t, "TryLock", errOf(c.TryLock(outer.Context(), "k", hasp.WithoutReentry())), hasp.ErrHeld)
		want(t, "WithMaxWait", errOf(c.Lock(outer.Context(), "k", hasp.WithoutReentry(), hasp.WithMaxWait(time.Second))), hasp.ErrHeld)
		ctx, cancel := context.WithTimeout(outer.Context(), time.Hour)
		defer cancel()
		start := time.Now()
		err := errOf(c.Lock(ctx, "k", hasp.WithoutReentry()))
		want(t, "Lock", err, context.DeadlineExceeded)
		want(t, "Lock", err, hasp.ErrHeld)
		if waited := time.Since(start); waited < time.Hour || waited > time.Hour+time.Second {
			t.Errorf("waited %v", waited)
		}
		inner := lockIn(t, c, outer.Context(), "k") // without the option
		unlock(t, inner)
		unlock(t, outer)
		freed(t, f, "k", "the key is still held")

		reader := lockNow(t, c, "shared", hasp.WithShared())
		want(t, "beside a shared lease", errOf(c.TryLock(reader.Context(), "shared", hasp.WithoutReentry())), hasp.ErrHeld)
		unlock(t, reader)
	})
}

// The context of the new lease ends with the lease around it. Both are found by the
// leases inside.
func TestWithoutReentryTheLeaseIsNestedAllTheSame(t *testing.T) {
	withClient(t, nil, func(t *testing.T, f *faulty, c *hasp.Client) {
		outer := lockNow(t, c, "other")
		l := lockIn(t, c, outer.Context(), "k", hasp.WithoutReentry())
		for _, key := range []string{"other", "k"} {
			unlock(t, lockIn(t, c, l.Context(), key, hasp.WithMaxWait(0)))
		}
		if a, _, _ := f.calls(); a != 2 {
			t.Errorf("%d attempts, want 2", a)
		}
		unlock(t, outer)
		want(t, "cause", context.Cause(l.Context()), hasp.ErrReleased)
		want(t, "Err", l.Err(), nil)
		unlock(t, l)
	})
}

// The outer lease is handed over to a caller whose context ends by that.
func TestWithoutReentryAHandOverWithinItsOwnContext(t *testing.T) {
	withClient(t, nil, func(t *testing.T, f *faulty, c *hasp.Client) {
		for range 50 {
			outer := lockNow(t, c, "k")
			done := make(chan struct{})
			go func() {
				defer close(done)
				l, err := c.Lock(outer.Context(), "k", hasp.WithoutReentry())
				if err != nil {
					want(t, "Lock", err, hasp.ErrReleased)
					return
				}
				want(t, "cause", context.Cause(l.Context()), hasp.ErrReleased)
				unlock(t, l)
			}()
			synctest.Wait()
			unlock(t, outer)
			<-done
			synctest.Wait()
			freed(t, f, "k", "the key is still held")
		}
		nothingLeft(t, c)
	})
}
