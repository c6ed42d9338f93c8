package hasp_test

import (
	"context"
	"errors"
	"maps"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/memlock"
)

// This file tests that Do, DoAll and Lead renew until fn returns.

// withTwo is withClient with a second Client on the same store.
func withTwo(t *testing.T, o *hasp.Options, run func(t *bench, rival *hasp.Client)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		store := new(memlock.Store)
		f := faultyOver(store)
		c, rival := opened(t, f, o), opened(t, store.Driver(), nil)
		run(&bench{t, f, c}, rival)
	})
}

// runTwo runs withTwo in a subtest.
func runTwo(t *testing.T, name string, o *hasp.Options, run func(t *bench, rival *hasp.Client)) {
	t.Helper()
	t.Run(name, func(t *testing.T) { withTwo(t, o, run) })
}

// drain waits for the end of ctx, and goes on for three terms, as an fn that cleans up does. It
// fails the test if a key is free meanwhile.
func (t *bench) drain(ctx context.Context, keys ...string) {
	t.Helper()
	<-ctx.Done()
	for range 30 {
		time.Sleep(hasp.DefaultTTL / 10)
		for _, key := range keys {
			if t.free(key) {
				t.Errorf("%s was free while fn drained", key)
				return
			}
		}
	}
}

func TestRenewedUntilFnReturns(t *testing.T) {
	calls := maps.Clone(underLock)
	calls["Do in the context of a lease"] = func(ctx context.Context, l hasp.Locker, fn leaseFn) error {
		outer := lockIn(t, l, ctx, "k")
		err := hasp.Do(outer.Context(), l, "k", fn)
		return errors.Join(err, outer.Unlock(ctx))
	}
	calls["Do in a lease that is unlocked first"] = func(ctx context.Context, l hasp.Locker, fn leaseFn) error {
		outer := lockIn(t, l, ctx, "k")
		return hasp.Do(outer.Context(), l, "k", func(ctx context.Context, l *hasp.Lease) error {
			return errors.Join(outer.Unlock(ctx), fn(ctx, l))
		})
	}
	for name, do := range calls {
		keys := []string{"k"}
		if name == "DoAll" {
			keys = []string{"a", "k", "z"}
		}
		runTwo(t, name, nil, func(t *bench, rival *hasp.Client) {
			ctx := timeout(t, t.Context(), time.Minute)
			var inside, got time.Time // when fn returned, and when the rival got the key
			var wg sync.WaitGroup
			err := do(ctx, t.Client, func(ctx context.Context, _ *hasp.Lease) error {
				wg.Go(func() {
					l := lockNow(t, rival, "k")
					got = time.Now()
					unlock(t, l)
				})
				t.drain(ctx, keys...)
				inside = time.Now()
				return nil
			})
			want(t, "result", err, nil)
			wg.Wait()
			equal(t, "time until another Client got the key, after fn had returned", got.Sub(inside), 0)
			t.freed("it is still held", keys...)
			synctest.Wait()
			t.nothingLeft()
		})
	}
}

// All contexts have ended when Do returns. A lease that is left on the hold then lasts for one more
// term.
func TestAfterDoItsHoldLastsOneMoreTerm(t *testing.T) {
	onBench(t, func(t *bench) {
		ctx, cancel := context.WithCancel(t.Context())
		var inner *hasp.Lease
		want(t, "Do", hasp.Do(ctx, t.Client, "k", func(ctx context.Context, _ *hasp.Lease) error {
			inner = t.lockIn(ctx, "k")
			cancel()
			t.drain(ctx, "k")
			return nil
		}), nil)
		time.Sleep(hasp.DefaultTTL)
		want(t, "within the term", inner.Err(), nil)
		time.Sleep(2 * hasp.DefaultTTL)
		want(t, "after it", inner.Err(), hasp.ErrLost)
		t.freed("the key is still held", "k")
		want(t, "Unlock", inner.Unlock(t.Context()), hasp.ErrLost)
	})
}

func TestLossWhileFnDrains(t *testing.T) {
	boom := errors.New("boom")
	for how, lose := range map[string]func(f *faulty){
		"broken": func(f *faulty) { f.Break(context.Background(), "k") },
		"outage": func(f *faulty) { f.set(down) },
	} {
		for name, do := range underLock {
			runClient(t, name+" "+how, nil, func(t *bench) {
				ctx, cancel := context.WithCancel(t.Context())
				err := do(ctx, t.Client, func(ctx context.Context, lease *hasp.Lease) error {
					cancel()
					time.Sleep(2 * hasp.DefaultTTL)
					want(t, "before the loss", lease.Err(), nil)
					lose(t.faulty)
					time.Sleep(hasp.DefaultTTL)
					want(t, "after the loss", lease.Err(), hasp.ErrLost)
					want(t, "the context ended first", context.Cause(ctx), context.Canceled)
					t.set(up)
					return boom
				})
				want(t, "the result", err, hasp.ErrLost)
				want(t, "the result", err, boom)
				if text := err.Error(); name == "Do" && !strings.HasPrefix(text, `hasp: unlock "k": lease lost: `) {
					t.Errorf("got %q, which does not begin with the loss", text)
				}
			})
		}
	}
}

