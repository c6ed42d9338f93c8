package hasp_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
)

func TestReentryCostsNoRoundTripAndTheLastUnlockFrees(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFaulty()
		c := hasp.New(f, nil)
		defer c.Close()
		outer := lockNow(t, c, "k", hasp.WithFence())
		ctx, cancel := context.WithTimeout(outer.Context(), time.Hour)
		defer cancel()
		inner, err := c.Lock(ctx, "k", hasp.WithFence(), hasp.WithMaxWait(0))
		if err != nil {
			t.Fatal(err)
		}
		third, err := c.TryLock(inner.Context(), "k")
		if err != nil {
			t.Fatal(err)
		}
		if inner.Fence() != outer.Fence() || third.Fence() != outer.Fence() || outer.Fence() == 0 {
			t.Errorf("fences %d, %d, %d", outer.Fence(), inner.Fence(), third.Fence())
		}
		_, err = c.TryLock(t.Context(), "k")
		want(t, "with another context", err, hasp.ErrHeld)
		for i, l := range []*hasp.Lease{inner, outer, third} {
			if free(t, f, "k") {
				t.Fatalf("the key was free before Unlock %d", i)
			}
			if err := l.Unlock(t.Context()); err != nil {
				t.Fatal(err)
			}
			want(t, "second Unlock", l.Unlock(t.Context()), hasp.ErrReleased)
		}
		if !free(t, f, "k") {
			t.Error("the last Unlock did not free the key")
		}
		if a, _, r := f.calls(); a != 1 || r != 1 {
			t.Errorf("%d attempts and %d releases, want one of each", a, r)
		}
	})
}

func TestReentryIsByContextKeyAndClient(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFaulty()
		c := hasp.New(f, nil)
		defer c.Close()
		l := lockNow(t, c, "k")
		other := hasp.New(newFaulty(), nil)
		defer other.Close()
		for name, lock := range map[string]func() (*hasp.Lease, error){
			"another key":    func() (*hasp.Lease, error) { return c.TryLock(l.Context(), "other") },
			"another client": func() (*hasp.Lease, error) { return other.TryLock(l.Context(), "k") },
		} {
			x, err := lock()
			if err != nil {
				t.Fatal(name, err)
			}
			if err := x.Unlock(t.Context()); err != nil {
				t.Error(name, err)
			}
			if l.Err() != nil {
				t.Fatal(name, "ended the lease whose context was used")
			}
		}
		kept := context.WithoutCancel(l.Context())
		if err := l.Unlock(t.Context()); err != nil {
			t.Fatal(err)
		}
		// The lease is over: this is a lock like any other.
		x, err := c.Lock(kept, "k")
		if err != nil {
			t.Fatal(err)
		}
		if a, _, _ := f.calls(); a != 3 {
			t.Errorf("%d attempts, want 3", a)
		}
		x.Unlock(t.Context())
	})
}

func TestInnerContext(t *testing.T) {
	cause := errors.New("enough")
	for _, tc := range []struct {
		name string
		end  func(c *hasp.Client, f *faulty, cancel, cancelBetween context.CancelCauseFunc, outer, inner *hasp.Lease)
		want error
	}{
		{"goes on when the outer lease is unlocked", func(_ *hasp.Client, _ *faulty, _, _ context.CancelCauseFunc, outer, _ *hasp.Lease) {
			outer.Unlock(context.Background())
		}, nil},
		{"ends with a context between the two", func(_ *hasp.Client, _ *faulty, _, between context.CancelCauseFunc, _, _ *hasp.Lease) {
			between(cause)
		}, cause},
		{"ends with the context of the outer Lock", func(_ *hasp.Client, _ *faulty, cancel, _ context.CancelCauseFunc, _, _ *hasp.Lease) {
			cancel(cause)
		}, cause},
		{"ends with it also after the outer Unlock", func(_ *hasp.Client, _ *faulty, cancel, _ context.CancelCauseFunc, outer, _ *hasp.Lease) {
			outer.Unlock(context.Background())
			synctest.Wait()
			cancel(cause)
		}, cause},
		{"ends with the hold", func(c *hasp.Client, f *faulty, _, _ context.CancelCauseFunc, _, _ *hasp.Lease) {
			f.Break(context.Background(), "k")
			time.Sleep(hasp.DefaultTTL)
		}, hasp.ErrLost},
		{"ends with the hold after the outer Unlock", func(c *hasp.Client, f *faulty, _, _ context.CancelCauseFunc, outer, _ *hasp.Lease) {
			outer.Unlock(context.Background())
			f.set(down)
			time.Sleep(hasp.DefaultTTL)
		}, hasp.ErrLost},
		{"ends with its own Unlock", func(_ *hasp.Client, _ *faulty, _, _ context.CancelCauseFunc, _, inner *hasp.Lease) {
			inner.Unlock(context.Background())
		}, hasp.ErrReleased},
	} {
		for _, look := range []string{"by a child", "by a look"} {
			t.Run(tc.name+" "+look, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					f := newFaulty()
					c := hasp.New(f, nil)
					ctx, cancel := context.WithCancelCause(t.Context())
					defer cancel(nil)
					outer, err := c.Lock(ctx, "k")
					if err != nil {
						t.Fatal(err)
					}
					between, cancelBetween := context.WithCancelCause(outer.Context())
					defer cancelBetween(nil)
					inner, err := c.Lock(between, "k")
					if err != nil {
						t.Fatal(err)
					}
					child, stop := context.WithCancel(inner.Context())
					defer stop()
					tc.end(c, f, cancel, cancelBetween, outer, inner)
					got := child
					if look == "by a look" {
						got = inner.Context()
					} else {
						synctest.Wait()
					}
					if (got.Err() != nil) != (tc.want != nil) || !errors.Is(context.Cause(got), tc.want) {
						t.Errorf("got %v, cause %v, want cause %v", got.Err(), context.Cause(got), tc.want)
					}
					inner.Unlock(t.Context())
					outer.Unlock(t.Context())
					f.set(up)
					c.Close()
				})
			})
		}
	}
}

