package hasp_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
)

// The events of a call have its context, and those without a call have the values of
// Lock's context, which has ended.
func TestObserveGetsTheContext(t *testing.T) {
	type keyOf struct{}
	var mu sync.Mutex
	got := map[hasp.EventKind]string{}
	o := &hasp.Options{TTL: time.Second, Observe: func(ctx context.Context, e hasp.Event) {
		mu.Lock()
		defer mu.Unlock()
		got[e.Kind] = fmt.Sprint(ctx.Value(keyOf{}), " ", ctx.Err() != nil)
	}}
	withClient(t, o, func(t *testing.T, f *faulty, c *hasp.Client) {
		named := func(name string) context.Context { return context.WithValue(t.Context(), keyOf{}, name) }

		l := lockIn(t, c, named("lock"), "k")
		ended, cancel := context.WithCancel(named("unlock"))
		cancel()
		want(t, "Unlock", l.Unlock(ended), nil)

		lost, end := context.WithCancel(named("lost"))
		lockIn(t, c, lost, "lost")
		_, err := c.TryLock(named("try"), "lost")
		want(t, "TryLock", err, hasp.ErrHeld)
		end()
		f.set(down)
		time.Sleep(5 * time.Second)
		f.set(up)
		c.Close()

		for kind, want := range map[hasp.EventKind]string{
			hasp.EventRequested: "try false", hasp.EventAcquired: "lost false", hasp.EventRefused: "try false",
			hasp.EventReleased: "unlock true", hasp.EventLost: "lost false", hasp.EventRenewFailed: "lost false",
		} {
			if got[kind] != want {
				t.Errorf("%v: got the context %q, want %q", kind, got[kind], want)
			}
		}
	})
}

// An outage is told by the same error in events as in calls, also if the context ends it. The
// end of the engine's own contexts does not look like that of the caller's.
func TestErrorsOfEvents(t *testing.T) {
	var s seen
	withClient(t, &hasp.Options{Observe: s.observe}, func(t *testing.T, f *faulty, c *hasp.Client) {
		l := lockNow(t, c, "k", hasp.WithFence())
		f.set(down)
		f.set(func(f *faulty) { f.renew = hungRenew })
		time.Sleep(hasp.DefaultTTL * 2 / 3)
		want(t, "TryLock", errOf(c.TryLock(t.Context(), "other")), hasp.ErrUnavailable)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		wantOutage(t, "Lock", errOf(c.Lock(ctx, "other")), errNet, context.DeadlineExceeded)
		want(t, "Unlock", l.Unlock(t.Context()), hasp.ErrUnavailable)
		synctest.Wait()

		failed, refused := s.of(hasp.EventRenewFailed), s.of(hasp.EventRefused)
		wantOutage(t, "renew failed", failed[0].Err)
		if e := failed[0]; e.Key != "k" || e.Fence == 0 || e.Fence != l.Fence() {
			t.Errorf("got %+v, want the key and its fence", e)
		}
		wantOutage(t, "refused", refused[0].Err)
		wantOutage(t, "refused when the context had ended", refused[1].Err, errNet, context.DeadlineExceeded)
		wantOutage(t, "released", s.of(hasp.EventReleased)[0].Err)
		f.set(up)
	})
}

// An observer that blocks costs no lease, delays no context, and has Close wait
// for Timeout at most.
func TestBlockedObserverCostsNoLease(t *testing.T) {
	var told atomic.Int32
	o := &hasp.Options{TTL: time.Second, Observe: func(_ context.Context, e hasp.Event) {
		if e.Kind == hasp.EventLost {
			told.Add(1)
			time.Sleep(10 * time.Second)
		}
	}}
	withClient(t, o, func(t *testing.T, f *faulty, c *hasp.Client) {
		var healthy []*hasp.Lease
		for i := range 20 {
			healthy = append(healthy, lockNow(t, c, fmt.Sprint(i)))
		}
		for _, key := range []string{"broken", "broken, too"} {
			lockNow(t, c, key)
			f.Break(t.Context(), key)
		}
		time.Sleep(5 * time.Second)
		if n := told.Load(); n != 1 {
			t.Fatalf("%d losses told while the observer blocks on the first, want 1", n)
		}
		for _, l := range healthy {
			want(t, l.Key(), l.Err(), nil)
		}
		l := healthy[0]
		ctx := l.Context()
		f.Break(t.Context(), l.Key())
		lost := time.Now()
		<-ctx.Done()
		within(t, "the end of a context after the loss", lost, time.Second)
		for _, l := range healthy[1:] {
			unlock(t, l)
		}

		began := time.Now()
		c.Close()
		within(t, "Close", began, 2*hasp.DefaultTimeout)
		time.Sleep(time.Minute) // until the observer has returned
		if n := told.Load(); n != 3 {
			t.Errorf("%d losses told, want 3", n)
		}
	})
}

// While the observer lags far behind, failed renewals are not kept for it, and
// losses are.
func TestLaggingObserverIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFaulty()
		block := make(chan struct{})
		counts := map[hasp.EventKind]int{}
		c := await.Value(hasp.New(f, &hasp.Options{TTL: time.Second, Observe: func(_ context.Context, e hasp.Event) {
			if e.Kind == hasp.EventLost || e.Kind == hasp.EventRenewFailed {
				<-block
				counts[e.Kind]++
			}
		}}))
		const n = 3000
		for i := range n {
			lockNow(t, c, fmt.Sprint(i))
		}
		f.set(down)
		time.Sleep(2 * time.Second)
		close(block)
		synctest.Wait()
		if counts[hasp.EventLost] != n || counts[hasp.EventRenewFailed] < n || counts[hasp.EventRenewFailed] > 3*n {
			t.Errorf("%v, want %d lost and some thousand renewals", counts, n)
		}
		c.Close()
	})
}

// A loss is reported although Close has begun: an Unlock has found it, or Observe still ran with
// EventAcquired when Close had ended, and with it the goroutine that reports losses.
func TestLossIsReportedAfterClose(t *testing.T) {
	for _, tc := range []struct {
		observer, release time.Duration // how long they take
		unlock            error
	}{
		{observer: 10 * time.Second, unlock: hasp.ErrClosed},
		{release: 500 * time.Millisecond, unlock: hasp.ErrLost},
	} {
		var kinds []hasp.EventKind
		o := &hasp.Options{TTL: backend.MinTTL, Timeout: time.Second, Observe: func(_ context.Context, e hasp.Event) {
			if e.Kind == hasp.EventAcquired {
				time.Sleep(tc.observer)
			}
			kinds = append(kinds, e.Kind)
		}}
		withEnds(t, backend.CancelByDeadline, o, func(t *testing.T, f *faulty, c *hasp.Client) {
			f.release = func(backend.Claim, func() error) error {
				time.Sleep(tc.release)
				return backend.ErrLost
			}
			unlocked := make(chan error)
			go func() {
				l := lockNow(t, c, "k")
				unlocked <- l.Unlock(t.Context())
			}()
			synctest.Wait()
			c.Close()
			want(t, "Unlock", <-unlocked, tc.unlock)
			if !slices.Equal(kinds, []hasp.EventKind{hasp.EventRequested, hasp.EventAcquired, hasp.EventLost}) {
				t.Errorf("got events %v, want requested, acquired and lost", kinds)
			}
		})
	}
}
