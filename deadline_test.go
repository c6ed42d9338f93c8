package hasp_test

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

// The store must not keep a key for longer than WithMaxHold allows either: a dead holder would
// block it.
func TestMaxHoldIsPassedByNoRenewal(t *testing.T) {
	withClient(t, &hasp.Options{TTL: time.Second}, func(t *testing.T, f *faulty, c *hasp.Client) {
		const maxHold = 5500 * time.Millisecond
		start, renewals := time.Now(), 0
		f.renew = func(_ context.Context, c backend.Claim, send func() (backend.Grant, error)) (backend.Grant, error) {
			renewals++
			end := time.Now().Add(c.TTL - backend.Drift(c.TTL))
			if past := end.Sub(start) - maxHold; past > 10*time.Millisecond {
				t.Errorf("a renewal asked for a term that ends %v past the max hold", past)
			}
			return send()
		}

		l := lockNow(t, c, "k", hasp.WithMaxHold(maxHold))
		want(t, "Extend past it", l.Extend(t.Context(), time.Minute), hasp.ErrInvalid)
		<-l.Context().Done()
		if got := time.Since(start); got != maxHold || renewals == 0 {
			t.Errorf("ended after %v and %d renewals, want %v", got, renewals, maxHold)
		}
		want(t, "Unlock", l.Unlock(t.Context()), hasp.ErrLost)
		synctest.Wait()
		freed(t, f, "k", "Unlock left the key to its term")
	})
}

// A call during which the machine sleeps is no round trip. If it were one, the next gap
// of any key would last for hours.
func TestSuspendIsNoRoundTrip(t *testing.T) {
	withClient(t, nil, func(t *testing.T, f *faulty, c *hasp.Client) {
		suspend := hasp.Suspendable(c)
		other := hasp.New(&faulty{Driver: f.Driver}, nil)
		defer other.Close()
		holder, away := lockNow(t, other, "k"), lockNow(t, other, "away")
		leases := lockSoon(t, c, t.Context(), "k")
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
		leases := lockSoon(t, c, t.Context(), "k")
		c.Close()
		want(t, "Unlock", (<-leases).Unlock(t.Context()), hasp.ErrClosed)
		if !slices.Equal(kinds, []hasp.EventKind{hasp.EventRequested, hasp.EventAcquired, hasp.EventLost}) {
			t.Errorf("got %v", kinds)
		}
	})
}
