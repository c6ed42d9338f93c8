package hasp_test

import (
	"context"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
)

// lineUp starts n callers, one after another, and returns when all wait. Each locks key, notes its
// number and unlocks.
func (t *bench) lineUp(key string, n int, opts ...hasp.Option) (order func() []int) {
	var mu sync.Mutex
	var wg sync.WaitGroup
	var served []int
	for i := range n {
		wg.Go(func() {
			l, err := t.Lock(t.Context(), key, opts...)
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			served = append(served, i)
			mu.Unlock()
			unlock(t, l)
		})
		synctest.Wait()
	}
	return func() []int { wg.Wait(); return served }
}

func inOrder(t testing.TB, got []int, n int) {
	t.Helper()
	if len(got) != n || !slices.IsSorted(got) {
		t.Fatalf("served in order %v, want 0 to %d", got, n-1)
	}
}

func TestHandOverCostsNoRoundTrip(t *testing.T) {
	for name, tc := range map[string]struct {
		first    []hasp.Option
		others   []hasp.Option
		between  func(t *bench, l *hasp.Lease)
		n        int
		acquires int
	}{
		"alike": {n: 10, acquires: 1},
		"confirmed too long ago": {n: 10, acquires: 3, // the row begins with the first hold, and is over after the second hold
			between: func(*bench, *hasp.Lease) { time.Sleep(50 * time.Millisecond) }},
		"another term":            {n: 5, acquires: 2, first: options{hasp.WithTTL(time.Minute)}},
		"a fence for the next":    {n: 5, acquires: 6, others: options{hasp.WithFence()}},
		"a fence of the first":    {n: 5, acquires: 2, first: options{hasp.WithFence()}},
		"no renewal of the first": {n: 5, acquires: 2, first: options{hasp.WithoutRenewal()}},
		"no renewal of the next":  {n: 5, acquires: 6, others: options{hasp.WithoutRenewal()}},
		"max hold of the first":   {n: 5, acquires: 2, first: options{hasp.WithMaxHold(time.Hour)}},
		"extended": {n: 5, acquires: 2, between: func(t *bench, l *hasp.Lease) {
			want(t, "Extend", l.Extend(t.Context(), time.Minute), nil)
		}},
	} {
		runClient(t, name, nil, func(t *bench) {
			l := t.lock("k", tc.first...)
			order := t.lineUp("k", tc.n, tc.others...)
			if tc.between != nil {
				tc.between(t, l)
			}
			unlock(t, l)
			inOrder(t, order(), tc.n)
			if a, _, r := t.calls(); a != tc.acquires || r != tc.acquires {
				t.Errorf("%d attempts and %d releases, want %d of each", a, r, tc.acquires)
			}
		})
	}
}

func TestTryLockAsksNobodyWhenTheClientHoldsOrWaits(t *testing.T) {
	withClient(t, &hasp.Options{Owner: "me"}, func(t *bench) {
		l := t.lock("k")
		err := t.tryErr("k")
		if he := refusal(t, err); he.Owner != "me" || he.RetryAfter <= 0 {
			t.Errorf("got %+v, want our own owner and term", he)
		}
		wantCall(t, err, "trylock", "k")
		want(t, "Lock with no wait", t.lockErr("k", hasp.WithMaxWait(0)), hasp.ErrHeld)
		equal(t, "attempts, of the holder only", t.attempts(), 1)
		unlock(t, l)
	})
}

// A caller that leaves the line soon says who has the key, if the head of the line knows.
func TestWhoHasTheKeyInAShortWait(t *testing.T) {
	withClient(t, nil, func(t *bench) {
		heldByAnother(t, t.faulty, time.Hour)
		ctx, leave := context.WithCancel(t.Context())
		head := t.lockLater(ctx)
		err := t.lockErr("k", hasp.WithMaxWait(time.Millisecond))
		equal(t, "owner", refusal(t, err).Owner, "stranger")
		leave()
		<-head
	})
}

// If a Break comes during an Unlock, the hold is not renewed afterwards, and does not end twice.
func TestBreakDuringUnlock(t *testing.T) {
	onBench(t, func(t *bench) {
		l := t.lock("k")
		far(t.faulty, 2*time.Second)
		done := make(chan error)
		go func() { done <- l.Unlock(t.Context()) }()
		synctest.Wait()
		want(t, "Break", t.Client.Break(t.Context(), "k"), nil)
		want(t, "Unlock", <-done, hasp.ErrLost)
		time.Sleep(time.Minute)
		equal(t, "renewals after Unlock", t.renewals(), 0)
		start := time.Now()
		t.Client.Close()
		within(t, "Close without a caller", start, 0)
	})
}

// Each caller has one EventAcquired or EventRefused, and each lease has one event of its end.
func TestEventsAddUp(t *testing.T) {
	for name, run := range map[string]func(t *bench, l *hasp.Lease, cancel func()){
		"cancelled, then handed over": func(t *bench, l *hasp.Lease, cancel func()) {
			cancel()
			unlock(t, l)
			synctest.Wait()
			t.freed("the caller that was cancelled keeps the key", "k")
		},
		"handed over, then cancelled": func(t *bench, l *hasp.Lease, cancel func()) {
			unlock(t, l)
			cancel()
		},
		"closed, then unlocked": func(t *bench, l *hasp.Lease, _ func()) {
			go t.Client.Close()
			synctest.Wait()
			unlock(t, l)
		},
		"lost, then unlocked": func(t *bench, l *hasp.Lease, _ func()) {
			t.set(down)
			time.Sleep(time.Second)
			l.Unlock(t.Context())
			t.set(up)
		},
	} {
		for range 50 { // the scheduler decides who is first
			var s seen
			withClient(t, &hasp.Options{TTL: 200 * time.Millisecond, Observe: s.observe}, func(t *bench) {
				l := t.lock("k")
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				done := t.lockLater(ctx)
				run(t, l, cancel)
				<-done
				t.Client.Close()
				begun, ended := len(s.of(hasp.EventAcquired)), len(s.of(hasp.EventReleased))+len(s.of(hasp.EventLost))
				if begun+len(s.of(hasp.EventRefused)) != 2 || begun != ended {
					t.Fatalf("%s: %+v", name, s.all)
				}
			})
		}
	}
}
