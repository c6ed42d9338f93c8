package hasp_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/memlock"
)

func TestContextEndsAtTheDeadlineWhenTheStoreIsUnreachable(t *testing.T) {
	withClient(t, nil, func(t *testing.T, f *faulty, c *hasp.Client) {
		start := time.Now()
		l := lockNow(t, c, "k")
		child, cancel := context.WithCancel(l.Context())
		defer cancel()
		f.set(down)
		<-child.Done()
		if got, want := time.Since(start), hasp.DefaultTTL-backend.Drift(hasp.DefaultTTL); got != want {
			t.Errorf("told after %v, want %v", got, want)
		}
		if free(t, f, "k") {
			t.Error("told after another could have held the key")
		}
		want(t, "cause", context.Cause(child), hasp.ErrLost)
		want(t, "Err", l.Err(), hasp.ErrLost)
		f.set(up)
		want(t, "Unlock", l.Unlock(t.Context()), hasp.ErrLost)
		want(t, "second Unlock", l.Unlock(t.Context()), hasp.ErrLost)
	})
}

func TestContextEndsAtTheDeadlineWhenRenewHangs(t *testing.T) {
	withClient(t, nil, func(t *testing.T, f *faulty, c *hasp.Client) {
		hang := make(chan struct{})
		// A driver that breaks its contract and ignores its context.
		f.renew = func(context.Context, backend.Claim, func() (backend.Grant, error)) (backend.Grant, error) {
			<-hang
			return backend.Grant{}, errNet
		}
		start := time.Now()
		l := lockNow(t, c, "k")
		<-l.Context().Done()
		if got, want := time.Since(start), hasp.DefaultTTL-backend.Drift(hasp.DefaultTTL); got != want {
			t.Errorf("told after %v, want %v", got, want)
		}
		close(hang)
	})
}

func TestLossIsToldAtOnceWhenTheStoreSaysSo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFaulty()
		var events []hasp.Event
		c := hasp.New(f, &hasp.Options{Observe: func(_ context.Context, e hasp.Event) { events = append(events, e) }})
		defer c.Close()
		start := time.Now()
		l := lockNow(t, c, "k")
		want(t, "Break", f.Break(t.Context(), "k"), nil)
		<-l.Context().Done()
		within(t, "the report, which comes with the first renewal,", start, hasp.DefaultTTL/3)
		want(t, "cause", context.Cause(l.Context()), hasp.ErrLost)
		synctest.Wait()
		if n := len(events); n != 3 || events[2].Kind != hasp.EventLost || !errors.Is(events[2].Err, hasp.ErrLost) || events[2].Hold <= 0 {
			t.Errorf("got events %v, want requested, acquired and lost", events)
		}
	})
}

func TestSuspendOfTheMachineEndsALease(t *testing.T) {
	withClient(t, nil, func(t *testing.T, _ *faulty, c *hasp.Client) {
		suspend := hasp.Suspendable(c)
		l := lockNow(t, c, "k")
		suspend(time.Minute)
		start := time.Now()
		<-l.Context().Done()
		within(t, "the end of the context", start, time.Second)
		want(t, "cause", context.Cause(l.Context()), hasp.ErrLost)
	})
}

func TestGrantThatComesTooLateIsGivenBack(t *testing.T) {
	withClient(t, &hasp.Options{TTL: time.Second}, func(t *testing.T, f *faulty, c *hasp.Client) {
		f.acquire = func(c backend.Claim, send func() (backend.Grant, error)) (backend.Grant, error) {
			send()
			time.Sleep(c.TTL)
			return backend.Grant{}, nil
		}
		_, err := c.TryLock(t.Context(), "k")
		if err == nil || errors.Is(err, hasp.ErrHeld) {
			t.Errorf("got %v, want an outage", err)
		}
		synctest.Wait()
		freed(t, f, "k", "the late grant was not released")
	})
}

func TestMaxHoldIsPassedByNoRenewal(t *testing.T) {
	withClient(t, &hasp.Options{TTL: time.Second}, func(t *testing.T, f *faulty, c *hasp.Client) {
		start := time.Now()
		l := lockNow(t, c, "k", hasp.WithMaxHold(5500*time.Millisecond))
		want(t, "Extend past it", l.Extend(t.Context(), time.Minute), hasp.ErrInvalid)
		<-l.Context().Done()
		if got := time.Since(start); got != 5500*time.Millisecond {
			t.Errorf("ended after %v, want 5.5s", got)
		}
		want(t, "cause", context.Cause(l.Context()), hasp.ErrLost)
		want(t, "Unlock", l.Unlock(t.Context()), hasp.ErrLost)
		synctest.Wait()
		freed(t, f, "k", "Unlock left the key to its term")
	})
}

