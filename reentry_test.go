package hasp_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/memlock"
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
		{"ends when the outer lease is unlocked", func(_ *hasp.Client, _ *faulty, _, _ context.CancelCauseFunc, outer, _ *hasp.Lease) {
			outer.Unlock(context.Background())
		}, hasp.ErrReleased},
		{"ends with a context between the two", func(_ *hasp.Client, _ *faulty, _, between context.CancelCauseFunc, _, _ *hasp.Lease) {
			between(cause)
		}, cause},
		{"ends with the context of the outer Lock", func(_ *hasp.Client, _ *faulty, cancel, _ context.CancelCauseFunc, _, _ *hasp.Lease) {
			cancel(cause)
		}, cause},
		{"ends with the hold", func(c *hasp.Client, f *faulty, _, _ context.CancelCauseFunc, _, _ *hasp.Lease) {
			f.Break(context.Background(), "k")
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

// Deep re-entry and LockAll cost each lease a constant, and so does the end of
// the context that all of it derives from. Unrelated leases of the Client are
// renewed meanwhile.
func TestDeepReentryIsCancelledAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := hasp.New(newFaulty(), nil)
		defer c.Close()
		other := lockNow(t, c, "other")
		base, cancel := context.WithCancel(t.Context())
		ctx := base
		var leases []*hasp.Lease
		for range 200 {
			l, err := c.Lock(ctx, "k")
			if err != nil {
				t.Fatal(err)
			}
			leases = append(leases, l)
			ctx = l.Context()
		}
		cancel()
		want(t, "the innermost context", ctx.Err(), context.Canceled) // took 2^200 steps
		time.Sleep(10 * hasp.DefaultTTL)
		if err := other.Err(); err != nil {
			t.Errorf("an unrelated lease: %v", err)
		}
		for _, l := range leases {
			want(t, "a cancelled lease", l.Err(), hasp.ErrLost)
		}
		if err := other.Unlock(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

func TestLockAllOfManyKeys(t *testing.T) {
	c := hasp.New(memlock.New(), nil)
	defer c.Close()
	keys := make([]string, 10_000)
	for i := range keys {
		keys[i] = fmt.Sprint(i)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	outer, err := hasp.LockAll(ctx, c, keys) // took 20 minutes
	if err != nil {
		t.Fatal(err)
	}
	inner, err := hasp.LockAll(outer.Context(), c, keys) // took 7 s
	if err != nil {
		t.Fatal(err)
	}
	got, ok := inner.Context().Deadline()
	if all, _ := ctx.Deadline(); !ok || !got.Equal(all) {
		t.Errorf("deadline %v, %v", got, ok)
	}
	for _, ls := range []*hasp.Leases{inner, outer} {
		if err := ls.Unlock(t.Context()); err != nil {
			t.Error(err)
		}
	}
}

// A caller's context whose methods are slow or block delays no renewal of other
// leases.
func TestSlowContextDelaysNoRenewal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := hasp.New(newFaulty(), nil)
		defer c.Close()
		slow := &slowContext{Context: t.Context()}
		l, err := c.Lock(slow, "slow")
		if err != nil {
			t.Fatal(err)
		}
		other := lockNow(t, c, "other")
		slow.slow.Store(true)
		time.Sleep(10 * hasp.DefaultTTL)
		for _, l := range []*hasp.Lease{l, other} {
			if err := l.Unlock(t.Context()); err != nil {
				t.Errorf("%s: %v", l.Key(), err)
			}
		}
	})
}

type slowContext struct {
	context.Context
	slow atomic.Bool
}

func (s *slowContext) Err() error {
	if s.slow.Load() {
		time.Sleep(time.Hour)
	}
	return s.Context.Err()
}

// Between two nested leases of one key may be a lease of another key. When that
// lease ends, the context of the innermost lease ends as well.
func TestInnerContextEndsWithTheLeasesAroundIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := hasp.New(newFaulty(), nil)
		defer c.Close()
		outer := lockNow(t, c, "k")
		between, err := c.Lock(outer.Context(), "m")
		if err != nil {
			t.Fatal(err)
		}
		inner, err := c.Lock(between.Context(), "k")
		if err != nil {
			t.Fatal(err)
		}
		ctx := inner.Context()
		if err := between.Unlock(t.Context()); err != nil {
			t.Fatal(err)
		}
		want(t, "cause", context.Cause(ctx), hasp.ErrReleased)
		if inner.Err() != nil || outer.Context().Err() != nil {
			t.Errorf("inner %v, the outer context %v", inner.Err(), outer.Context().Err())
		}
		for _, l := range []*hasp.Lease{inner, outer} {
			if err := l.Unlock(t.Context()); err != nil {
				t.Error(err)
			}
		}
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

// The inner lease's Lock was called with a context that the outer Unlock ends.
func TestInnerLeaseLastsOneMoreTermAfterTheOuterUnlock(t *testing.T) {
	for _, cancelled := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			f := newFaulty()
			c := hasp.New(f, nil)
			defer c.Close()
			outer := lockNow(t, c, "k")
			ctx, cancel := context.WithCancel(outer.Context())
			defer cancel()
			inner, err := c.Lock(ctx, "k")
			if err != nil {
				t.Fatal(err)
			}
			if err := outer.Unlock(t.Context()); err != nil {
				t.Fatal(err)
			}
			if cancelled {
				cancel()
			}
			time.Sleep(hasp.DefaultTTL)
			if err := inner.Err(); err != nil {
				t.Fatalf("within the term: %v", err)
			}
			time.Sleep(2 * hasp.DefaultTTL)
			want(t, "after it", inner.Err(), hasp.ErrLost)
			if !free(t, f, "k") {
				t.Error("the key is still held")
			}
			want(t, "Unlock", inner.Unlock(t.Context()), hasp.ErrLost)
		})
	}
}

