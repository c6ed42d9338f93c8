package hasp_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/memlock"
)

var shared = hasp.WithShared()

// nested has a lease inside another lease of the same key.
type nested struct {
	f               *faulty
	outer, inner    *hasp.Lease
	other           *hasp.Lease             // a lease of another key between outer and inner
	cancel, between context.CancelCauseFunc // cancel the context of the outer Lock, and a context between outer and inner
}

func TestInnerContext(t *testing.T) {
	cause := errors.New("enough")
	for _, tc := range []struct {
		name string
		end  func(n nested)
		want error // the context's cause
		err  error // Err of the inner lease
	}{
		{"ends when the outer lease is unlocked", func(n nested) { n.outer.Unlock(context.Background()) }, hasp.ErrReleased, nil},
		{"ends when a lease between the two is unlocked", func(n nested) { n.other.Unlock(context.Background()) }, hasp.ErrReleased, nil},
		{"ends with a context between the two", func(n nested) { n.between(cause) }, cause, nil},
		{"ends with the context of the outer Lock", func(n nested) { n.cancel(cause) }, cause, nil},
		{"ends with the hold", func(n nested) {
			n.f.Break(context.Background(), "k")
			time.Sleep(hasp.DefaultTTL)
		}, hasp.ErrLost, hasp.ErrLost},
		{"ends with its own Unlock", func(n nested) { n.inner.Unlock(context.Background()) }, hasp.ErrReleased, hasp.ErrReleased},
	} {
		runClient(t, tc.name, nil, func(t *bench) {
			ctx, cancel := context.WithCancelCause(t.Context())
			defer cancel(nil)
			outer := t.lockIn(ctx, "k")
			other := t.lockIn(outer.Context(), "other")
			between, cancelBetween := context.WithCancelCause(other.Context())
			defer cancelBetween(nil)
			inner := t.lockIn(between, "k")
			child, stop := context.WithCancel(inner.Context())
			defer stop()

			tc.end(nested{t.faulty, outer, inner, other, cancel, cancelBetween})
			if child.Err() == nil {
				t.Error("the context goes on")
			}
			want(t, "its cause", context.Cause(child), tc.want)
			want(t, "Err, which is about the hold", inner.Err(), tc.err)
			inner.Unlock(t.Context())
			outer.Unlock(t.Context())
		})
	}
}

// However many leases are inside one another, the end of the outermost context costs each lease the
// same. Other leases of the Client are renewed meanwhile, and also if the methods of a caller's
// context are slow or block.
func TestContextsOfCallersDelayNoRenewal(t *testing.T) {
	onBench(t, func(t *bench) {
		base, cancel := context.WithCancel(t.Context())
		ctx := base
		var leases []*hasp.Lease
		for range 200 {
			l := t.lockIn(ctx, "k")
			leases = append(leases, l)
			ctx = l.Context()
		}
		var slow atomic.Bool
		blocked := t.lockIn(trap{t.Context(), func(method string) {
			if method == "Err" && slow.Load() {
				time.Sleep(time.Hour)
			}
		}}, "slow")
		other := t.lock("other")

		cancel()
		want(t, "the innermost context", ctx.Err(), context.Canceled) // must not take 2^200 steps
		slow.Store(true)
		time.Sleep(10 * hasp.DefaultTTL)
		for _, l := range leases {
			want(t, "a cancelled lease", l.Err(), hasp.ErrLost)
		}
		unlock(t, blocked)
		unlock(t, other)
	})
}

func TestReentryOptions(t *testing.T) {
	onBench(t, func(t *bench) {
		outer := t.lock("k", hasp.WithTTL(10*time.Second))
		want(t, "a fence where the outer has none", errOf(t.Lock(outer.Context(), "k", hasp.WithFence())), hasp.ErrInvalid)

		// A Lock of another Client does not re-enter: it asks its own store.
		another := opened(t, memlock.NewDriver(), nil)
		apart := lockIn(t, another, outer.Context(), "k")
		want(t, "TryLock of what another Client holds", errOf(another.TryLock(t.Context(), "k")), hasp.ErrHeld)
		unlock(t, apart)

		bounded := t.lockIn(outer.Context(), "k", hasp.WithMaxHold(3*time.Second), hasp.WithoutRenewal())
		start := time.Now()
		<-bounded.Context().Done()
		equal(t, "the time of the inner lease", time.Since(start), 3*time.Second)
		want(t, "Unlock of it", bounded.Unlock(t.Context()), hasp.ErrLost)
		want(t, "the outer lease", outer.Err(), nil)

		longer := t.lockIn(outer.Context(), "k", hasp.WithTTL(time.Minute))
		synctest.Wait()
		between(t, "the longer term, asked for at once", time.Until(outer.Expires()), 59*time.Second, time.Minute)
		shorter := t.lockIn(outer.Context(), "k", hasp.WithTTL(time.Second))
		time.Sleep(time.Hour)
		between(t, "the longer term, which goes on", time.Until(outer.Expires()), 35*time.Second, time.Minute)
		for _, l := range []*hasp.Lease{shorter, longer, outer} {
			unlock(t, l)
		}
		// With the context of a lease that has ended, Lock does not re-enter.
		unlock(t, t.lockIn(context.WithoutCancel(outer.Context()), "k"))
		equal(t, "attempts", t.attempts(), 2)
	})
}

