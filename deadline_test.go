package hasp_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
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
		other := await.Value(hasp.New(&faulty{Driver: f.Driver}, nil))
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

// oneWay is how long a call takes to the store in these tests, and its reply
// back.
const oneWay = 50 * time.Millisecond

// slow makes a driver slow, with grants that leave Until zero, so that the engine
// counts the term itself.
func slow(f *faulty) {
	f.acquire = func(_ backend.Claim, send func() (backend.Grant, error)) (backend.Grant, error) {
		time.Sleep(oneWay)
		_, err := send()
		time.Sleep(oneWay)
		return backend.Grant{}, err
	}
	f.renew = renewal(f.acquire)
}

// If the deadline counted from the reply, or did not subtract the drift, it could
// be later than the end of the term in the store.
func TestDeadlineCountsFromBeforeTheCallLessDrift(t *testing.T) {
	withClient(t, nil, func(t *testing.T, f *faulty, c *hasp.Client) {
		f.set(slow)
		const ttl = 10 * time.Second

		called := time.Now()
		l := lockNow(t, c, "k", hasp.WithTTL(ttl))
		if got, want := l.Expires().Sub(called), ttl-backend.Drift(ttl); got != want {
			t.Errorf("Lock: the lease lasts %v from the call, want %v", got, want)
		}

		// Extend asks for a little more, so that ttl is left when drift is off.
		called = time.Now()
		want(t, "Extend", l.Extend(t.Context(), ttl), nil)
		if got := l.Expires().Sub(called); got < ttl || got > ttl+10*time.Millisecond {
			t.Errorf("Extend: the lease lasts %v from the call, want %v and hardly more", got, ttl)
		}

		for range 3 {
			_, before, _ := f.calls()
			for renews := before; renews == before; _, renews, _ = f.calls() {
				time.Sleep(time.Millisecond)
			}
			time.Sleep(2*oneWay + time.Millisecond) // its reply
			var sent time.Time
			f.set(func(f *faulty) { sent = f.renewed[before] })
			if got, want := l.Expires().Sub(sent), ttl-backend.Drift(ttl); got != want {
				t.Errorf("renewal: the lease lasts %v from the call, want %v", got, want)
			}
		}
		unlock(t, l)
	})
}

// The clock is past the deadline, and no timer has fired. Every method that
// checks the lease must read the clock.
func TestErrAsksTheClock(t *testing.T) {
	for what, look := range map[string]func(l *hasp.Lease, ctx, child context.Context) error{
		"Err":         func(l *hasp.Lease, _, _ context.Context) error { return l.Err() },
		"the context": func(_ *hasp.Lease, ctx, _ context.Context) error { return errors.Join(ctx.Err(), context.Cause(ctx)) },
		"its channel": func(_ *hasp.Lease, ctx, _ context.Context) error {
			select {
			case <-ctx.Done():
				return context.Cause(ctx)
			default:
				return nil
			}
		},
		"a context made": func(l *hasp.Lease, _, _ context.Context) error { return context.Cause(l.Context()) },
		"Unlock":         func(l *hasp.Lease, _, _ context.Context) error { return l.Unlock(context.Background()) },
		"Extend":         func(l *hasp.Lease, _, _ context.Context) error { return l.Extend(context.Background(), time.Minute) },
		"a child, after Err": func(l *hasp.Lease, _, child context.Context) error {
			l.Err()
			return context.Cause(child)
		},
	} {
		withClient(t, nil, func(t *testing.T, _ *faulty, c *hasp.Client) {
			l := lockNow(t, c, "k")
			var ctx, child context.Context
			if what != "a context made" {
				ctx = l.Context()
				var cancel context.CancelFunc
				child, cancel = context.WithCancel(ctx)
				defer cancel()
			}
			synctest.Wait()

			hasp.Skip(c, hasp.DefaultTTL)
			want(t, what, look(l, ctx, child), hasp.ErrLost)
		})
	}
}
