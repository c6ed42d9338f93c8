package hasp_test

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/memlock"
)

func TestRenewalStartsAtAThirdOfTheTerm(t *testing.T) {
	onBench(t, func(t *bench) {
		last := time.Now()
		l := t.lock("k")
		time.Sleep(10 * hasp.DefaultTTL)
		unlock(t, l)
		t.Client.Close()
		const most = hasp.DefaultTTL / 3
		for _, at := range t.renewed {
			between(t, "the time from one renewal to the next", at.Sub(last), most*4/5, most)
			last = at
		}
		between(t, "renewals in ten terms", len(t.renewed), 30, 38)
	})
}

func TestOneRenewalOfAHoldIsUnderWayAtMost(t *testing.T) {
	onBench(t, func(t *bench) {
		var running, most atomic.Int32
		t.renew = func(q *call) error {
			most.Store(max(most.Load(), running.Add(1)))
			defer running.Add(-1)
			return untilEnd(q)
		}
		l := t.lock("k")
		for range 5 {
			go l.Extend(t.Context(), time.Minute)
		}
		<-l.Context().Done()
		t.Client.Close()
		equal(t, "renewals under way at once", most.Load(), 1)
		if renews := t.renewals(); renews < 8 {
			t.Errorf("%d tries until the deadline, want one after another", renews)
		}
	})
}

func TestTheSecondTryLastsTwiceAsLong(t *testing.T) {
	const short, long, timeout = 100 * time.Millisecond, 200 * time.Millisecond, 3 * time.Second
	for ttl, want := range map[time.Duration][]time.Duration{
		time.Second: {short, long, short, short},
		time.Minute: {timeout, timeout, timeout},
	} {
		withClient(t, &hasp.Options{TTL: ttl, Timeout: timeout}, func(t *bench) {
			var took []time.Duration
			t.renew = func(q *call) error {
				start := time.Now()
				defer func() { took = append(took, time.Since(start)) }()
				return untilEnd(q)
			}
			l := t.lock("k")
			<-l.Context().Done()
			t.Client.Close()
			if len(took) < len(want) || !slices.Equal(took[:len(want)], want) {
				t.Errorf("TTL %v: tries took %v, want %v first", ttl, took, want)
			}
		})
	}
}

// A store may grant Extend a shorter term than it asks for, as an etcd without space does.
func TestExtendWithoutRenewal(t *testing.T) {
	onBench(t, func(t *bench) {
		start := time.Now()
		l := t.lock("k", hasp.WithoutRenewal())
		want(t, "Extend by too little", l.Extend(t.Context(), 99*time.Millisecond), hasp.ErrInvalid)
		want(t, "Extend", l.Extend(t.Context(), time.Hour), nil)
		want(t, "Extend", l.Extend(t.Context(), time.Second), nil)
		<-l.Context().Done()
		between(t, "the time of the lease", time.Since(start), time.Hour, time.Hour+time.Second)
		want(t, "Extend after", l.Extend(t.Context(), time.Hour), hasp.ErrLost)
		equal(t, "renewals, all by Extend", t.renewals(), 2)

		t.renew = func(q *call) error {
			err := q.send()
			q.got.Until = time.Now().Add(time.Minute)
			return err
		}
		l = t.lock("k", hasp.WithoutRenewal())
		want(t, "Extend by more than is granted", l.Extend(t.Context(), time.Hour), hasp.ErrUnavailable)
		equal(t, "the rest of the term, as granted", time.Until(l.Expires()), time.Minute)
		want(t, "Extend by what is granted", l.Extend(t.Context(), time.Minute), nil)
		unlock(t, l)
	})
}

