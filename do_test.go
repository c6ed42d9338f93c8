package hasp_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

// underLock is the calls that run a function while they hold "k".
var underLock = map[string]func(context.Context, hasp.Locker, func(context.Context, *hasp.Lease) error, ...hasp.Option) error{
	"Do": func(ctx context.Context, l hasp.Locker, fn func(context.Context, *hasp.Lease) error, opts ...hasp.Option) error {
		return hasp.Do(ctx, l, "k", fn, opts...)
	},
	"DoAll": func(ctx context.Context, l hasp.Locker, fn func(context.Context, *hasp.Lease) error, opts ...hasp.Option) error {
		return hasp.DoAll(ctx, l, []string{"z", "k", "a"}, func(ctx context.Context, ls *hasp.Leases) error {
			return fn(ctx, ls.All()[1])
		}, opts...)
	},
	"Lead": func(ctx context.Context, l hasp.Locker, fn func(context.Context, *hasp.Lease) error, opts ...hasp.Option) error {
		return hasp.Lead(ctx, l, "k", fn, opts...)
	},
}

func TestResultsOfAFunctionUnderLock(t *testing.T) {
	boom := errors.New("boom")
	for name, do := range underLock {
		t.Run(name, func(t *testing.T) {
			withClient(t, nil, func(t *testing.T, f *faulty, c *hasp.Client) {
				call := func(fn func(context.Context, *hasp.Lease) error) error { return do(t.Context(), c, fn) }
				want(t, "fn returned nil", call(func(ctx context.Context, l *hasp.Lease) error {
					if l.Key() != "k" || ctx != l.Context() && name != "DoAll" {
						t.Error("fn did not get the lease and its context")
					}
					return hasp.Do(ctx, c, "k", func(context.Context, *hasp.Lease) error { return nil })
				}), nil)
				if err := call(func(context.Context, *hasp.Lease) error { return boom }); err != boom {
					t.Errorf("got %v, want fn's own error", err)
				}
				want(t, "fn unlocked the lease itself", call(func(ctx context.Context, l *hasp.Lease) error { return l.Unlock(ctx) }), nil)

				for what, end := range map[string]func(){"a panic": func() { panic("oops") }, "Goexit": runtime.Goexit} {
					for _, lost := range []bool{false, true} {
						done := make(chan any)
						go func() {
							defer func() { done <- recover() }()
							call(func(ctx context.Context, _ *hasp.Lease) error {
								if lost {
									f.Break(ctx, "k")
									<-ctx.Done()
								}
								end()
								return nil
							})
							t.Errorf("%s was swallowed", what)
						}()
						if r := <-done; r != nil && r != "oops" {
							t.Errorf("recovered %v", r)
						}
						if !free(t, f, "k") {
							t.Fatalf("%s left the key locked", what)
						}
					}
				}

				ctx, cancel := context.WithCancel(t.Context())
				cancel()
				err := do(ctx, c, func(context.Context, *hasp.Lease) error { t.Error("fn ran"); return nil })
				want(t, "cancelled before", err, context.Canceled)

				err = call(func(context.Context, *hasp.Lease) error { f.set(down); return boom })
				want(t, "Unlock failed", err, boom)
				want(t, "Unlock failed", err, errNet)
				f.set(up)
			})
		})
	}
}

func TestLockAll(t *testing.T) {
	withClient(t, nil, func(t *testing.T, f *faulty, c *hasp.Client) {
		keys := []string{"c", "a", "b", "a"}
		ls, err := hasp.LockAll(t.Context(), c, keys)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, l := range ls.All() {
			got = append(got, l.Key())
		}
		if !slices.Equal(got, []string{"a", "b", "c"}) || keys[0] != "c" {
			t.Errorf("locked %v of %v", got, keys)
		}
		again, err := hasp.LockAll(ls.Context(), c, []string{"b", "a"})
		if err != nil {
			t.Fatal("re-entry:", err)
		}
		unlock(t, again)

		want(t, "one is held", errOf(hasp.LockAll(t.Context(), c, []string{"0", "b"}, hasp.WithMaxWait(time.Second))), hasp.ErrHeld)
		freed(t, f, "0", "all or none: the first is still held")

		f.Break(t.Context(), "a")
		<-ls.Context().Done()
		want(t, "cause", context.Cause(ls.Context()), hasp.ErrLost)
		want(t, "Err", ls.Err(), hasp.ErrLost)
		want(t, "Unlock", ls.Unlock(t.Context()), hasp.ErrLost)
		for _, key := range []string{"a", "b", "c"} {
			freed(t, f, key, key+" is still held")
		}
		want(t, "no keys", errOf(hasp.LockAll(t.Context(), c, nil)), hasp.ErrInvalid)
		want(t, "an empty key", errOf(hasp.LockAll(t.Context(), c, []string{"a", ""})), hasp.ErrInvalid)
	})
}

// One timeout for each lease would be minutes.
func TestUnlockOfManyLeasesDuringAnOutageTakesTwoTimeouts(t *testing.T) {
	withEnds(t, backend.CancelPrompt, nil, func(t *testing.T, f *faulty, c *hasp.Client) {
		keys := make([]string, 200)
		for i := range keys {
			keys[i] = fmt.Sprint(i)
		}
		ls, err := hasp.LockAll(t.Context(), c, keys)
		if err != nil {
			t.Fatal(err)
		}
		hung := make(chan struct{})
		f.set(func(f *faulty) { f.release = func(backend.Claim, func() error) error { <-hung; return errNet } })
		start := time.Now()
		if ls.Unlock(t.Context()) == nil {
			t.Error("no error")
		}
		within(t, "Unlock", start, 2*hasp.DefaultTimeout+50*time.Millisecond)
		close(hung)
		f.set(up)
		time.Sleep(2 * hasp.DefaultTimeout)
		for _, key := range keys {
			freed(t, f, key, key+" is still held")
		}
	})
}

func TestLockAllMaxWaitBoundsTheWhole(t *testing.T) {
	withClient(t, nil, func(t *testing.T, f *faulty, c *hasp.Client) {
		a, b := lockNow(t, c, "a"), lockNow(t, c, "b")
		time.AfterFunc(3*time.Second, func() { a.Unlock(context.Background()) })
		start := time.Now()
		want(t, "LockAll", errOf(hasp.LockAll(t.Context(), c, []string{"a", "b"}, hasp.WithMaxWait(5*time.Second))), hasp.ErrHeld)
		if waited := time.Since(start); waited > 5*time.Second+50*time.Millisecond || waited < 4*time.Second {
			t.Errorf("waited %v", waited)
		}
		b.Unlock(t.Context())
	})
}

func TestZeroLeasesHoldNothing(t *testing.T) {
	var ls hasp.Leases
	want(t, "the context has ended", ls.Context().Err(), nil)
	if n, err := len(ls.All()), errors.Join(ls.Err(), ls.Unlock(t.Context())); n != 0 || err != nil {
		t.Errorf("%d leases, %v", n, err)
	}
}
