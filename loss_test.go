package hasp_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

// Each way to lose a lease has its reason. The lease, its context, its Unlock and its event report
// the same reason. A context derived from the lease's context ends in time.
func TestReasonOfALoss(t *testing.T) {
	lostAtOnce := func(f *faulty) { f.renew = failing(backend.ErrLost) }
	const term = hasp.DefaultTTL * 99 / 100 // the term less the drift
	for name, tc := range map[string]struct {
		opts   []hasp.Option
		lose   func(t *bench, suspend func(time.Duration), l *hasp.Lease)
		within time.Duration // longest time from the Lock to the end of the context
		reason string
		text   string
	}{
		"a renewal is refused": {
			opts:   options{hasp.WithMinHold(12 * time.Hour)}, // does not delay the loss
			lose:   func(t *bench, _ func(time.Duration), _ *hasp.Lease) { t.set(lostAtOnce) },
			within: hasp.DefaultTTL / 3,
			reason: hasp.LostRevoked, text: "it was broken, or the store lost its data"},
		"Extend is refused": {
			lose: func(t *bench, _ func(time.Duration), l *hasp.Lease) {
				t.set(lostAtOnce)
				want(t, "Extend", l.Extend(t.Context(), time.Minute), hasp.ErrLost)
			},
			within: time.Millisecond,
			reason: hasp.LostRevoked, text: "it was broken, or the store lost its data"},
		"the store is down": {
			lose:   func(t *bench, _ func(time.Duration), _ *hasp.Lease) { t.set(down) },
			within: term,
			reason: hasp.LostUnanswered, text: "no renewal was answered before its term ended (connection reset)"},
		"renewals hang, in spite of their contexts": {
			lose: func(t *bench, _ func(time.Duration), _ *hasp.Lease) {
				t.onRenew(hung)
			},
			within: term,
			reason: hasp.LostUnanswered, text: "(no answer from the store within 3s: i/o timeout)"},
		"the store is down after many renewals": {
			opts: options{hasp.WithTTL(time.Second)},
			lose: func(t *bench, _ func(time.Duration), _ *hasp.Lease) {
				time.Sleep(time.Minute)
				t.set(down)
			},
			within: time.Minute + time.Second,
			reason: hasp.LostUnanswered, text: "(connection reset)"},
		"the machine sleeps": {
			lose:   func(t *bench, suspend func(time.Duration), _ *hasp.Lease) { suspend(time.Minute) },
			within: time.Second + time.Millisecond,
			reason: hasp.LostStopped, text: "the process was stopped for longer than its term"},
		"no renewal": {
			opts:   options{hasp.WithoutRenewal()},
			within: term,
			reason: hasp.LostNotRenewed, text: "its term ended, and it was not renewed"},
		"max hold": {
			opts:   options{hasp.WithMaxHold(time.Minute)},
			within: time.Minute,
			reason: hasp.LostMaxHold, text: "its max hold is over"},
		"max hold without a store": {
			opts:   options{hasp.WithMaxHold(15 * time.Second)},
			lose:   func(t *bench, _ func(time.Duration), _ *hasp.Lease) { t.set(down) },
			within: 15 * time.Second,
			reason: hasp.LostMaxHold, text: "its max hold is over"},
	} {
		t.Run(name, func(t *testing.T) {
			var s seen
			withClient(t, &hasp.Options{Observe: s.observe}, func(t *bench) {
				suspend := hasp.Suspendable(t.Client)
				start := time.Now()
				l := t.lock("k", tc.opts...)
				child, cancel := context.WithCancel(l.Context())
				defer cancel()
				time.Sleep(time.Millisecond)
				if tc.lose != nil {
					tc.lose(t, suspend, l)
				}
				<-child.Done()
				within(t, "the end of the context", start, tc.within)
				synctest.Wait()
				wantLoss(t, "Err", l.Err(), tc.reason, tc.text)
				wantLoss(t, "cause", context.Cause(child), tc.reason, tc.text)
				wantLoss(t, "Unlock", l.Unlock(t.Context()), tc.reason, tc.text)
				ended := s.of(hasp.EventLost)
				if len(ended) != 1 || ended[0].Hold <= 0 {
					t.Fatalf("got events %+v, want one loss", s.all)
				}
				wantLoss(t, "EventLost", ended[0].Err, tc.reason, tc.text)
				t.set(up)
			})
		})
	}
}

// wantLoss fails the test unless err is a loss for reason, and its text ends in text.
func wantLoss(t testing.TB, what string, err error, reason, text string) {
	t.Helper()
	var lost *hasp.LostError
	if !errors.As(err, &lost) || lost.Reason != reason || !strings.HasSuffix(lost.Error(), text) || !strings.HasPrefix(lost.Error(), "lease lost: ") {
		t.Errorf("%s: got %v (%+v), want the reason %q and %q", what, err, lost, reason, text)
	}
	want(t, what, err, hasp.ErrLost)
}

