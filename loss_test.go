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
// agree on it.
func TestReasonOfALoss(t *testing.T) {
	lostAtOnce := func(ctx context.Context, c backend.Claim, send func() (backend.Grant, error)) (backend.Grant, error) {
		return backend.Grant{}, backend.ErrLost
	}
	for name, tc := range map[string]struct {
		opts   []hasp.Option
		lose   func(t *testing.T, f *faulty, suspend func(time.Duration), l *hasp.Lease)
		reason string
		text   string
	}{
		"a renewal is refused": {
			lose: func(_ *testing.T, f *faulty, _ func(time.Duration), _ *hasp.Lease) {
				f.set(func(f *faulty) { f.renew = lostAtOnce })
			},
			reason: hasp.LostRevoked, text: "it was broken, or the store lost its data"},
		"Extend is refused": {
			lose: func(t *testing.T, f *faulty, _ func(time.Duration), l *hasp.Lease) {
				f.set(func(f *faulty) { f.renew = lostAtOnce })
				want(t, "Extend", l.Extend(t.Context(), time.Minute), hasp.ErrLost)
			},
			reason: hasp.LostRevoked, text: "it was broken, or the store lost its data"},
		"the store is down": {
			lose:   func(_ *testing.T, f *faulty, _ func(time.Duration), _ *hasp.Lease) { f.set(down) },
			reason: hasp.LostUnanswered, text: "no renewal was answered before its term ended (connection reset)"},
		"the store is down after many renewals": {
			opts: []hasp.Option{hasp.WithTTL(time.Second)},
			lose: func(_ *testing.T, f *faulty, _ func(time.Duration), _ *hasp.Lease) {
				time.Sleep(time.Minute)
				f.set(down)
			},
			reason: hasp.LostUnanswered, text: "(connection reset)"},
		"the machine sleeps": {
			lose:   func(_ *testing.T, _ *faulty, suspend func(time.Duration), _ *hasp.Lease) { suspend(time.Minute) },
			reason: hasp.LostStopped, text: "the process was stopped for longer than its term"},
		"no renewal": {
			opts:   []hasp.Option{hasp.WithoutRenewal()},
			reason: hasp.LostNotRenewed, text: "its term ended, and it was not renewed"},
		"max hold": {
			opts:   []hasp.Option{hasp.WithMaxHold(time.Minute)},
			reason: hasp.LostMaxHold, text: "its max hold is over"},
		"max hold without a store": {
			opts:   []hasp.Option{hasp.WithMaxHold(15 * time.Second)},
			lose:   func(_ *testing.T, f *faulty, _ func(time.Duration), _ *hasp.Lease) { f.set(down) },
			reason: hasp.LostMaxHold, text: "its max hold is over"},
	} {
		t.Run(name, func(t *testing.T) {
			var ended hasp.Event
			o := &hasp.Options{Observe: func(_ context.Context, e hasp.Event) {
				if e.Kind == hasp.EventLost {
					ended = e
				}
			}}
			withClient(t, o, func(t *testing.T, f *faulty, c *hasp.Client) {
				suspend := hasp.Suspendable(c)
				l := lockNow(t, c, "k", tc.opts...)
				time.Sleep(time.Millisecond)
				if tc.lose != nil {
					tc.lose(t, f, suspend, l)
				}
				<-l.Context().Done()
				synctest.Wait()
				wantLoss(t, "Err", l.Err(), tc.reason, tc.text)
				wantLoss(t, "cause", context.Cause(l.Context()), tc.reason, tc.text)
				wantLoss(t, "Unlock", l.Unlock(t.Context()), tc.reason, tc.text)
				wantLoss(t, "EventLost", ended.Err, tc.reason, tc.text)
				f.set(up)
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
		unlock(t, outer)

		// After the end of Lock's context, the hold is renewed for one more term at most.
		ctx, cancel := context.WithCancel(t.Context())
		l = lockIn(t, c, ctx, "k")
		cancel()
		time.Sleep(3 * hasp.DefaultTTL)
		wantLoss(t, "Err", l.Err(), hasp.LostNotRenewed, "it was not renewed")
	})
}
