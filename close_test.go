package hasp_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/memlock"
)

func TestCloseWithHoldersAndWaiters(t *testing.T) {
	for name, driver := range map[string]func() backend.Driver{
		"polling": func() backend.Driver { return newFaulty() },
		"waiter":  func() backend.Driver { return memlock.New() },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := hasp.New(driver(), nil)
				good := lockNow(t, c, "good")
				bad := lockNow(t, c, "bad")
				goodCtx := good.Context()
				var wg sync.WaitGroup
				for range 5 {
					wg.Go(func() {
						_, err := c.Lock(t.Context(), "bad")
						want(t, "waiter", err, hasp.ErrClosed)
					})
				}
				synctest.Wait()
				wg.Go(func() {
					<-goodCtx.Done()
					want(t, "cause", context.Cause(goodCtx), hasp.ErrClosed)
					want(t, "Err", good.Err(), hasp.ErrClosed)
					time.Sleep(time.Second)
					if err := good.Unlock(t.Context()); err != nil {
						t.Errorf("Unlock while Close waits: %v", err)
					}
				})
				start := time.Now()
				if err := c.Close(); err != nil {
					t.Error(err)
				}
				if took := time.Since(start); took != hasp.DefaultTimeout {
					t.Errorf("Close took %v with a holder that does not unlock, want %v", took, hasp.DefaultTimeout)
				}
				wg.Wait()
				want(t, "Unlock after Close", bad.Unlock(t.Context()), hasp.ErrClosed)
				want(t, "Extend after Close", bad.Extend(t.Context(), time.Minute), hasp.ErrClosed)
				_, err := c.Lock(t.Context(), "k")
				want(t, "Lock after Close", err, hasp.ErrClosed)
				_, err = c.TryLock(t.Context(), "k")
				want(t, "TryLock after Close", err, hasp.ErrClosed)
				_, err = c.Inspect(t.Context(), "k")
				want(t, "Inspect after Close", err, hasp.ErrClosed)
				if err := c.Close(); err != nil {
					t.Errorf("second Close: %v", err)
				}
			}) // synctest fails if a goroutine is left
		})
	}
}

func TestCloseNeverFreesAKeyUnderItsHolder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memlock.NewStore()
		c, other := hasp.New(store.Driver(), nil), hasp.New(store.Driver(), nil)
		defer other.Close()
		lockNow(t, c, "k")
		c.Close()
		_, err := other.TryLock(t.Context(), "k")
		want(t, "TryLock by another", err, hasp.ErrHeld)
		start := time.Now()
		l := lockNow(t, other, "k")
		if waited := time.Since(start); waited > hasp.DefaultTTL {
			t.Errorf("the key ran out after %v", waited)
		}
		l.Unlock(t.Context())
	})
}

func TestCloseWithNobodyThereIsQuick(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := hasp.New(newFaulty(), nil)
		l := lockNow(t, c, "k")
		l.Unlock(t.Context())
		start := time.Now()
		c.Close()
		if took := time.Since(start); took != 0 {
			t.Errorf("took %v", took)
		}
	})
}

func TestCloseWithCallsUnderWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memlock.NewStore()
		f := &faulty{Driver: store.Driver()}
		f.acquire = func(_ backend.Claim, send func() (backend.Grant, error)) (backend.Grant, error) {
			time.Sleep(time.Second)
			return send()
		}
		c := hasp.New(f, nil)
		var wg sync.WaitGroup
		for _, key := range []string{"a", "b", "c", "c", "c"} {
			wg.Go(func() {
				l, err := c.Lock(t.Context(), key)
				if err == nil {
					want(t, "a lease that Close passed by", l.Err(), hasp.ErrClosed)
					err = l.Unlock(t.Context())
				}
				if err != nil && !errors.Is(err, hasp.ErrClosed) {
					t.Error(err)
				}
			})
		}
		time.Sleep(500 * time.Millisecond)
		start := time.Now()
		c.Close()
		if took := time.Since(start); took > 2*time.Second {
			t.Errorf("took %v", took)
		}
		wg.Wait()
		other := hasp.New(&faulty{Driver: store.Driver()}, nil)
		defer other.Close()
		for _, key := range []string{"a", "b", "c"} {
			l, err := other.TryLock(t.Context(), key)
			if err != nil {
				t.Errorf("%q is still held: %v", key, err)
				continue
			}
			l.Unlock(t.Context())
		}
	})
}

func TestCloseDuringAnOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFaulty()
		c := hasp.New(f, nil)
		l := lockNow(t, c, "k")
		f.set(down)
		want(t, "Unlock", l.Unlock(t.Context()), errNet)
		_, err := c.TryLock(t.Context(), "other")
		want(t, "TryLock", err, errNet)
		start := time.Now()
		c.Close()
		if took := time.Since(start); took > 2*hasp.DefaultTimeout {
			t.Errorf("took %v", took)
		}
		want(t, "Unlock after Close", l.Unlock(t.Context()), hasp.ErrClosed)
	})
}

func TestIdleClientLeavesNoGoroutine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := hasp.New(newFaulty(), nil)
		l := lockNow(t, c, "k")
		l.Unlock(t.Context())
		time.Sleep(2 * time.Second)
		// No Close: synctest fails if the renewer is still there.
	})
}