// Each of these leases is lost before its Unlock or during it.
func TestReasonOfALossAtUnlock(t *testing.T) {
	withClient(t, nil, func(t *bench) {
		l := t.lock("broken")
		t.faulty.Break(t.Context(), "broken")
		wantLoss(t, "Unlock", l.Unlock(t.Context()), hasp.LostRevoked, "lost its data")
		wantLoss(t, "Err", l.Err(), hasp.LostRevoked, "lost its data")

		// The outcome of the release is unknown until the term has ended.
		l = t.lock("away")
		t.set(down)
		want(t, "Unlock", l.Unlock(t.Context()), errNet)
		time.Sleep(hasp.DefaultTTL)
		t.set(up)
		wantLoss(t, "Unlock again", l.Unlock(t.Context()), hasp.LostUnanswered, "before its term ended")

		// The max hold of an inner lease is over, and the outer lease goes on.
		outer := t.lock("k")
		inner := t.lockIn(outer.Context(), "k", hasp.WithMaxHold(time.Second))
		<-inner.Context().Done()
		wantLoss(t, "Err", inner.Err(), hasp.LostMaxHold, "max hold is over")
		want(t, "Err", outer.Err(), nil)

		// The outer lease is unlocked first, and then the max hold of the inner lease is over.
		inner = t.lockIn(outer.Context(), "k", hasp.WithMaxHold(time.Second))
		unlock(t, outer)
		time.Sleep(time.Second + time.Millisecond)
		wantLoss(t, "Unlock", inner.Unlock(t.Context()), hasp.LostMaxHold, "max hold is over")

		// After the end of Lock's context, the hold is renewed for one more term at most.
		ctx, cancel := context.WithCancel(t.Context())
		l = t.lockIn(ctx, "k")
		cancel()
		time.Sleep(3 * hasp.DefaultTTL)
		wantLoss(t, "Err", l.Err(), hasp.LostNotRenewed, "it was not renewed")

		// The process stands still during the call, until the term has ended.
		l = t.lock("stopped", hasp.WithTTL(time.Second))
		t.onRelease(slow(2 * time.Second))
		wantLoss(t, "Unlock after the term", l.Unlock(t.Context()), hasp.LostStopped, "the process was stopped for longer than its term")
	})
}

// No renewal asks for a term that ends long after the max hold. Otherwise a dead holder would keep
// the key after it.
func TestMaxHoldIsPassedByNoRenewal(t *testing.T) {
	withClient(t, &hasp.Options{TTL: time.Second}, func(t *bench) {
		const maxHold = 5500 * time.Millisecond
		start, renewals := time.Now(), 0
		t.renew = func(q *call) error {
			renewals++
			end := time.Now().Add(q.TTL - backend.Drift(q.TTL))
			if past := end.Sub(start) - maxHold; past > 10*time.Millisecond {
				t.Errorf("a renewal asked for a term that ends %v past the max hold", past)
			}
			return q.send()
		}

		l := t.lock("k", hasp.WithMaxHold(maxHold))
		want(t, "Extend past it", l.Extend(t.Context(), time.Minute), hasp.ErrInvalid)
		<-l.Context().Done()
		if got := time.Since(start); got != maxHold || renewals == 0 {
			t.Errorf("ended after %v and %d renewals, want %v", got, renewals, maxHold)
		}
		want(t, "Unlock", l.Unlock(t.Context()), hasp.ErrLost)
		synctest.Wait()
		t.freed("Unlock left the key to its term", "k")
	})
}

// If the answer to an Extend comes after the lease has ended, it extends nothing.
func TestExtendOfALeaseThatASuspendHasEnded(t *testing.T) {
	withClient(t, nil, func(t *bench) {
		suspend := hasp.Suspendable(t.Client)
		l := t.lock("k")
		answer := make(chan struct{})
		t.onRenew(func(q *call) error {
			<-answer
			return q.send()
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

// A deadline that counted from the reply, or without the drift, could be later than the end of the
// term in the store.
func TestDeadlineCountsFromBeforeTheCallLessDrift(t *testing.T) {
	withClient(t, nil, func(t *bench) {
		const oneWay = 50 * time.Millisecond // time to the store, and back
		t.acquire = func(q *call) error {
			time.Sleep(oneWay)
			defer time.Sleep(oneWay)
			err := q.send()
			q.got = backend.Grant{} // without Until, so the engine computes the deadline
			return err
		}
		t.renew = t.acquire
		const ttl = 10 * time.Second

		called := time.Now()
		l := t.lock("k", hasp.WithTTL(ttl))
		equal(t, "the time of the lease, from the call of Lock", l.Expires().Sub(called), ttl-backend.Drift(ttl))

		// Extend asks for a little more, so that ttl is left when drift is off.
		called = time.Now()
		want(t, "Extend", l.Extend(t.Context(), ttl), nil)
		if got := l.Expires().Sub(called); got < ttl || got > ttl+10*time.Millisecond {
			t.Errorf("Extend: the lease lasts %v from the call, want %v and hardly more", got, ttl)
		}

		for range 3 {
			before := t.renewals()
			for renews := before; renews == before; renews = t.renewals() {
				time.Sleep(time.Millisecond)
			}
			time.Sleep(2*oneWay + time.Millisecond) // for the reply
			var sent time.Time
			t.set(func(f *faulty) { sent = f.renewed[before] })
			equal(t, "the time of the lease, from the call of a renewal", l.Expires().Sub(sent), ttl-backend.Drift(ttl))
		}
		unlock(t, l)
	})
}

// The clock is past the deadline, and no timer has fired. Every method that checks the lease must
// read the clock.
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
		withClient(t, nil, func(t *bench) {
			l := t.lock("k")
			var ctx, child context.Context
			if what != "a context made" {
				ctx = l.Context()
				var cancel context.CancelFunc
				child, cancel = context.WithCancel(ctx)
				defer cancel()
			}
			synctest.Wait()

			hasp.Skip(t.Client, hasp.DefaultTTL)
			want(t, what, look(l, ctx, child), hasp.ErrLost)
		})
	}
}
