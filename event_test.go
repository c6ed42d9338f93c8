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
	"github.com/hasplock/hasp/memlock"
)

// gauge counts the holds of a key, as a metric would.
type gauge struct {
	slow time.Duration // of EventReleased

	mu            sync.Mutex // guards all below
	alone, shared int
	together      int // the most shared holds at once
	holds, handed int
	bad           []hasp.Event // at which an exclusive hold was not alone
}

func (g *gauge) observe(_ context.Context, e hasp.Event) {
	if e.Reentry {
		return
	}
	if e.Kind == hasp.EventReleased {
		time.Sleep(g.slow)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	now := &g.alone
	if e.Shared {
		now = &g.shared
	}
	switch e.Kind {
	case hasp.EventAcquired:
		*now++
		g.holds++
		if e.Tries == 0 {
			g.handed++
		}
	case hasp.EventReleased, hasp.EventLost:
		*now--
	}
	g.together = max(g.together, g.shared)
	if g.alone > 1 || g.alone > 0 && g.shared > 0 {
		g.bad = append(g.bad, e)
	}
}

// lateRelease is answered when the key is free, and may have been handed to the next.
func lateRelease(_ backend.Claim, send func() error) error {
	defer time.Sleep(time.Millisecond)
	return send()
}

// EventReleased of the one before comes before EventAcquired of the next: handed over
// in the line, by the store, or released and taken anew. Shared holds do not delay one another.
func TestGaugeOfHoldsNeverExceedsOne(t *testing.T) {
	for name, tc := range map[string]struct {
		driver func() backend.Driver
		handed bool // in the line
	}{
		"the driver hands over": {func() backend.Driver { return memlock.New() }, false},
		"the line hands over":   {func() backend.Driver { return newFaulty() }, true},
		"slow releases": {func() backend.Driver {
			f := newFaulty()
			f.release = lateRelease
			return f
		}, true},
		"a queue in a slow store": {func() backend.Driver {
			return &hooked{Driver: memlock.New(), traits: inOrderOfArrival, release: lateRelease}
		}, false},
	} {
		for _, slow := range []time.Duration{0, 10 * time.Millisecond} {
			t.Run(fmt.Sprint(name, ", observed in ", slow), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					g := gauge{slow: slow}
					c := hasp.New(tc.driver(), &hasp.Options{Observe: g.observe, Timeout: time.Minute})
					var wg sync.WaitGroup
					first := lockNow(t, c, "k") // until all others wait
					for i := range 64 {
						wg.Go(func() {
							for range 5 {
								var opts []hasp.Option
								switch i % 8 {
								case 0:
									opts = append(opts, hasp.WithFence()) // is never handed over in the line
								case 1, 2, 3:
									opts = append(opts, hasp.WithShared())
								}
								l := lockNow(t, c, "k", opts...)
								inner := lockIn(t, c, l.Context(), "k", opts...)
								time.Sleep(100 * time.Microsecond) // for shared holds to meet
								unlock(t, inner)
								unlock(t, l)
							}
						})
					}
					synctest.Wait()
					unlock(t, first)
					wg.Wait()
					c.Close()
					if len(g.bad) > 0 || g.alone+g.shared != 0 || g.together < 2 || g.holds != 64*5+1 || g.handed > 0 != tc.handed {
						t.Errorf("%d events at which an exclusive hold was not alone, %d and %d shared holds left, at most %d at once, %d holds, %d handed over; want none, none left, %d",
							len(g.bad), g.alone, g.shared, g.together, g.holds, g.handed, 64*5+1)
					}
				})
			})
		}
	}
}

// blockedRelease returns a Client that reports the release of "k", until block is closed.
func blockedRelease(t *testing.T, o hasp.Options) (c *hasp.Client, block chan struct{}) {
	block = make(chan struct{})
	o.Observe = func(_ context.Context, e hasp.Event) {
		if e.Kind == hasp.EventReleased && e.Op == "trylock" {
			<-block
		}
	}
	c = hasp.New(newFaulty(), &o)
	l, err := c.TryLock(t.Context(), "k")
	want(t, "TryLock", err, nil)
	go l.Unlock(t.Context())
	synctest.Wait()
	return c, block
}

// The next caller does not wait for ever for an Observe that blocks, nor for the answer
// to a release that the store has carried out.
func TestBlockedReleaseDelaysTheNextCallerForABoundedTime(t *testing.T) {
	for _, tc := range []struct {
		what  string
		ttl   time.Duration
		wait  time.Duration // of the next caller's context
		most  time.Duration
		least time.Duration
	}{
		{"Timeout", 30 * time.Second, time.Hour, 3 * time.Second, 3 * time.Second},
		{"a third of the term", 3 * time.Second, time.Hour, time.Second, 900 * time.Millisecond},
		{"the context", 30 * time.Second, time.Second, time.Second, time.Second},
	} {
		synctest.Test(t, func(t *testing.T) {
			c, block := blockedRelease(t, hasp.Options{TTL: tc.ttl})
			start := time.Now()
			other := lockNow(t, c, "other") // other keys wait for nothing
			within(t, "Lock of another key", start, 0)
			ctx, cancel := context.WithTimeout(t.Context(), tc.wait)
			defer cancel()
			next := lockIn(t, c, ctx, "k")
			if took := time.Since(start); took < tc.least || took > tc.most {
				t.Errorf("%s: Lock took %v, want %v to %v", tc.what, took, tc.least, tc.most)
			}
			want(t, "Err", next.Err(), nil)
			unlock(t, next)
			unlock(t, other)
			close(block)
			synctest.Wait()
			start = time.Now()
			unlock(t, lockNow(t, c, "k"))
			within(t, "Lock after Observe has returned", start, 50*time.Millisecond) // a gap
			c.Close()
		})
	}
}

// Close ends the wait for an Observe.
func TestCloseDoesNotWaitForAReleaseToBeReported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, block := blockedRelease(t, hasp.Options{Timeout: time.Hour, TTL: 24 * time.Hour})
		go func() { unlock(t, lockNow(t, c, "k")) }()
		synctest.Wait()
		start := time.Now()
		c.Close()
		within(t, "Close", start, 0)
		close(block)
	})
}

// The events of a call have its context, and those without a call have the values of
// Lock's context, which has ended.
func TestObserveGetsTheContext(t *testing.T) {
	type keyOf struct{}
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		got := map[hasp.EventKind]string{}
		f := newFaulty()
		c := hasp.New(f, &hasp.Options{TTL: time.Second, Observe: func(ctx context.Context, e hasp.Event) {
			mu.Lock()
			defer mu.Unlock()
			got[e.Kind] = fmt.Sprint(ctx.Value(keyOf{}), " ", ctx.Err() != nil)
		}})
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