func TestReentryThreeDeepFollowsOutwards(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := hasp.New(newFaulty(), nil)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		a, _ := c.Lock(ctx, "k")
		b, _ := c.Lock(a.Context(), "k")
		d, _ := c.Lock(b.Context(), "k")
		deepest := d.Context()
		for _, l := range []*hasp.Lease{a, b} {
			if err := l.Unlock(ctx); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
			if deepest.Err() != nil {
				t.Fatal("an outer Unlock ended the innermost context")
			}
		}
		cancel()
		synctest.Wait()
		want(t, "after the end of the first Lock's context", deepest.Err(), context.Canceled)
		if err := d.Unlock(ctx); err != nil {
			t.Error(err)
		}
		c.Close()
	})
}

func TestReentryOptions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFaulty()
		c := hasp.New(f, nil)
		defer c.Close()
		outer := lockNow(t, c, "k", hasp.WithTTL(10*time.Second))
		_, err := c.Lock(outer.Context(), "k", hasp.WithFence())
		want(t, "a fence where the outer has none", err, hasp.ErrInvalid)

		bounded, err := c.Lock(outer.Context(), "k", hasp.WithMaxHold(3*time.Second), hasp.WithoutRenewal())
		if err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		<-bounded.Context().Done()
		if held := time.Since(start); held != 3*time.Second {
			t.Errorf("the inner lease lasted %v, want 3s", held)
		}
		want(t, "Unlock of it", bounded.Unlock(t.Context()), hasp.ErrLost)
		if outer.Err() != nil {
			t.Fatal("the inner max hold ended the outer lease")
		}

		longer, err := c.Lock(outer.Context(), "k", hasp.WithTTL(time.Minute))
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if left := time.Until(outer.Expires()); left < 59*time.Second {
			t.Errorf("%v left, want the longer term to be asked for", left)
		}
		shorter, err := c.Lock(outer.Context(), "k", hasp.WithTTL(time.Second))
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Hour)
		if left := time.Until(outer.Expires()); left < 35*time.Second {
			t.Errorf("%v left, want the longer term to go on", left)
		}
		for _, l := range []*hasp.Lease{shorter, longer, outer} {
			if err := l.Unlock(t.Context()); err != nil {
				t.Error(err)
			}
		}
	})
}

// On one goroutine too, two calls without a common lease exclude each other.
func TestNoReentryByGoroutine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := hasp.New(newFaulty(), nil)
		defer c.Close()
		l := lockNow(t, c, "k")
		_, err := c.Lock(t.Context(), "k", hasp.WithMaxWait(time.Second))
		want(t, "Lock", err, hasp.ErrHeld)
		l.Unlock(t.Context())
	})
}

func TestInnerLeaseIsRenewedAfterTheOuterUnlock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := hasp.New(newFaulty(), nil)
		defer c.Close()
		outer := lockNow(t, c, "k")
		inner, err := c.Lock(outer.Context(), "k")
		if err != nil {
			t.Fatal(err)
		}
		if err := outer.Unlock(t.Context()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * hasp.DefaultTTL)
		if err := inner.Unlock(t.Context()); err != nil {
			t.Error(err)
		}
	})
}