// askedContext calls f when it is asked for its channel.
type askedContext struct {
	context.Context
	f func()
}

func (a askedContext) Done() <-chan struct{} {
	a.f()
	return a.Context.Done()
}

// A caller joins the hold while the renewal that would be the last asks the
// contexts of the leases before: the hold is wanted.
func TestReentryWhileTheLastRenewalAsks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := hasp.New(newFaulty(), &hasp.Options{TTL: 300 * time.Millisecond})
		defer c.Close()
		ctx, cancel := context.WithCancel(t.Context())
		outer, err := c.Lock(ctx, "k")
		if err != nil {
			t.Fatal(err)
		}
		live := context.WithoutCancel(outer.Context())
		cancel()
		time.Sleep(320 * time.Millisecond) // the next renewal is the last

		second, cancelSecond := context.WithCancel(live)
		joined := make(chan *hasp.Lease, 1)
		asked := func() {
			if l, err := c.Lock(live, "k"); err == nil {
				joined <- l
			}
		}
		if _, err := c.Lock(askedContext{second, asked}, "k"); err != nil {
			t.Fatal(err)
		}
		cancelSecond()
		time.Sleep(3 * time.Second)
		inner := <-joined
		if err := inner.Err(); err != nil {
			t.Errorf("a lease whose context goes on: %v", err)
		}
	})
}

// A tree of leases, each of which is found from just those inside it.
func TestReentryInATreeOfLeases(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := hasp.New(memlock.New(), nil)
		defer c.Close()
		type node struct {
			lease  *hasp.Lease
			parent int
		}
		r := rand.New(rand.NewPCG(1, 2))
		tree := []node{{lockNow(t, c, "0"), -1}}
		for i := 1; i < 200; i++ {
			parent := max(len(tree)-1-r.IntN(20), 0)
			if r.IntN(2) == 0 {
				parent = len(tree) - 1 // mostly deep
			}
			l, err := c.Lock(tree[parent].lease.Context(), fmt.Sprint(i))
			if err != nil {
				t.Fatal(err)
			}
			tree = append(tree, node{l, parent})
		}
		for i := range tree {
			inside := map[int]bool{}
			for at := i; at >= 0; at = tree[at].parent {
				inside[at] = true
			}
			for key := range tree {
				l, err := c.TryLock(tree[i].lease.Context(), fmt.Sprint(key))
				if (err == nil) != inside[key] {
					t.Fatalf("lease %d inside %d: %v; %v", i, key, inside[key], err)
				}
				if err == nil {
					l.Unlock(t.Context())
				}
			}
		}
		for i := range tree {
			if err := tree[len(tree)-1-i].lease.Unlock(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	})
}