func TestExtendByACancelledCallerIsOfUnknownOutcome(t *testing.T) {
	onBench(t, func(t *bench) {
		t.renew = slow(time.Second)
		l := t.lock("k")
		ctx := timeout(t, t.Context(), 100*time.Millisecond)
		start := time.Now()
		wantOnly(t, "Extend", l.Extend(ctx, time.Hour), context.DeadlineExceeded)
		within(t, "Extend", start, 150*time.Millisecond)
		time.Sleep(2 * time.Second)
		between(t, "the term after a late answer", time.Until(l.Expires()), 59*time.Minute, time.Hour)
		unlock(t, l)

		// The wait for a renewal in flight also ends with the context.
		l = t.lock("k")
		t.renew = slow(10 * time.Second)
		go l.Extend(t.Context(), time.Minute)
		synctest.Wait()
		ctx = timeout(t, t.Context(), 100*time.Millisecond)
		start = time.Now()
		wantOnly(t, "Extend beside another one", l.Extend(ctx, time.Hour), context.DeadlineExceeded)
		within(t, "Extend beside another one", start, 150*time.Millisecond)
	})
}

func TestRenewalGoesOnForOneTermAfterLocksContextHasEnded(t *testing.T) {
	onBench(t, func(t *bench) {
		ctx, cancel := context.WithCancel(t.Context())
		l := t.lockIn(ctx, "k")
		time.Sleep(time.Hour)
		cancel()
		ended := time.Now()
		<-l.Context().Done()
		want(t, "cause", context.Cause(l.Context()), context.Canceled)
		want(t, "Err is about the hold", l.Err(), nil)
		if t.free("k") {
			t.Error("the end of Lock's context freed the key")
		}
		time.Sleep(10 * hasp.DefaultTTL)
		synctest.Wait()
		last := slices.MaxFunc(t.renewed, time.Time.Compare)
		between(t, "the time of the last renewal, from the end of Lock's context", last.Sub(ended), 0, hasp.DefaultTTL)
		want(t, "Err", l.Err(), hasp.ErrLost)
		t.freed("the key was not freed by its term", "k")
	})
}

func TestASickClaimDelaysOnlyItself(t *testing.T) {
	onBench(t, func(t *bench) {
		t.renew = func(q *call) error {
			if q.Key[0] == 's' {
				return untilEnd(q)
			}
			return q.send()
		}
		var well, sick []*hasp.Lease
		for i := range 3000 {
			well = append(well, t.lock(fmt.Sprint("well", i)))
			if i%3 == 0 {
				sick = append(sick, t.lock(fmt.Sprint("sick", i)))
			}
		}
		time.Sleep(4 * hasp.DefaultTTL)
		for _, l := range sick {
			want(t, "sick", l.Err(), hasp.ErrLost)
		}
		for _, l := range well {
			unlock(t, l)
		}
	})
}

func TestDriverThatAnswersTwiceAndLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &chatty{faulty: newFaulty()}
		c := await.Value(hasp.New(d, nil))
		l := lockNow(t, c, "k")
		time.Sleep(5 * hasp.DefaultTTL)
		unlock(t, l)
		c.Close()
	})
}

// chatty calls done too often and out of range.
type chatty struct{ *faulty }

func (d *chatty) Renew(ctx context.Context, cs []backend.Claim, done func(int, backend.Grant, error)) {
	done(-1, backend.Grant{}, backend.ErrLost)
	done(len(cs), backend.Grant{}, backend.ErrLost)
	d.faulty.Renew(ctx, cs, done)
	for i := range cs {
		done(i, backend.Grant{}, backend.ErrLost)
		time.AfterFunc(time.Second, func() { done(i, backend.Grant{}, backend.ErrLost) })
	}
}

// bulk renews a whole batch in one round trip.
type bulk struct {
	Driver
	calls, claims atomic.Int64
}

func (b *bulk) Traits() backend.Traits {
	return backend.Traits{Reach: backend.Network, Cancellation: backend.CancelPrompt}
}

// Wait hides that memlock is a Waiter.
func (b *bulk) Wait() {}

func (b *bulk) Renew(ctx context.Context, cs []backend.Claim, done func(int, backend.Grant, error)) {
	b.calls.Add(1)
	b.claims.Add(int64(len(cs)))
	time.Sleep(10 * time.Millisecond)
	b.Driver.Renew(ctx, cs, done)
}

