package hasp_test

import (
	"context"
	"fmt"
	"math/rand/v2"
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
	now, most, holds, handed atomic.Int32
	slow                     time.Duration // of EventReleased
}

func (g *gauge) observe(_ context.Context, e hasp.Event) {
	switch {
	case e.Reentry:
	case e.Kind == hasp.EventAcquired:
		n := g.now.Add(1)
		for most := g.most.Load(); n > most && !g.most.CompareAndSwap(most, n); most = g.most.Load() {
		}
		g.holds.Add(1)
		if e.Tries == 0 {
			g.handed.Add(1)
		}
	case e.Kind == hasp.EventReleased:
		time.Sleep(g.slow)
		g.now.Add(-1)
	case e.Kind == hasp.EventLost:
		g.now.Add(-1)
	}
}

// EventReleased of the one before comes before EventAcquired of the next: handed over
// in the line, by the store, or released and taken anew.
func TestGaugeOfHoldsNeverExceedsOne(t *testing.T) {
	for name, tc := range map[string]struct {
		driver func() backend.Driver
		handed bool // in the line
	}{
		"the driver hands over": {func() backend.Driver { return memlock.New() }, false},
		"the line hands over":   {func() backend.Driver { return newFaulty() }, true},
		"slow releases": {func() backend.Driver {
			f := newFaulty()
			f.release = func(_ backend.Claim, send func() error) error {
				err := send()
				time.Sleep(time.Millisecond) // the key is free before the answer is there
				return err
			}
			return f
		}, true},
		"a queue in a slow store": {func() backend.Driver { return farQueue{memlock.New()} }, false},
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
								if i%8 == 0 {
									opts = append(opts, hasp.WithFence()) // is never handed over in the line
								}
								l := lockNow(t, c, "k", opts...)
								inner := lockIn(t, c, l.Context(), "k", opts...)
								unlock(t, inner)
								unlock(t, l)
							}
						})
					}
					synctest.Wait()
					unlock(t, first)
					wg.Wait()
					c.Close()
					if g.most.Load() != 1 || g.now.Load() != 0 || g.holds.Load() != 64*5+1 || g.handed.Load() > 0 != tc.handed {
						t.Errorf("most %d, left %d, %d holds, %d handed over; want at most 1, none left, %d",
							g.most.Load(), g.now.Load(), g.holds.Load(), g.handed.Load(), 64*5+1)
					}
				})
			})
		}
	}
}

// farQueue is memlock behind a network: the answer to a Release comes after the key was
// handed to the next.
type farQueue struct{ *memlock.Driver }

func (farQueue) Traits() backend.Traits {
	return backend.Traits{Ordered: true, Fenced: true, Reach: backend.Network}
}

func (d farQueue) Release(ctx context.Context, c backend.Claim) error {
	defer time.Sleep(time.Millisecond)
	return d.Driver.Release(ctx, c)
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
			block := make(chan struct{})
			c := hasp.New(newFaulty(), &hasp.Options{TTL: tc.ttl, Observe: func(_ context.Context, e hasp.Event) {
				if e.Kind == hasp.EventReleased && e.Op == "trylock" {
					<-block
				}
			}})
			l, err := c.TryLock(t.Context(), "k")
			if err != nil {
				t.Fatal(err)
			}
			go l.Unlock(t.Context())
			synctest.Wait()

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
		block := make(chan struct{})
		c := hasp.New(newFaulty(), &hasp.Options{Timeout: time.Hour, TTL: 24 * time.Hour, Observe: func(_ context.Context, e hasp.Event) {
			if e.Kind == hasp.EventReleased && e.Op == "trylock" {
				<-block
			}
		}})
		l, err := c.TryLock(t.Context(), "k")
		if err != nil {
			t.Fatal(err)
		}
		go l.Unlock(t.Context())
		synctest.Wait()
		go func() { unlock(t, lockNow(t, c, "k")) }()
		synctest.Wait()
		start := time.Now()
		c.Close()
		within(t, "Close", start, 0)
		close(block)
	})
}

// ledger checks that events add up by ID.
type ledger struct {
	mu     sync.Mutex
	t      *testing.T
	state  map[uint64]hasp.EventKind // the last event of a call or lease that has not ended
	counts map[hasp.EventKind]int
}

func newLedger(t *testing.T) *ledger {
	return &ledger{t: t, state: map[uint64]hasp.EventKind{}, counts: map[hasp.EventKind]int{}}
}

func (b *ledger) observe(_ context.Context, e hasp.Event) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.counts[e.Kind]++
	before, known := b.state[e.ID]
	after := map[hasp.EventKind]hasp.EventKind{hasp.EventAcquired: hasp.EventRequested, hasp.EventRefused: hasp.EventRequested,
		hasp.EventReleased: hasp.EventAcquired, hasp.EventLost: hasp.EventAcquired}[e.Kind]
	switch e.Kind {
	case hasp.EventRenewFailed: // may come late
	case hasp.EventRequested, hasp.EventAcquired:
		if known != (e.Kind == hasp.EventAcquired) || before != after {
			b.t.Errorf("%+v came after %v", e, before)
		}
		b.state[e.ID] = e.Kind
	default:
		if before != after {
			b.t.Errorf("%+v came after %v", e, before)
		}
		delete(b.state, e.ID)
	}
	if e.ID == 0 {
		b.t.Errorf("%+v has no ID", e)
	}
}

