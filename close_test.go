package hasp_test

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/memlock"
)

func TestCloseWithHoldersAndWaiters(t *testing.T) {
	for _, polls := range []bool{true, false} {
		onBench(t, func(t *bench) {
			if !polls {
				t.Client = opened(t, t.Driver, nil)
			}
			good := t.lock("good", hasp.WithShared())
			bad := t.lock("bad")
			goodCtx := good.Context()
			var wg sync.WaitGroup
			for range 5 {
				wg.Go(func() { want(t, "waiter", t.lockErr("bad"), hasp.ErrClosed) })
			}
			wg.Go(func() { want(t, "waiter for a shared lease", t.lockErr("good"), hasp.ErrClosed) })
			synctest.Wait()
			start := time.Now()
			wg.Go(func() {
				<-goodCtx.Done()
				want(t, "cause", context.Cause(goodCtx), hasp.ErrClosed)
				want(t, "Err", good.Err(), hasp.ErrClosed)
				time.Sleep(time.Second)
				want(t, "Unlock while Close waits", good.Unlock(t.Context()), nil)
				want(t, "second Close", t.Client.Close(), nil)
				equal(t, "time of both Closes", time.Since(start), hasp.DefaultTimeout)
			})
			const left = `hasp: close: leases were not unlocked, and end with their terms: "bad"`
			if err := t.Client.Close(); err == nil || err.Error() != left {
				t.Errorf("Close: got %v, want %s", err, left)
			}
			equal(t, "time of Close with a holder that does not unlock", time.Since(start), hasp.DefaultTimeout)
			wg.Wait()
			for what, err := range map[string]error{
				"Unlock":  bad.Unlock(t.Context()),
				"Extend":  bad.Extend(t.Context(), time.Minute),
				"Lock":    t.lockErr("k"),
				"TryLock": t.tryErr("k"),
				"Inspect": errOf(t.Client.Inspect(t.Context(), "k")),
			} {
				want(t, what+" after Close", err, hasp.ErrClosed)
			}
		}) // here synctest fails if a goroutine is left
	}
}

func TestCloseNamesTheKeysThatAreLeft(t *testing.T) {
	onBench(t, func(t *bench) {
		for i := range 12 {
			t.lockIn(t.lock(fmt.Sprint("key ", 10+i)).Context(), fmt.Sprint("key ", 10+i))
		}
		unlock(t, t.lock("unlocked"))
		<-t.lock("lost", hasp.WithMaxHold(1)).Context().Done()
		unlocked := t.lock("of unknown outcome")
		t.set(down)
		want(t, "Unlock", unlocked.Unlock(t.Context()), errNet)

		const left = `end with their terms: "key 10", "key 11", "key 12", "key 13", "key 14", "key 15", "key 16", "key 17", "key 18", "key 19", and 2 more`
		if err := t.Client.Close(); err == nil || !strings.HasSuffix(err.Error(), left) {
			t.Errorf("got %v", err)
		}
		want(t, "Unlock after Close, of unknown outcome", unlocked.Unlock(t.Context()), hasp.ErrClosed)
	})
}

// Close waits until each call has ended, on whichever goroutine it runs, and then closes the
// driver.
func TestCloseWaitsForCalls(t *testing.T) {
	background := context.Background()
	for name, ask := range map[string]func(t *bench, l *hasp.Lease) error{
		"Inspect": func(t *bench, _ *hasp.Lease) error { return errOf(t.Client.Inspect(background, "k")) },
		"Break":   func(t *bench, _ *hasp.Lease) error { return t.Client.Break(background, "other") },
		"Extend":  func(_ *bench, l *hasp.Lease) error { return l.Extend(background, time.Minute) },
		"Unlock":  func(_ *bench, l *hasp.Lease) error { return l.Unlock(background) },
		"Lock":    func(t *bench, _ *hasp.Lease) error { return errOf(t.Client.Lock(background, "new")) },
	} {
		for _, ends := range []backend.Cancellation{backend.CancelNone, backend.CancelPrompt} {
			runEnds(t, fmt.Sprint(name, ends), ends, nil, func(t *bench) {
				l := t.lock("k")
				t.ends = backend.CancelNone // the store answers even after Close has begun
				if name != "Extend" && name != "Unlock" {
					unlock(t, l)
				}
				late := 0 // calls that ended after the driver was closed
				lags := func(q *call) error {
					time.Sleep(time.Second)
					err := q.send()
					if err != nil {
						late++
					}
					return err
				}
				t.set(func(f *faulty) { f.acquire, f.renew, f.release, f.inspect = lags, lags, lags, lags })
				done := make(chan error)
				go func() { done <- ask(t, l) }()
				time.Sleep(500 * time.Millisecond)
				t.Client.Close()
				if err := <-done; err != nil {
					want(t, "the call", err, hasp.ErrClosed)
				}
				if ask(t, l) == nil {
					t.Error("a call after Close has succeeded")
				}
				equal(t, "calls of the closed driver", late, 0)
				if name == "Lock" {
					equal(t, "releases, also of the late grant", t.releases(), 2)
				}
			})
		}
	}
}