func TestDeadlineIsThatOfLocksContext(t *testing.T) {
	c := hasp.New(memlock.New(), nil)
	defer c.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	l := lockIn(t, c, ctx, "k")
	defer l.Unlock(ctx)
	want, _ := ctx.Deadline()
	if got, ok := l.Context().Deadline(); !ok || !got.Equal(want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if left := time.Until(l.Expires()); left <= 0 || left > hasp.DefaultTTL {
		t.Errorf("lease expires in %v", left)
	}
}

// A call during which the machine sleeps is no round trip. If it were one, the next gap
// of any key would last for hours.
func TestSuspendIsNoRoundTrip(t *testing.T) {
	withClient(t, nil, func(t *testing.T, f *faulty, c *hasp.Client) {
		suspend := hasp.Suspendable(c)
		other := hasp.New(&faulty{Driver: f.Driver}, nil)
		defer other.Close()
		holder, away := lockNow(t, other, "k"), lockNow(t, other, "away")
		leases := make(chan *hasp.Lease, 1)
		go func() { leases <- lockNow(t, c, "k") }()
		synctest.Wait()
		second := lockLater(t, c, t.Context())
		unlock(t, holder)
		first := <-leases

		answer := make(chan struct{})
		f.set(func(f *faulty) {
			f.acquire = func(cl backend.Claim, send func() (backend.Grant, error)) (backend.Grant, error) {
				if cl.Key == "away" {
					<-answer
				}
				return send()
			}
		})
		tried := make(chan error)
		go func() { tried <- errOf(c.TryLock(t.Context(), "away")) }()
		synctest.Wait()
		time.Sleep(5 * time.Millisecond) // the clock reads the time of sleep at most once a millisecond
		suspend(8 * time.Hour)
		close(answer)
		want(t, "TryLock", <-tried, hasp.ErrHeld)

		time.Sleep(5 * time.Millisecond)
		start := time.Now()
		want(t, "Unlock", first.Unlock(t.Context()), hasp.ErrLost)
		want(t, "the next in line", <-second, nil)
		within(t, "the next in line", start, 5*time.Second)
		unlock(t, away)
	})
}

// The answer to an Extend that comes after the lease has ended extends nothing.
func TestExtendOfALeaseThatASuspendHasEnded(t *testing.T) {
	withClient(t, nil, func(t *testing.T, f *faulty, c *hasp.Client) {
		suspend := hasp.Suspendable(c)
		l := lockNow(t, c, "k")
		answer := make(chan struct{})
		f.set(func(f *faulty) {
			f.renew = func(_ context.Context, _ backend.Claim, send func() (backend.Grant, error)) (backend.Grant, error) {
				<-answer
				return send()
			}
		})
		extended := make(chan error)
		go func() { extended <- l.Extend(t.Context(), 40*time.Second) }()
		synctest.Wait()
		time.Sleep(5 * time.Millisecond)
		suspend(time.Hour)
		close(answer)
		want(t, "Extend", <-extended, hasp.ErrLost)
		l.Unlock(t.Context())
	})
}

// If Close has ended while Observe still ran with EventAcquired, the loss is reported
// after it.
func TestLossIsReportedAfterASlowObserver(t *testing.T) {
	var kinds []hasp.EventKind
	o := &hasp.Options{Timeout: time.Second, Observe: func(_ context.Context, e hasp.Event) {
		if e.Kind == hasp.EventAcquired {
			time.Sleep(10 * time.Second)
		}
		kinds = append(kinds, e.Kind)
	}}
	withClient(t, o, func(t *testing.T, _ *faulty, c *hasp.Client) {
		leases := make(chan *hasp.Lease)
		go func() { leases <- lockNow(t, c, "k") }()
		synctest.Wait()
		c.Close()
		want(t, "Unlock", (<-leases).Unlock(t.Context()), hasp.ErrClosed)
		if !slices.Equal(kinds, []hasp.EventKind{hasp.EventRequested, hasp.EventAcquired, hasp.EventLost}) {
			t.Errorf("got %v", kinds)
		}
	})
}
