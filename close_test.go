package hasp_test

import (
	"context"
	"errors"
	"fmt"
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
	for name, driver := range map[string]func() backend.Driver{
		"polling": func() backend.Driver { return newFaulty() },
		"waiter":  func() backend.Driver { return memlock.NewDriver() },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := await.Value(hasp.New(driver(), nil))
				good := lockNow(t, c, "good")
				bad := lockNow(t, c, "bad")
				goodCtx := good.Context()
				var wg sync.WaitGroup
				for range 5 {
					wg.Go(func() {
						want(t, "waiter", errOf(c.Lock(t.Context(), "bad")), hasp.ErrClosed)
					})
				}
				synctest.Wait()
				wg.Go(func() {
					<-goodCtx.Done()
					want(t, "cause", context.Cause(goodCtx), hasp.ErrClosed)
					want(t, "Err", good.Err(), hasp.ErrClosed)
					time.Sleep(time.Second)
					want(t, "Unlock while Close waits", good.Unlock(t.Context()), nil)
				})
				start := time.Now()
				const left = `hasp: close: leases were not unlocked, and end with their terms: "bad"`
				if err := c.Close(); err == nil || err.Error() != left {
					t.Errorf("Close: got %v, want %s", err, left)
				}
				equal(t, "time of Close with a holder that does not unlock", time.Since(start), hasp.DefaultTimeout)
				wg.Wait()
				want(t, "Unlock after Close", bad.Unlock(t.Context()), hasp.ErrClosed)
				want(t, "Extend after Close", bad.Extend(t.Context(), time.Minute), hasp.ErrClosed)
				want(t, "Lock after Close", errOf(c.Lock(t.Context(), "k")), hasp.ErrClosed)
				want(t, "TryLock after Close", errOf(c.TryLock(t.Context(), "k")), hasp.ErrClosed)
				want(t, "Inspect after Close", errOf(c.Inspect(t.Context(), "k")), hasp.ErrClosed)
				want(t, "second Close", c.Close(), nil)
			}) // here synctest fails if a goroutine is left
		})
	}
}

func TestCloseNamesTheKeysThatAreLeft(t *testing.T) {
	withClient(t, nil, func(t *bench) {
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
	calls := map[string]func(c *hasp.Client, l *hasp.Lease) error{
		"Inspect": func(c *hasp.Client, _ *hasp.Lease) error { return errOf(c.Inspect(context.Background(), "k")) },
		"Break":   func(c *hasp.Client, _ *hasp.Lease) error { return c.Break(context.Background(), "other") },
		"Extend":  func(_ *hasp.Client, l *hasp.Lease) error { return l.Extend(context.Background(), time.Minute) },
		"Unlock":  func(_ *hasp.Client, l *hasp.Lease) error { return l.Unlock(context.Background()) },
	}
	for _, ends := range []backend.Cancellation{backend.CancelNone, backend.CancelPrompt} {
		for name, call := range calls {
			synctest.Test(t, func(t *testing.T) {
				d := &closable{faulty: newFaulty()}
				d.ends = ends
				c := await.Value(hasp.New(d, nil))
				l := lockNow(t, c, "k")
				d.lag = time.Second
				if name != "Extend" && name != "Unlock" {
					unlock(t, l)
				}
				done := make(chan error)
				go func() { done <- call(c, l) }()
				time.Sleep(500 * time.Millisecond)
				c.Close()
				if err := <-done; err != nil && !errors.Is(err, hasp.ErrClosed) {
					t.Errorf("%s, ends %v: %v", name, ends, err)
				}
				if d.late > 0 {
					t.Errorf("%s, ends %v: %d calls ended after the driver was closed", name, ends, d.late)
				}
				if err := call(c, l); err == nil || d.late > 0 {
					t.Errorf("%s after Close: %v, %d calls of the closed driver", name, err, d.late)
				}
			})
		}
	}
}

// closable is a driver that notes the calls that end after its Close.
type closable struct {
	*faulty
	lag    time.Duration // how long each call takes
	closed bool
	late   int
}

func (d *closable) call(f func() error) error {
	time.Sleep(d.lag)
	err := f()
	d.set(func(*faulty) {
		if d.closed {
			d.late++
		}
	})
	return err
}

func (d *closable) Inspect(ctx context.Context, key string) (st backend.Status, err error) {
	return st, d.call(func() error { st, err = d.faulty.Inspect(ctx, key); return err })
}

func (d *closable) Break(ctx context.Context, key string) error {
	return d.call(func() error { return d.faulty.Break(ctx, key) })
}

func (d *closable) Release(ctx context.Context, c backend.Claim) error {
	return d.call(func() error { return d.faulty.Release(ctx, c) })
}

func (d *closable) Renew(ctx context.Context, cs []backend.Claim, done func(int, backend.Grant, error)) {
	_ = d.call(func() error { d.faulty.Renew(ctx, cs, done); return nil })
}

func (d *closable) Close() error { d.set(func(*faulty) { d.closed = true }); return nil }

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
		"unused": func(*bench, func(func())) {},
		"idle": func(t *bench, _ func(func())) {
			t.lock("k").Unlock(t.Context())
		},
		"holders, nested and in line": func(t *bench, spawn func(func())) {
			l := t.lock("k")
			t.Lock(l.Context(), "k")
			for range 3 {
				spawn(func() { t.Lock(t.Context(), "k") })
			}
		},
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
		"an outage": func(t *bench, spawn func(func())) {
			t.lock("k")
			t.set(down)
			spawn(func() { t.Lock(t.Context(), "other") })
			time.Sleep(hasp.DefaultTTL / 2)
		},
		"a lost lease": func(t *bench, _ func(func())) {
			l := t.lock("k")
			t.faulty.Break(t.Context(), "k")
			<-l.Context().Done()
		},
		"shared leases": func(t *bench, spawn func(func())) {
			for range 2 {
				l := t.lock("k", hasp.WithShared())
				spawn(func() {
					<-l.Context().Done()
					want(t, "Err", l.Err(), hasp.ErrClosed)
					unlock(t, l)
				})
			}
			spawn(func() { want(t, "Lock", t.lockErr("k"), hasp.ErrClosed) })
		},
		"another Close": func(t *bench, spawn func(func())) {
			t.lock("k")
			spawn(func() { t.Client.Close() })
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