// Every call and every lease has its events, whatever happens: losses, hand-overs,
// re-entry, cancelled waits, outages and Close.
func TestEventsAddUpByID(t *testing.T) {
	for range 20 {
		synctest.Test(t, func(t *testing.T) {
			b := newLedger(t)
			for _, d := range []backend.Driver{newFaulty(), memlock.New()} {
				c := hasp.New(d, &hasp.Options{TTL: time.Second, Timeout: 500 * time.Millisecond, Observe: b.observe})
				var wg sync.WaitGroup
				for range 16 {
					wg.Go(func() { lockAtRandom(t, c) })
				}
				if f, ok := d.(*faulty); ok {
					wg.Go(func() {
						for range 5 {
							time.Sleep(rand.N(2 * time.Second))
							f.set(down)
							time.Sleep(rand.N(2 * time.Second))
							f.set(up)
						}
					})
				}
				time.Sleep(rand.N(15 * time.Second))
				c.Close()
				wg.Wait()
			}
			synctest.Wait()
			if len(b.state) > 0 {
				t.Errorf("%d calls or leases without an end: %v, of %v", len(b.state), b.state, b.counts)
			}
		})
	}
}

// lockAtRandom locks, re-enters, extends, breaks and unlocks, with some contexts that end.
func lockAtRandom(t *testing.T, c *hasp.Client) {
	for range 30 {
		key := fmt.Sprint(rand.N(3))
		ctx, cancel := context.WithTimeout(t.Context(), rand.N(3*time.Second))
		lock := c.Lock
		if rand.N(3) == 0 {
			lock = c.TryLock
		}
		if l, err := lock(ctx, key); err == nil {
			if inner, err := lock(l.Context(), key); err == nil {
				if rand.N(2) == 0 {
					_ = l.Unlock(ctx) // not in order
				}
				_ = inner.Unlock(ctx)
			}
			switch rand.N(4) {
			case 0:
				_ = c.Break(ctx, key)
			case 1:
				_ = l.Extend(ctx, 2*time.Second)
			}
			time.Sleep(rand.N(500 * time.Millisecond))
			_ = l.Unlock(ctx)
		}
		cancel()
	}
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

// An outage is told by the same error in events as in calls. The end of the engine's own
// contexts does not look like that of the caller's.
func TestErrorsOfEvents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		got := map[hasp.EventKind]error{}
		f := newFaulty()
		c := hasp.New(f, &hasp.Options{Observe: func(_ context.Context, e hasp.Event) {
			mu.Lock()
			defer mu.Unlock()
			got[e.Kind] = e.Err
		}})
		l := lockNow(t, c, "k")
		f.set(down)
		f.set(func(f *faulty) { f.renew = hungRenew })
		time.Sleep(hasp.DefaultTTL * 2 / 3)
		want(t, "TryLock", errOf(c.TryLock(t.Context(), "other")), hasp.ErrUnavailable)
		want(t, "Unlock", l.Unlock(t.Context()), hasp.ErrUnavailable)
		synctest.Wait()
		for _, kind := range []hasp.EventKind{hasp.EventRenewFailed, hasp.EventRefused, hasp.EventReleased} {
			wantOutage(t, kind.String(), got[kind])
		}
		f.set(up)
		c.Close()
	})
}

// A lease that re-enters says so in each of its events, and has Tries 0 as one that
// was handed over, which does not.
func TestEventsOfAReentry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var events []hasp.Event
		c := hasp.New(newFaulty(), &hasp.Options{Observe: func(_ context.Context, e hasp.Event) { events = append(events, e) }})
		defer c.Close()
		l := lockNow(t, c, "k")
		inner := lockIn(t, c, l.Context(), "k")
		unlock(t, inner)
		unlock(t, l)
		for _, e := range events {
			again := e.ID != events[0].ID
			if e.Reentry != (again && e.Kind != hasp.EventRequested) {
				t.Errorf("%+v", e)
			}
		}
		if e := events[3]; e.Kind != hasp.EventAcquired || e.Tries != 0 {
			t.Errorf("%+v, want acquired without a try", e)
		}
	})
}

// An observer that blocks for two seconds costs no healthy lease.
func TestObserverThatBlocksForTwoSecondsCostsNoLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFaulty()
		blocked := make(chan struct{}, 1)
		c := hasp.New(f, &hasp.Options{TTL: 300 * time.Millisecond, Observe: func(_ context.Context, e hasp.Event) {
			if e.Kind == hasp.EventLost {
				time.Sleep(2 * time.Second)
				blocked <- struct{}{}
			}
		}})
		defer c.Close()
		var healthy []*hasp.Lease
		for i := range 20 {
			healthy = append(healthy, lockNow(t, c, fmt.Sprint(i)))
		}
		lockNow(t, c, "broken")
		f.Break(t.Context(), "broken")
		<-blocked
		for _, l := range healthy {
			want(t, l.Key(), l.Err(), nil)
			unlock(t, l)
		}
	})
}

// The error of EventRefused is an outage if that of Lock is one.
func TestEventOfAnOutageThatTheContextEnds(t *testing.T) {
	var mu sync.Mutex
	var refused []hasp.Event
	o := &hasp.Options{Observe: func(_ context.Context, e hasp.Event) {
		mu.Lock()
		defer mu.Unlock()
		if e.Kind == hasp.EventRefused {
			refused = append(refused, e)
		}
	}}
	withClient(t, o, func(t *testing.T, f *faulty, c *hasp.Client) {
		f.set(down)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := c.Lock(ctx, "k")
		want(t, "Lock", err, hasp.ErrUnavailable)
		want(t, "Lock", err, context.DeadlineExceeded)
		want(t, "event", refused[0].Err, hasp.ErrUnavailable)
	})
}
