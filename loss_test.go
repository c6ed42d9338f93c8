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

// Each way to lose a lease has a reason. The lease, its context, its Unlock and its event
// agree on it. A context derived from the lease's learns of the loss in time.
func TestReasonOfALoss(t *testing.T) {
	lostAtOnce := func(f *faulty) { f.renew = renewal(failAcquire(backend.ErrLost)) }
	const term = hasp.DefaultTTL * 99 / 100 // less the drift
	for name, tc := range map[string]struct {
		opts   []hasp.Option
		lose   func(t *testing.T, f *faulty, suspend func(time.Duration), l *hasp.Lease)
		within time.Duration // after the Lock
		reason string
		text   string
	}{
		"a renewal is refused": {
			opts:   []hasp.Option{hasp.WithMinHold(12 * time.Hour)}, // does not delay it
			lose:   func(_ *testing.T, f *faulty, _ func(time.Duration), _ *hasp.Lease) { f.set(lostAtOnce) },
			within: hasp.DefaultTTL / 3,
			reason: hasp.LostRevoked, text: "it was broken, or the store lost its data"},
		"Extend is refused": {
			lose: func(t *testing.T, f *faulty, _ func(time.Duration), l *hasp.Lease) {
				f.set(lostAtOnce)
				want(t, "Extend", l.Extend(t.Context(), time.Minute), hasp.ErrLost)
			},
			within: time.Millisecond,
			reason: hasp.LostRevoked, text: "it was broken, or the store lost its data"},
		"the store is down": {
			lose:   func(_ *testing.T, f *faulty, _ func(time.Duration), _ *hasp.Lease) { f.set(down) },
			within: term,
			reason: hasp.LostUnanswered, text: "no renewal was answered before its term ended (connection reset)"},
		"renewals hang, in spite of their contexts": {
			lose: func(_ *testing.T, f *faulty, _ func(time.Duration), _ *hasp.Lease) {
				f.set(func(f *faulty) { f.renew = renewal(hungAcquire) })
			},
			within: term,
			reason: hasp.LostUnanswered, text: "(no answer from the store within 3s: i/o timeout)"},
		"the store is down after many renewals": {
			opts: []hasp.Option{hasp.WithTTL(time.Second)},
			lose: func(_ *testing.T, f *faulty, _ func(time.Duration), _ *hasp.Lease) {
				time.Sleep(time.Minute)
				f.set(down)
			},
			within: time.Minute + time.Second,
			reason: hasp.LostUnanswered, text: "(connection reset)"},
		"the machine sleeps": {
			lose:   func(_ *testing.T, _ *faulty, suspend func(time.Duration), _ *hasp.Lease) { suspend(time.Minute) },
			within: time.Second + time.Millisecond,
			reason: hasp.LostStopped, text: "the process was stopped for longer than its term"},
		"no renewal": {
			opts:   []hasp.Option{hasp.WithoutRenewal()},
			within: term,
			reason: hasp.LostNotRenewed, text: "its term ended, and it was not renewed"},
		"max hold": {
			opts:   []hasp.Option{hasp.WithMaxHold(time.Minute)},
			within: time.Minute,
			reason: hasp.LostMaxHold, text: "its max hold is over"},
		"max hold without a store": {
			opts:   []hasp.Option{hasp.WithMaxHold(15 * time.Second)},
			lose:   func(_ *testing.T, f *faulty, _ func(time.Duration), _ *hasp.Lease) { f.set(down) },
			within: 15 * time.Second,
			reason: hasp.LostMaxHold, text: "its max hold is over"},
	} {
		t.Run(name, func(t *testing.T) {
			var s seen
			withClient(t, &hasp.Options{Observe: s.observe}, func(t *testing.T, f *faulty, c *hasp.Client) {
				suspend := hasp.Suspendable(c)
				start := time.Now()
				l := lockNow(t, c, "k", tc.opts...)
				child, cancel := context.WithCancel(l.Context())
				defer cancel()
				time.Sleep(time.Millisecond)
				if tc.lose != nil {
					tc.lose(t, f, suspend, l)
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
				f.set(up)
				c.Close()
				time.Sleep(2 * time.Hour) // for calls that hang
			})
		})
	}
}

// wantLoss fails the test unless err is a loss for reason, and its text ends in text.
func wantLoss(t *testing.T, what string, err error, reason, text string) {
	t.Helper()
	var lost *hasp.LostError
	if !errors.As(err, &lost) || lost.Reason != reason || !strings.HasSuffix(lost.Error(), text) || !strings.HasPrefix(lost.Error(), "lease lost: ") {
		t.Errorf("%s: got %v (%+v), want the reason %q and %q", what, err, lost, reason, text)
	}
	wantOnly(t, what, err, hasp.ErrLost)
}

// These leases end by themselves before, or when, they are unlocked.
func TestReasonOfALossAtUnlock(t *testing.T) {
	withClient(t, nil, func(t *testing.T, f *faulty, c *hasp.Client) {
		l := lockNow(t, c, "broken")
		f.Break(t.Context(), "broken")
		wantLoss(t, "Unlock", l.Unlock(t.Context()), hasp.LostRevoked, "lost its data")
		wantLoss(t, "Err", l.Err(), hasp.LostRevoked, "lost its data")

		// The term ends before a repeat of the release is answered.
		l = lockNow(t, c, "away")
		f.set(down)
		want(t, "Unlock", l.Unlock(t.Context()), errNet)
		time.Sleep(hasp.DefaultTTL)
		f.set(up)
		wantLoss(t, "Unlock again", l.Unlock(t.Context()), hasp.LostUnanswered, "before its term ended")

		// The max hold of an inner lease is over, and the outer lease goes on.
		outer := lockNow(t, c, "k")
		inner := lockIn(t, c, outer.Context(), "k", hasp.WithMaxHold(time.Second))
		<-inner.Context().Done()
		wantLoss(t, "Err", inner.Err(), hasp.LostMaxHold, "max hold is over")
		want(t, "Err", outer.Err(), nil)

		// So is that of an inner lease that is left alone.
		inner = lockIn(t, c, outer.Context(), "k", hasp.WithMaxHold(time.Second))
		unlock(t, outer)
		time.Sleep(time.Second + time.Millisecond)
		wantLoss(t, "Unlock", inner.Unlock(t.Context()), hasp.LostMaxHold, "max hold is over")

		// After the end of Lock's context, the hold is renewed for one more term at most.
		ctx, cancel := context.WithCancel(t.Context())
		l = lockIn(t, c, ctx, "k")
		cancel()
		time.Sleep(3 * hasp.DefaultTTL)
		wantLoss(t, "Err", l.Err(), hasp.LostNotRenewed, "it was not renewed")
	})
}