// If a caller joins the hold while its last renewal asks whether all contexts have ended, or after
// that, renewal goes on.
func TestReentryAtTheLastRenewal(t *testing.T) {
	onBench(t, func(t *bench) {
		term := hasp.WithTTL(300 * time.Millisecond)
		ctx, cancel := context.WithCancel(t.Context())
		live := context.WithoutCancel(t.lockIn(ctx, "k", term).Context())
		cancel()
		time.Sleep(320 * time.Millisecond) // the next renewal is the last

		joined := make(chan *hasp.Lease, 1)
		second, cancelSecond := context.WithCancel(live)
		t.lockIn(trap{second, func(method string) {
			if method != "Done" {
				return
			}
			if l, err := t.Lock(live, "k", term); err == nil {
				joined <- l
			}
		}}, "k", term)
		cancelSecond()
		time.Sleep(3 * time.Second)
		inner := <-joined
		want(t, "a lease whose context goes on", inner.Err(), nil)

		ctx, cancel = context.WithCancel(t.Context())
		live = context.WithoutCancel(t.lockIn(ctx, "later").Context())
		cancel()
		time.Sleep(45 * time.Second) // after the last renewal, before the end of its term
		inner = t.lockIn(live, "later")
		time.Sleep(3 * hasp.DefaultTTL)
		want(t, "a lease that came later", inner.Err(), nil)
	})
}

// Re-entry asks for a longer term while a renewal for the shorter one is in flight.
func TestLongerTermDuringARenewal(t *testing.T) {
	withClient(t, &hasp.Options{TTL: 3 * time.Second}, func(t *bench) {
		t.renew = slow(200 * time.Millisecond)
		l := t.lock("k")
		time.Sleep(time.Second + 50*time.Millisecond) // a renewal is in flight
		inner := t.lockIn(l.Context(), "k", hasp.WithTTL(time.Hour))
		time.Sleep(500 * time.Millisecond)
		between(t, "the term", time.Until(inner.Expires()), 50*time.Minute, time.Hour)
		unlock(t, inner)
		unlock(t, l)
	})
}

func TestWithoutReentryACallerWaitsForItsOwnLease(t *testing.T) {
	apart := hasp.WithoutReentry()
	onBench(t, func(t *bench) {
		for name, opts := range map[string]options{"exclusive": nil, "shared": {shared}} {
			l := t.lock(name, opts...)
			want(t, "TryLock", errOf(t.TryLock(l.Context(), name, apart)), hasp.ErrHeld)
			unlock(t, l)
		}

		outer := t.lock("k")
		want(t, "WithMaxWait", errOf(t.Lock(outer.Context(), "k", apart, hasp.WithMaxWait(time.Second))), hasp.ErrHeld)
		ctx := timeout(t, outer.Context(), time.Hour)
		start := time.Now()
		wantOnly(t, "Lock", errOf(t.Lock(ctx, "k", apart)), context.DeadlineExceeded, hasp.ErrHeld)
		between(t, "the wait", time.Since(start), time.Hour, time.Hour+time.Second)
		unlock(t, t.lockIn(outer.Context(), "k")) // without the option, Lock re-enters
		unlock(t, outer)
		t.freed("the key is still held", "k")

		// The context of the new lease ends with the lease around it. A Lock inside re-enters either.
		outer = t.lock("other")
		l := t.lockIn(outer.Context(), "k", apart)
		before := t.attempts()
		for _, key := range []string{"other", "k"} {
			unlock(t, t.lockIn(l.Context(), key, hasp.WithMaxWait(0)))
		}
		equal(t, "attempts of a re-entry", t.attempts(), before)
		unlock(t, outer)
		want(t, "cause", context.Cause(l.Context()), hasp.ErrReleased)
		want(t, "Err", l.Err(), nil)
		unlock(t, l)
	})
}

