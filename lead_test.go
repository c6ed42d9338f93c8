package hasp_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/memlock"
)

func TestLeadRefusesBadInputAtOnce(t *testing.T) {
	withClient(t, nil, func(t *testing.T, f *faulty, c *hasp.Client) {
		fn := func(context.Context, *hasp.Lease) error { t.Error("fn ran"); return nil }
		start := time.Now()
		for _, tc := range []struct {
			name, key string
			fn        func(context.Context, *hasp.Lease) error
			opt       hasp.Option
			says      string
		}{
			{"fn is nil", "k", nil, nil, "pass the function"},
			{"a max wait", "k", fn, hasp.WithMaxWait(time.Second), "bound that instead"},
			{"a max wait of zero", "k", fn, hasp.WithMaxWait(0), "bound that instead"},
			{"shared", "k", fn, hasp.WithShared(), "several would lead"},
			{"an empty key", "", fn, nil, "empty key"},
			{"a short term", "k", fn, hasp.WithTTL(time.Millisecond), "below"},
		} {
			err := hasp.Lead(t.Context(), c, tc.key, tc.fn, tc.opt)
			want(t, tc.name, err, hasp.ErrInvalid)
			var e *hasp.Error
			if !errors.As(err, &e) || e.Key != tc.key || !strings.Contains(err.Error(), tc.says) {
				t.Errorf("%s: got %v, want %q in it", tc.name, err, tc.says)
			}
		}
		if a, _, _ := f.calls(); a != 0 || time.Since(start) != 0 {
			t.Errorf("%d attempts, %v", a, time.Since(start))
		}
		c.Close()
		want(t, "closed", hasp.Lead(t.Context(), c, "k", fn), hasp.ErrClosed)
	})
	synctest.Test(t, func(t *testing.T) {
		c := await.Value(hasp.New(&bulk{Driver: memlock.NewDriver().(Driver)}, nil))
		defer c.Close()
		err := hasp.Lead(t.Context(), c, "k", func(context.Context, *hasp.Lease) error { return nil }, hasp.WithFence())
		want(t, "no fences", err, errors.ErrUnsupported)
	})
}

// Each time that the lease is lost, fn runs again, whatever it has returned.
func TestLeadCompetesAgainAfterALoss(t *testing.T) {
	withClient(t, nil, func(t *testing.T, f *faulty, c *hasp.Client) {
		var runs int
		var last uint64
		var returned time.Time
		inside := false
		err := hasp.Lead(t.Context(), c, "k", func(ctx context.Context, l *hasp.Lease) error {
			if inside {
				t.Error("fn runs twice at once")
			}
			inside = true
			defer func() { inside, returned = false, time.Now() }()
			if l.Fence() <= last {
				t.Errorf("fence %d after %d", l.Fence(), last)
			}
			last = l.Fence()
			if d := time.Since(returned); runs > 0 && d > 100*time.Millisecond {
				t.Errorf("led again %v after fn had returned, want at most 100ms", d)
			}
			runs++
			switch runs {
			case 1:
				f.Break(ctx, "k")
				<-ctx.Done()
				want(t, "cause", context.Cause(ctx), hasp.ErrLost)
				return nil
			case 2: // a max hold makes leaders take turns
				<-ctx.Done()
				want(t, "cause", context.Cause(ctx), hasp.ErrLost)
				return errors.New("of a term that was lost")
			case 3:
				// It takes no notice of its context, and runs beside the next leader.
				f.Break(ctx, "k")
				time.Sleep(3 * hasp.DefaultTTL)
				unlock(t, lockNow(t, c, "k", hasp.WithMaxWait(0)))
				return nil
			}
			return nil
		}, hasp.WithFence(), hasp.WithMaxHold(time.Hour))
		if err != nil || runs != 4 {
			t.Errorf("%v after %d runs, want nil after 4", err, runs)
		}
	})
}