// Leases with many different terms share batches, as leases with the same term do.
func TestManyTermsAreRenewedInBulk(t *testing.T) {
	await.Crowd(t)
	const n = 20_000
	for name, term := range map[string]func(i int) time.Duration{
		"one":  func(int) time.Duration { return 10 * time.Second },
		"two":  func(i int) time.Duration { return 10*time.Second - time.Duration(i%2)*time.Second },
		"many": func(i int) time.Duration { return 10*time.Second + time.Duration(i)*time.Microsecond },
		"far":  func(i int) time.Duration { return 500 * time.Millisecond << (i % 8) },
	} {
		runBubble(t, name, func(t *testing.T) {
			d := &bulk{Driver: memlock.NewDriver().(Driver)}
			c := opened(t, d, nil)
			before := runtime.NumGoroutine()
			leases := make([]*hasp.Lease, n)
			for i := range leases {
				leases[i] = lockNow(t, c, fmt.Sprint(i), hasp.WithTTL(term(i)))
			}
			time.Sleep(30 * time.Second)
			if extra := runtime.NumGoroutine() - before; extra > 40 {
				t.Errorf("%d goroutines for %d leases", extra, n)
			}
			lost := 0
			for _, l := range leases {
				if l.Err() != nil {
					lost++
				}
				unlock(t, l)
			}
			calls, claims := d.calls.Load(), d.claims.Load()
			if lost > 0 || calls*4 > claims {
				t.Errorf("%d of %d leases lost; %d calls for %d renewals", lost, n, calls, claims)
			}
		})
	}
}

// If renewals fail immediately, there are pauses between them, however short the term is.
func TestFailedRenewalsAreSpaced(t *testing.T) {
	onBench(t, func(t *bench) {
		l := t.lock("k", hasp.WithTTL(backend.MinTTL))
		t.onRenew(func(q *call) error {
			if len(t.renewed) > 1000 {
				panic("renewed without a pause")
			}
			return errNet
		})
		<-l.Context().Done()
		between(t, "renewals in two thirds of a short term", t.renewals(), 10, 60)
	})
}

func TestExtendPastTheLongestTermIsNoFailedRenewal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s seen
		c := opened(t, newShort(), &hasp.Options{TTL: maxTTL, Observe: s.observe})
		l := lockNow(t, c, "k")
		want(t, "Extend", l.Extend(t.Context(), 2*maxTTL), hasp.ErrInvalid)
		want(t, "re-entry", errOf(c.Lock(l.Context(), "k", hasp.WithTTL(2*maxTTL))), hasp.ErrInvalid)
		synctest.Wait()
		equal(t, "failed renewals", len(s.of(hasp.EventRenewFailed)), 0)
		unlock(t, l)
	})
}

// If a Renew outlasts its context, the engine leaves it behind, and tries again.
func TestRenewalThatHangsIsTriedAgain(t *testing.T) {
	for _, extend := range []bool{false, true} {
		onBench(t, func(t *bench) {
			var tries atomic.Int64
			t.renew = func(q *call) error {
				if tries.Add(1) == 1 {
					time.Sleep(time.Minute)
					return errNet
				}
				return q.send()
			}
			defer time.Sleep(time.Minute)
			defer t.Client.Close()
			l := t.lock("k", hasp.WithTTL(5*time.Second))
			if extend && l.Extend(t.Context(), time.Second) == nil {
				t.Error("Extend: no error")
			}
			time.Sleep(20 * time.Second)
			want(t, fmt.Sprint("Unlock, extended: ", extend), l.Unlock(t.Context()), nil)
		})
	}
}

// A Waiter grants much less than the term, and the first renewal of the hold fails.
func TestRenewalOfAShortHandOver(t *testing.T) {
	short := hooked{traits: inNoOrder, wait: func(q *call) error {
		err := q.send()
		q.got.Until = time.Now().Add(5 * time.Second)
		return err
	}}
	withRival(t, short, func(t *bench, rival *hasp.Lease) {
		t.onRenew(func(q *call) error {
			t.set(up)
			return errNet
		})
		next := t.lockSoon(t.Context(), "k", hasp.WithTTL(5*time.Minute))
		unlock(t, rival)
		l := <-next
		time.Sleep(10 * time.Second)
		want(t, "after a renewal that failed once", l.Err(), nil)
		unlock(t, l)
	})
}
