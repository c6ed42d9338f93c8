package hasp_test

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

// An observer that blocks costs no lease, delays no context, and has Close wait
// for Timeout at most.
func TestBlockedObserverCostsNoLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFaulty()
		var told atomic.Int32
		c := hasp.New(f, &hasp.Options{TTL: time.Second, Observe: func(_ context.Context, e hasp.Event) {
			if e.Kind == hasp.EventLost {
				told.Add(1)
				time.Sleep(10 * time.Second)
			}
		}})
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
			if err := l.Err(); err != nil {
				t.Errorf("%s: %v", l.Key(), err)
			}
		}
		l := healthy[0]
		ctx := l.Context()
		f.Break(t.Context(), l.Key())
		lost := time.Now()
		<-ctx.Done()
		if d := time.Since(lost); d > time.Second {
			t.Errorf("a context ended %v after the loss", d)
		}
		for _, l := range healthy[1:] {
			if err := l.Unlock(t.Context()); err != nil {
				t.Errorf("%s: %v", l.Key(), err)
			}
		}

		began := time.Now()
		c.Close()
		if d := time.Since(began); d > 2*hasp.DefaultTimeout {
			t.Errorf("Close took %v", d)
		}
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
		c := hasp.New(f, &hasp.Options{TTL: time.Second, Observe: func(_ context.Context, e hasp.Event) {
			if e.Kind == hasp.EventLost || e.Kind == hasp.EventRenewFailed {
				<-block
				counts[e.Kind]++
			}
		}})
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

// An Unlock may learn of a loss when Close has ended, and with it the goroutine that
// reports losses.
func TestLossThatUnlockFindsAfterCloseIsReported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFaulty()
		f.ends = backend.EndsByDeadline
		f.release = func(backend.Claim, func() error) error {
			time.Sleep(time.Second) // longer than the term, which is how long Close waits
			return backend.ErrLost
		}
		var kinds []hasp.EventKind
		c := hasp.New(f, &hasp.Options{TTL: hasp.MinTTL, Observe: func(_ context.Context, e hasp.Event) { kinds = append(kinds, e.Kind) }})
		l := lockNow(t, c, "k")
		unlocked := make(chan error)
		go func() { unlocked <- l.Unlock(t.Context()) }()
		synctest.Wait()
		c.Close()
		want(t, "Unlock", <-unlocked, hasp.ErrLost)
		if !slices.Equal(kinds, []hasp.EventKind{hasp.EventRequested, hasp.EventAcquired, hasp.EventLost}) {
			t.Errorf("got events %v, want requested, acquired and lost", kinds)
		}
	})
}