// WithMaxHold and WithoutRenewal end the lease although fn has not returned.
func TestOptionsBoundARenewalUntilFnReturns(t *testing.T) {
	for longest, opt := range map[time.Duration]hasp.Option{
		3 * hasp.DefaultTTL: hasp.WithMaxHold(3 * hasp.DefaultTTL),
		hasp.DefaultTTL:     hasp.WithoutRenewal(),
	} {
		onBench(t, func(t *bench) {
			ctx, cancel := context.WithCancel(t.Context())
			start := time.Now()
			err := hasp.Do(ctx, t.Client, "k", func(_ context.Context, l *hasp.Lease) error {
				cancel()
				time.Sleep(longest * 9 / 10)
				want(t, "before its end", l.Err(), nil)
				time.Sleep(time.Until(start.Add(longest)))
				want(t, "after its end", l.Err(), hasp.ErrLost)
				time.Sleep(hasp.DefaultTTL / 10)
				t.freed("the key is still held", "k")
				return nil
			}, opt)
			want(t, "Do", err, hasp.ErrLost)
		})
	}
}

type lockerFunc func(ctx context.Context, key string, opts ...hasp.Option) (*hasp.Lease, error)

func (f lockerFunc) Lock(ctx context.Context, key string, opts ...hasp.Option) (*hasp.Lease, error) {
	return f(ctx, key, opts...)
}

func (f lockerFunc) TryLock(ctx context.Context, key string, opts ...hasp.Option) (*hasp.Lease, error) {
	return f(ctx, key, opts...)
}

// If the context of a lease ends before fn begins, fn is not called.
func TestFnDoesNotBeginAfterTheEndOfItsContext(t *testing.T) {
	ends := map[string]error{"cancel": context.Canceled, "Unlock": hasp.ErrReleased, "Close": hasp.ErrClosed, "loss": hasp.ErrLost}
	for name, do := range underLock {
		for how, cause := range ends {
			runTwo(t, name+" "+how, nil, func(t *bench, rival *hasp.Client) {
				ctx, cancel := context.WithCancel(t.Context())
				ended, runs := false, 0
				late := lockerFunc(func(ctx context.Context, key string, opts ...hasp.Option) (*hasp.Lease, error) {
					l, err := t.Lock(ctx, key, opts...)
					switch {
					case ended && key == "z" && err == nil:
						t.Error("DoAll goes on without k")
					case ended, key != "k":
					case how == "cancel":
						cancel()
					case how == "Unlock":
						unlock(t, l)
					case how == "Close":
						go t.Client.Close()
						synctest.Wait()
					default:
						t.faulty.Break(t.Context(), "k")
						time.Sleep(hasp.DefaultTTL)
					}
					ended = ended || key == "k"
					return l, err
				})
				err := do(ctx, late, func(context.Context, *hasp.Lease) error { runs++; return nil })
				if name == "Lead" && how == "loss" {
					equal(t, "runs after Lead has led again", runs, 1)
					return
				}
				want(t, "the result", err, cause)
				if runs != 0 || how != "cancel" && errors.Is(err, context.Canceled) {
					t.Errorf("%d runs, %v", runs, err)
				}
				unlock(t, await.Value(hasp.LockAll(t.Context(), rival, []string{"a", "k", "z"}, hasp.WithMaxWait(0))))
			})
		}
	}
}

// The loss of one key ends the context, but the other key stays locked until fn returns.
func TestDoAll(t *testing.T) {
	onBench(t, func(t *bench) {
		keys := []string{"b", "a"}
		err := hasp.DoAll(t.Context(), t.Client, keys, func(ctx context.Context, ls *hasp.Leases) error {
			if ctx != ls.Context() || len(ls.All()) != 2 {
				t.Error("fn did not get the leases and their context")
			}
			t.faulty.Break(ctx, "a")
			<-ctx.Done()
			want(t, "cause", context.Cause(ctx), hasp.ErrLost)
			t.drain(ctx, "b")
			return ls.All()[1].Unlock(ctx)
		})
		want(t, "one was lost", err, hasp.ErrLost)
		if errors.Is(err, hasp.ErrReleased) {
			t.Errorf("got %v, want nothing of the other", err)
		}
	})
}
