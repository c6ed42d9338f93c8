package hasp_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/memlock"
)

func TestDo(t *testing.T) {
	withClient(t, nil, func(t *testing.T, f *faulty, c *hasp.Client) {
		boom := errors.New("boom")
		do := func(fn func(context.Context, *hasp.Lease) error) error { return hasp.Do(t.Context(), c, "k", fn) }

		if err := do(func(ctx context.Context, l *hasp.Lease) error {
			if ctx != l.Context() || l.Key() != "k" {
				t.Error("fn did not get the lease and its context")
			}
			return hasp.Do(ctx, c, "k", func(context.Context, *hasp.Lease) error { return nil })
		}); err != nil {
			t.Error(err)
		}
		want(t, "fn unlocked the lease itself", do(func(ctx context.Context, l *hasp.Lease) error { return l.Unlock(ctx) }), nil)
		if err := do(func(context.Context, *hasp.Lease) error { return boom }); err != boom {
			t.Errorf("got %v, want fn's own error", err)
		}
		lose := func(result error) error {
			return do(func(ctx context.Context, _ *hasp.Lease) error {
				f.Break(ctx, "k")
				<-ctx.Done()
				return result
			})
		}
		want(t, "lost, fn returned nil", lose(nil), hasp.ErrLost)
		err := lose(boom)
		want(t, "lost, fn failed", err, hasp.ErrLost)
		want(t, "lost, fn failed", err, boom)
		if text := lose(context.Canceled).Error(); !strings.HasPrefix(text, `hasp: unlock "k": lease lost: the store does not have it`) {
			t.Errorf("got %q, which does not begin with the loss", text)
		}

		func() {
			defer func() {
				if r := recover(); r != "oops" {
					t.Errorf("recovered %v", r)
				}
			}()
			do(func(context.Context, *hasp.Lease) error { panic("oops") })
		}()
		done := make(chan struct{})
		go func() {
			defer close(done)
			do(func(context.Context, *hasp.Lease) error { runtime.Goexit(); return nil })
		}()
		<-done
		freed(t, f, "k", "a panic or Goexit left the key locked")
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		err = hasp.Do(ctx, c, "k", func(context.Context, *hasp.Lease) error { t.Error("fn ran"); return nil })
		want(t, "cancelled before", err, context.Canceled)
	})
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
	withEnds(t, backend.EndsPromptly, nil, func(t *testing.T, f *faulty, c *hasp.Client) {
		keys := make([]string, 50)
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

func TestLockAllOfOverlappingSetsDoesNotDeadlock(t *testing.T) {
	c := hasp.New(memlock.New(), nil)
	defer c.Close()
	var wg sync.WaitGroup
	for i := range 6 {
		wg.Go(func() {
			keys := []string{"a", "b", "c"}
			keys[0], keys[i%3] = keys[i%3], keys[0]
			for range 100 {
				ls, err := hasp.LockAll(t.Context(), c, keys[:2+i%2])
				if err != nil {
					t.Error(err)
					return
				}
				unlock(t, ls)
			}
		})
	}
	wg.Wait()
}

func TestZeroLeasesHoldNothing(t *testing.T) {
	var ls hasp.Leases
	want(t, "the context has ended", ls.Context().Err(), nil)
	if n, err := len(ls.All()), errors.Join(ls.Err(), ls.Unlock(t.Context())); n != 0 || err != nil {
		t.Errorf("%d leases, %v", n, err)
	}
}

// panicky is a Locker that panics at one key, as a wrapper with a bug does.
type panicky struct{ hasp.Locker }

func (p panicky) Lock(ctx context.Context, key string, opts ...hasp.Option) (*hasp.Lease, error) {
	if key == "b" {
		panic("bug")
	}
	return p.Locker.Lock(ctx, key, opts...)
}

// A panic at a later key leaves none of the keys locked.
func TestLockAllUnlocksIfALockerPanics(t *testing.T) {
	c := hasp.New(memlock.New(), nil)
	defer c.Close()
	func() {
		defer func() {
			if r := recover(); r != "bug" {
				t.Errorf("recovered %v", r)
			}
		}()
		hasp.LockAll(t.Context(), panicky{c}, []string{"a", "b"})
	}()
	lease, err := c.TryLock(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	lease.Unlock(t.Context())
}
