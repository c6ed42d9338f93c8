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

// Close also ends a wait whose call the store does not answer, if the driver ends
// cancelled calls or the engine can leave the call behind.
func TestCloseEndsAWaitAtAHungStore(t *testing.T) {
	for _, tc := range []struct {
		ends        backend.Ends
		cancellable bool
	}{
		{backend.EndsSometime, false}, {backend.EndsSometime, true},
		{backend.EndsByDeadline, true},
		{backend.EndsPromptly, false}, {backend.EndsPromptly, true},
	} {
		synctest.Test(t, func(t *testing.T) {
			f := newFaulty()
			f.ends = tc.ends
			c := hasp.New(f, nil)
			f.set(func(f *faulty) {
				f.acquire = func(backend.Claim, func() (backend.Grant, error)) (backend.Grant, error) {
					time.Sleep(time.Hour)
					return backend.Grant{}, errNet
				}
			})
			ctx, cancel := context.Background(), context.CancelFunc(func() {})
			if tc.cancellable {
				ctx, cancel = context.WithCancel(ctx)
			}
			defer cancel()
			var began time.Time
			done := make(chan struct{})
			go func() {
				defer close(done)
				_, err := c.Lock(ctx, "k")
				want(t, "Lock", err, hasp.ErrClosed)
				if d := time.Since(began); d > 50*time.Millisecond {
					t.Errorf("%v: Lock returned %v after Close began", tc, d)
				}
			}()
			time.Sleep(100 * time.Millisecond)
			began = time.Now()
			c.Close()
			if d := time.Since(began); d > hasp.DefaultTimeout+time.Second {
				t.Errorf("%v: Close took %v", tc, d)
			}
			<-done
			time.Sleep(2 * time.Hour) // for calls that hang
		})
	}
}

// Whatever is in flight when Close begins, Close returns within Timeout and a
// second and every caller returns. Once the store's calls have ended, no
// goroutine is left.
func TestCloseInEveryState(t *testing.T) {
	hang := func() { time.Sleep(time.Hour) }
	hangAcquire := func(f *faulty) {
		f.acquire = func(backend.Claim, func() (backend.Grant, error)) (backend.Grant, error) {
			hang()
			return backend.Grant{}, errNet
		}
	}
	hangRelease := func(f *faulty) {
		f.release = func(backend.Claim, func() error) error { hang(); return errNet }
	}
	hangRenew := func(f *faulty) {
		f.renew = func(ctx context.Context, _ backend.Claim, _ func() (backend.Grant, error)) (backend.Grant, error) {
			if f.ends == backend.EndsSometime {
				hang()
			} else {
				<-ctx.Done()
			}
			return backend.Grant{}, errNet
		}
	}
	for name, prepare := range map[string]func(t *testing.T, f *faulty, c *hasp.Client, spawn func(func())){
		"unused": func(*testing.T, *faulty, *hasp.Client, func(func())) {},
		"idle": func(t *testing.T, _ *faulty, c *hasp.Client, _ func(func())) {
			lockNow(t, c, "k").Unlock(t.Context())
		},
		"holders, nested and in line": func(t *testing.T, _ *faulty, c *hasp.Client, spawn func(func())) {
			l := lockNow(t, c, "k")
			c.Lock(l.Context(), "k")
			for range 3 {
				spawn(func() { c.Lock(t.Context(), "k") })
			}
		},
		"the last holder unlocks": func(t *testing.T, f *faulty, c *hasp.Client, spawn func(func())) {
			l := lockNow(t, c, "k")
			f.set(hangRelease)
			spawn(func() { l.Unlock(t.Context()) })
			spawn(func() { c.Lock(t.Context(), "k") })
		},
		"a hung attempt": func(t *testing.T, f *faulty, c *hasp.Client, spawn func(func())) {
			f.set(hangAcquire)
			for range 3 {
				spawn(func() { c.Lock(t.Context(), "k") })
			}
		},
		"a hung renewal": func(t *testing.T, f *faulty, c *hasp.Client, _ func(func())) {
			lockNow(t, c, "k")
			f.set(hangRenew)
			time.Sleep(hasp.DefaultTTL / 2)
		},
		"a hung Extend": func(t *testing.T, f *faulty, c *hasp.Client, spawn func(func())) {
			l := lockNow(t, c, "k")
			f.set(hangRenew)
			spawn(func() { l.Extend(t.Context(), time.Minute) })
		},
		"clean-up of a hung store": func(t *testing.T, f *faulty, c *hasp.Client, _ func(func())) {
			f.set(func(f *faulty) { f.acquire = lostReply })
			f.set(hangRelease)
			c.TryLock(t.Context(), "k")
		},
		"an outage": func(t *testing.T, f *faulty, c *hasp.Client, spawn func(func())) {
			lockNow(t, c, "k")
			f.set(down)
			spawn(func() { c.Lock(t.Context(), "other") })
			time.Sleep(hasp.DefaultTTL / 2)
		},
		"a lost lease": func(t *testing.T, f *faulty, c *hasp.Client, _ func(func())) {
			l := lockNow(t, c, "k")
			f.Break(t.Context(), "k")
			<-l.Context().Done()
		},
		"another Close": func(t *testing.T, _ *faulty, c *hasp.Client, spawn func(func())) {
			lockNow(t, c, "k")
			spawn(func() { c.Close() })
		},
	} {
		for _, ends := range []backend.Ends{backend.EndsSometime, backend.EndsByDeadline, backend.EndsPromptly} {
			synctest.Test(t, func(t *testing.T) {
				f := newFaulty()
				f.ends = ends
				c := hasp.New(f, nil)
				var callers sync.WaitGroup
				prepare(t, f, c, func(call func()) { callers.Go(call) })
				synctest.Wait()
				began := time.Now()
				if err := c.Close(); err != nil {
					t.Errorf("%s: %v", name, err)
				}
				callers.Wait()
				if d := time.Since(began); d > hasp.DefaultTimeout+time.Second {
					t.Errorf("%s, ends %v: it took %v", name, ends, d)
				}
				time.Sleep(2 * time.Hour) // for calls that hang; synctest fails if a goroutine is left then
			})
		}
	}
}

// The goroutine that renews stays for a second after the last lease. Close does
// not wait for it to end by itself.
func TestCloseAfterTheLastUnlockIsImmediate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := hasp.New(memlock.New(), nil)
		if err := lockNow(t, c, "k").Unlock(t.Context()); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		began := time.Now()
		c.Close()
		if took := time.Since(began); took != 0 {
			t.Errorf("Close took %v", took)
		}
	})
}