// The Unlock of the outer lease hands the hold over to a caller, and ends that caller's context.
func TestWithoutReentryAHandOverWithinItsOwnContext(t *testing.T) {
	onBench(t, func(t *bench) {
		for range 50 {
			outer := t.lock("k")
			next := t.lockLater(outer.Context(), hasp.WithoutReentry())
			unlock(t, outer)
			if err := <-next; err != nil {
				want(t, "Lock", err, hasp.ErrReleased)
			}
			synctest.Wait()
			t.freed("the key is still held", "k")
		}
		t.nothingLeft()
	})
}

func TestSharedLeasesAreRenewedApart(t *testing.T) {
	onBench(t, func(t *bench) {
		short := t.lock("k", shared, hasp.WithTTL(time.Second))
		dead := t.lock("k", shared, hasp.WithTTL(2*time.Second), hasp.WithoutRenewal())
		time.Sleep(10 * time.Second)
		want(t, "Unlock", dead.Unlock(t.Context()), hasp.ErrLost)
		if st := await.Value(t.faulty.Inspect(t.Context(), "k")); len(st.Shared) != 1 || st.TTL > time.Second {
			t.Errorf("status %+v", st)
		}
		unlock(t, short)
	})
}

// Callers WithShared re-enter a lease of either kind. A shared lease cannot become exclusive, and
// has no min hold.
func TestReentryOfASharedLease(t *testing.T) {
	onBench(t, func(t *bench) {
		for name, opts := range map[string]options{"exclusive": nil, "shared": {shared}} {
			outer := t.lock(name, opts...)
			inner := t.lockIn(outer.Context(), name, shared)
			if opts != nil {
				want(t, "an exclusive Lock inside", errOf(t.Lock(inner.Context(), name)), hasp.ErrInvalid)
			}
			unlock(t, inner)
			unlock(t, outer)
		}
		equal(t, "attempts", t.attempts(), 2)
		want(t, "a min hold", t.lockErr("k", shared, hasp.WithMinHold(1)), hasp.ErrInvalid)
	})
}

// If readers have refused an exclusive caller, it asks again within SharedRetryEvery, whatever
// Backoff returns, because drivers refuse new readers only for a while.
func TestExclusiveCallerAsksAgainSoon(t *testing.T) {
	o := &hasp.Options{Backoff: func(int) time.Duration { return time.Hour }}
	withClient(t, o, func(t *bench) {
		var asked []time.Time
		waiting := 0
		t.acquire = func(q *call) error {
			if !q.Shared {
				asked = append(asked, time.Now())
				if q.WillRetry {
					waiting++
				}
			}
			return q.send()
		}
		reader := t.lock("k", shared)
		time.AfterFunc(time.Second, func() { unlock(t, reader) })
		unlock(t, t.lock("k"))
		for i := 1; i < len(asked); i++ {
			if gap := asked[i].Sub(asked[i-1]); gap > backend.SharedRetryEvery {
				t.Errorf("%v between two attempts", gap)
			}
		}
		if waiting < len(asked)-1 || len(asked) < 10 {
			t.Errorf("%d of %d attempts were waiting", waiting, len(asked))
		}

		waiting = 0
		unlock(t, t.lock("k"))
		_, _ = t.TryLock(t.Context(), "k")
		if waiting != 1 { // a TryLock does not ask again
			t.Errorf("waiting %d", waiting)
		}
	})
}

// An inner lease with a longer term raises the term of the hold only until it ends.
func TestLongerTermEndsWithItsLease(t *testing.T) {
	for name, end := range map[string]func(*hasp.Lease){
		"Unlock":   func(l *hasp.Lease) { l.Unlock(context.Background()) },
		"max hold": func(*hasp.Lease) {},
	} {
		runClient(t, name, nil, func(t *bench) {
			l := t.lock("k", hasp.WithTTL(time.Second))
			end(t.lockIn(l.Context(), "k", hasp.WithTTL(time.Hour), hasp.WithMaxHold(time.Minute)))
			time.Sleep(62 * time.Minute)
			if s := await.Value(t.faulty.Inspect(t.Context(), "k")); s.TTL > time.Second {
				t.Errorf("the key of a lease with a term of a second stays locked for %v", s.TTL)
			}
			unlock(t, l)
		})
	}
}