func TestIdleClientLeavesNoGoroutine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := await.Value(hasp.New(newFaulty(), nil))
		unlock(t, lockNow(t, c, "k"))
		time.Sleep(2 * time.Second)
		// No Close: synctest fails if the renewer is still there.
	})
}

// Whatever is in flight when Close begins, Close and every caller return within Timeout plus a
// second. When the calls to the store have ended, no goroutine is left.
func TestCloseInEveryState(t *testing.T) {
	hangRelease := func(f *faulty) { f.release = hung }
	hangRenew := func(f *faulty) {
		f.renew = untilEnd
		if f.ends == backend.CancelNone {
			f.renew = hung
		}
	}
	for name, prepare := range map[string]func(t *bench, spawn func(func())){
		"the last holder unlocks": func(t *bench, spawn func(func())) {
			l := t.lock("k")
			t.set(hangRelease)
			spawn(func() { l.Unlock(t.Context()) })
			spawn(func() { t.Lock(t.Context(), "k") })
		},
		"a hung attempt": func(t *bench, spawn func(func())) {
			t.onAcquire(hung)
			began := time.Now() // Close begins at the same moment
			for what, ctx := range map[string]context.Context{"may be cancelled": t.Context(), "cannot": context.Background()} {
				for range 3 {
					spawn(func() {
						want(t, "Lock", errOf(t.Lock(ctx, what)), hasp.ErrClosed)
						// Close cannot end a call that ends by its deadline.
						if t.ends != backend.CancelByDeadline || ctx.Done() != nil {
							within(t, fmt.Sprintf("ends %v: a Lock whose context %s", t.ends, what), began, 50*time.Millisecond)
						}
					})
				}
			}
		},
		"a hung renewal": func(t *bench, _ func(func())) {
			t.lock("k")
			t.set(hangRenew)
			time.Sleep(hasp.DefaultTTL / 2)
		},
		"a hung Extend": func(t *bench, spawn func(func())) {
			l := t.lock("k")
			t.set(hangRenew)
			spawn(func() { l.Extend(t.Context(), time.Minute) })
		},
		"clean-up of a hung store": func(t *bench, _ func(func())) {
			t.onAcquire(lostReply)
			t.set(hangRelease)
			t.TryLock(t.Context(), "k")
		},
	} {
		for _, ends := range everyEnd {
			withEnds(t, ends, nil, func(t *bench) {
				var callers sync.WaitGroup
				prepare(t, func(call func()) { callers.Go(call) })
				synctest.Wait()
				began := time.Now()
				if err := t.Client.Close(); err != nil && !strings.Contains(err.Error(), "leases were not unlocked") {
					t.Errorf("%s: %v", name, err)
				}
				callers.Wait()
				within(t, fmt.Sprintf("%s, ends %v: it", name, ends), began, hasp.DefaultTimeout+time.Second)
			})
		}
	}
}

// The user has not checked the error of New or Lock.
func TestNilClientsAndLeasesAreInvalid(t *testing.T) {
	var c *hasp.Client
	var l *hasp.Lease
	var ls *hasp.Leases
	lease, err := opened(t, memlock.NewDriver(), nil).Lock(t.Context(), "k")
	if err != nil {
		t.Fatal(err)
	}
	copied := new(hasp.Lease) // made so that go vet does not see the copy
	reflect.ValueOf(copied).Elem().Set(reflect.ValueOf(lease).Elem())
	for name, err := range map[string]error{
		"Lock":          errOf(c.Lock(t.Context(), "k")),
		"Resume":        errOf(c.Resume(t.Context(), hasp.Handle{Key: "k"})),
		"Inspect":       errOf(c.Inspect(t.Context(), "k")),
		"Break":         c.Break(t.Context(), "k"),
		"List":          errOf(listOf(c, t.Context(), "")),
		"Close":         c.Close(),
		"Unlock":        l.Unlock(t.Context()),
		"Extend":        l.Extend(t.Context(), time.Second),
		"Detach":        errOf(l.Detach(t.Context(), time.Second)),
		"Leases.Unlock": ls.Unlock(t.Context()),
		"a copy":        copied.Unlock(t.Context()),
	} {
		if !errors.Is(err, hasp.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := lease.Unlock(t.Context()); err != nil {
		t.Error(err)
	}
}