func TestLeadGoesOnThroughOutages(t *testing.T) {
	withClient(t, nil, func(t *testing.T, f *faulty, c *hasp.Client) {
		f.set(down)
		start := time.Now()
		time.AfterFunc(time.Minute, func() { f.set(up) })
		runs := 0
		want(t, "Lead", hasp.Lead(t.Context(), c, "k", func(ctx context.Context, l *hasp.Lease) error {
			if runs++; runs == 2 {
				return nil
			}
			within(t, "Lead, while the store was down for a minute,", start, time.Minute+time.Second)

			// The lease ends at its deadline. A successor cannot have come sooner.
			began := time.Now()
			f.set(down)
			<-ctx.Done()
			want(t, "cause", context.Cause(ctx), hasp.ErrLost)
			within(t, "the end of the context", began, hasp.DefaultTTL)
			time.AfterFunc(time.Minute, func() { f.set(up) })
			return nil
		}), nil)
		if runs != 2 {
			t.Errorf("%d runs, want 2", runs)
		}
	})
}

// A Lock that fails at once, and a Lock that a wrapper bounds, are repeated with pauses. After a
// term of leading, the first pause is short again, however long the outage before was.
func TestLeadPausesBeforeItTriesAgain(t *testing.T) {
	for _, refusal := range []error{errNet, hasp.ErrHeld} {
		withClient(t, nil, func(t *testing.T, f *faulty, c *hasp.Client) {
			start, refused := time.Now(), time.Time{}
			tries, runs := 0, 0
			l := lockerFunc(func(ctx context.Context, key string, opts ...hasp.Option) (*hasp.Lease, error) {
				tries++
				if time.Since(start) < time.Minute || runs == 1 && refused.Sub(start) < time.Minute {
					refused = time.Now()
					return nil, refusal
				}
				return c.Lock(ctx, key, opts...)
			})
			want(t, "Lead", hasp.Lead(t.Context(), l, "k", func(ctx context.Context, _ *hasp.Lease) error {
				if runs++; runs > 1 {
					within(t, "the try after a refusal", refused, 100*time.Millisecond)
					return nil
				}
				within(t, "Lead", start, time.Minute+time.Second)
				if tries < 60 || tries > 130 {
					t.Errorf("%d tries in a minute", tries)
				}
				f.Break(ctx, "k")
				<-ctx.Done()
				return nil
			}), nil)
			if runs != 2 {
				t.Errorf("%d runs", runs)
			}
		})
	}
}

func TestLeadEndsWithItsContext(t *testing.T) {
	boom := errors.New("boom")
	for _, tc := range []struct {
		name  string
		begin func(t *testing.T, f *faulty, rival *hasp.Client)
		wants []error
	}{
		{"waiting", func(t *testing.T, _ *faulty, rival *hasp.Client) { lockNow(t, rival, "k") }, []error{hasp.ErrHeld, boom}},
		{"in an outage", func(_ *testing.T, f *faulty, _ *hasp.Client) { f.set(down) }, []error{boom}},
		{"before a store that hangs", func(_ *testing.T, f *faulty, _ *hasp.Client) {
			f.set(func(f *faulty) { f.acquire = hungFor(10 * time.Second) })
		}, []error{boom}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for after := 20 * time.Second; after < 24*time.Second; after += 170 * time.Millisecond {
				withTwo(t, nil, func(t *testing.T, f *faulty, c, rival *hasp.Client) {
					tc.begin(t, f, rival)
					ctx, cancel := context.WithCancelCause(t.Context())
					var cancelled time.Time
					time.AfterFunc(after, func() { cancelled = time.Now(); cancel(boom) })
					err := hasp.Lead(ctx, c, "k", func(context.Context, *hasp.Lease) error { t.Error("fn ran"); return nil })
					within(t, "the return", cancelled, 50*time.Millisecond)
					want(t, "Lead", err, context.Canceled)
					for _, target := range tc.wants {
						want(t, "Lead", err, target)
					}
					time.Sleep(20 * time.Second) // for calls that hang
				})
			}
		})
	}
}

// An outage that a wrapper reports just as ctx ends does not hide the end of ctx.
func TestLeadWhoseContextEndsWithAnOutage(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	l := lockerFunc(func(context.Context, string, ...hasp.Option) (*hasp.Lease, error) {
		cancel()
		return nil, errNet
	})
	err := hasp.Lead(ctx, l, "k", func(context.Context, *hasp.Lease) error { return nil })
	want(t, "Lead", err, context.Canceled)
	want(t, "Lead", err, errNet)
}
