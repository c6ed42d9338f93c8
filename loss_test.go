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
	refuse := func(f *faulty) { f.renew = failing(backend.ErrLost) }
	const term = hasp.DefaultTTL * 99 / 100 // the term less the drift
	for name, tc := range map[string]struct {
		opts   []hasp.Option
		after  time.Duration   // how long the lease is renewed
		store  func(f *faulty) // how the store changes then
		extend bool            // Extend is called then
		sleeps time.Duration   // how long the machine sleeps then
		within time.Duration   // longest time from the Lock to the end of the context
		reason string
		text   string
	}{
		"a renewal is refused": {
			opts:  options{hasp.WithMinHold(12 * time.Hour)}, // does not delay the loss
			store: refuse, within: hasp.DefaultTTL / 3,
			reason: hasp.LostRevoked, text: "it was broken, or the store lost its data"},
		"Extend is refused": {
			store: refuse, extend: true, within: time.Millisecond,
			reason: hasp.LostRevoked, text: "it was broken, or the store lost its data"},
		"the store is down": {
			store: down, within: term,
			reason: hasp.LostUnanswered, text: "no renewal was answered before its term ended (connection reset)"},
		"renewals hang, in spite of their contexts": {
			store: func(f *faulty) { f.renew = hung }, within: term,
			reason: hasp.LostUnanswered, text: "(no answer from the store within 3s: i/o timeout)"},
		"the store is down after many renewals": {
			opts:  options{hasp.WithTTL(time.Second)},
			after: time.Minute, store: down, within: time.Minute + time.Second,
			reason: hasp.LostUnanswered, text: "(connection reset)"},
		"the machine sleeps": {
			sleeps: time.Minute, within: time.Second + time.Millisecond,
			reason: hasp.LostStopped, text: "the process was stopped for longer than its term"},
		"no renewal": {
			opts: options{hasp.WithoutRenewal()}, within: term,
			reason: hasp.LostNotRenewed, text: "its term ended, and it was not renewed"},
		"max hold": {
			opts: options{hasp.WithMaxHold(time.Minute)}, within: time.Minute,
			reason: hasp.LostMaxHold, text: "its max hold is over"},
		"max hold without a store": {
			opts:  options{hasp.WithMaxHold(15 * time.Second)},
			store: down, within: 15 * time.Second,
			reason: hasp.LostMaxHold, text: "its max hold is over"},
	} {
		var s seen
		runClient(t, name, &hasp.Options{Observe: s.observe}, func(t *bench) {
			suspend := hasp.Suspendable(t.Client)
			start := time.Now()
			l := t.lock("k", tc.opts...)
			child, cancel := context.WithCancel(l.Context())
			defer cancel()
			time.Sleep(time.Millisecond + tc.after)
			if tc.store != nil {
				t.set(tc.store)
			}
			if tc.extend {
				want(t, "Extend", l.Extend(t.Context(), time.Minute), hasp.ErrLost)
			}
			suspend(tc.sleeps)
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
	onBench(t, func(t *bench) {
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

		// The outer lease is unlocked first, and then the max hold of the inner lease is over.
		outer := t.lock("k")
		inner := t.lockIn(outer.Context(), "k", hasp.WithMaxHold(time.Second))
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
	onBench(t, func(t *bench) {
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
	onBench(t, func(t *bench) {
		const oneWay = 50 * time.Millisecond // time to the store, and back
		t.acquire = func(q *call) error {
			err := trip(2 * oneWay)(q)
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

// The machine has slept past the deadline, and no timer has fired. Every method that checks the lease must
// read the clock.
func TestErrAsksTheClock(t *testing.T) {
	type looked struct {
		*hasp.Lease
		ctx, child context.Context
	}
	for what, look := range map[string]func(l looked) error{
		"Err":         func(l looked) error { return l.Err() },
		"the context": func(l looked) error { return errors.Join(l.ctx.Err(), context.Cause(l.ctx)) },
		"its channel": func(l looked) error {
			select {
			case <-l.ctx.Done():
				return context.Cause(l.ctx)
			default:
				return nil
			}
		},
		"a context made": func(l looked) error { return context.Cause(l.Context()) },
		"Unlock":         func(l looked) error { return l.Unlock(context.Background()) },
		"Extend":         func(l looked) error { return l.Extend(context.Background(), time.Minute) },
		"a child, after Err": func(l looked) error {
			l.Err()
			return context.Cause(l.child)
		},
	} {
		onBench(t, func(t *bench) {
			suspend := hasp.Suspendable(t.Client)
			l := looked{Lease: t.lock("k")}
			if what != "a context made" {
				var cancel context.CancelFunc
				l.ctx = l.Context()
				l.child, cancel = context.WithCancel(l.ctx)
				defer cancel()
			}
			time.Sleep(2 * time.Millisecond) // the clock is read once a millisecond
			suspend(hasp.DefaultTTL)
			want(t, what, look(l), hasp.ErrLost)
		})
	}
}
