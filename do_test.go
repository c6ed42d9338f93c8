package hasp_test

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/memlock"
)

// underLock has the calls that run a function while they hold "k".
var underLock = map[string]func(context.Context, hasp.Locker, leaseFn) error{
	"Do": func(ctx context.Context, l hasp.Locker, fn leaseFn) error { return hasp.Do(ctx, l, "k", fn) },
	"DoAll": func(ctx context.Context, l hasp.Locker, fn leaseFn) error {
		return hasp.DoAll(ctx, l, []string{"z", "k", "a"}, func(ctx context.Context, ls *hasp.Leases) error {
			return fn(ctx, ls.All()[1])
		})
	},
	"Lead": func(ctx context.Context, l hasp.Locker, fn leaseFn) error {
		return hasp.Lead(ctx, l, "k", fn, hasp.WithLinger()) // which has no effect
	},
}

func TestResultsOfAFunctionUnderLock(t *testing.T) {
	boom := errors.New("boom")
	for name, do := range underLock {
		runClient(t, name, nil, func(t *bench) {
			call := func(fn leaseFn) error { return do(t.Context(), t.Client, fn) }
			want(t, "fn returned nil", call(func(ctx context.Context, l *hasp.Lease) error {
				if l.Key() != "k" || ctx != l.Context() && name != "DoAll" {
					t.Error("fn did not get the lease and its context")
				}
				return hasp.Do(ctx, t.Client, "k", func(context.Context, *hasp.Lease) error { return nil })
			}), nil)
			if err := call(func(context.Context, *hasp.Lease) error { return boom }); err != boom {
				t.Errorf("got %v, want fn's own error", err)
			}
			want(t, "fn unlocked the lease itself", call(func(ctx context.Context, l *hasp.Lease) error { return l.Unlock(ctx) }), nil)

			for what, end := range map[string]func(){"a panic": func() { panic("oops") }, "Goexit": runtime.Goexit} {
				for _, lost := range []bool{false, true} {
					done := make(chan any)
					go func() {
						defer func() { done <- recover() }()
						call(func(ctx context.Context, _ *hasp.Lease) error {
							if lost {
								t.faulty.Break(ctx, "k")
								<-ctx.Done()
							}
							end()
							return nil
						})
						t.Errorf("%s was swallowed", what)
					}()
					if r := <-done; r != nil && r != "oops" {
						t.Errorf("recovered %v", r)
					}
					if !t.free("k") {
						t.Fatalf("%s left the key locked", what)
					}
				}
			}

			err := call(func(context.Context, *hasp.Lease) error { t.set(down); return boom })
			want(t, "Unlock failed", err, boom)
			want(t, "Unlock failed", err, errNet)
			t.set(up)
		})
	}
}

func TestLockAll(t *testing.T) {
	onBench(t, func(t *bench) {
		keys := []string{"c", "a", "b", "a"}
		ls := await.Value(t.lockAll(keys))
		var got []string
		for _, l := range ls.All() {
			got = append(got, l.Key())
		}
		if !slices.Equal(got, []string{"a", "b", "c"}) || keys[0] != "c" {
			t.Errorf("locked %v of %v", got, keys)
		}
		unlock(t, await.Value(hasp.LockAll(ls.Context(), t.Client, []string{"b", "a"})))

		// WithMaxWait bounds the wait for both keys together.
		first := t.lock("0")
		time.AfterFunc(3*time.Second, func() { unlock(t, first) })
		start := time.Now()
		want(t, "one is held", errOf(t.lockAll([]string{"0", "b"}, hasp.WithMaxWait(5*time.Second))), hasp.ErrHeld)
		if waited := time.Since(start); waited > 5*time.Second+50*time.Millisecond || waited < 4*time.Second {
			t.Errorf("waited %v", waited)
		}
		t.freed("all or none: the first is still held", "0")

		t.faulty.Break(t.Context(), "a")
		<-ls.Context().Done()
		want(t, "cause", context.Cause(ls.Context()), hasp.ErrLost)
		want(t, "Err", ls.Err(), hasp.ErrLost)
		want(t, "Unlock", ls.Unlock(t.Context()), hasp.ErrLost)
		t.freed("it is still held", "a", "b", "c")
		want(t, "no keys", errOf(t.lockAll(nil)), hasp.ErrInvalid)
		want(t, "an empty key", errOf(t.lockAll([]string{"a", ""})), hasp.ErrInvalid)
	})
}

func TestUnlockOfManyLeasesDuringAnOutageTakesTwoTimeouts(t *testing.T) {
	withEnds(t, backend.CancelPrompt, nil, func(t *bench) {
		keys := several(200)
		ls := await.Value(t.lockAll(keys))
		t.onRelease(hung)
		start := time.Now()
		if ls.Unlock(t.Context()) == nil {
			t.Error("no error")
		}
		within(t, "Unlock", start, 2*hasp.DefaultTimeout+50*time.Millisecond)
		t.set(up)
		time.Sleep(2 * hasp.DefaultTimeout)
		t.freed("it is still held", keys...)
	})
}

func TestZeroLeasesHoldNothing(t *testing.T) {
	var ls hasp.Leases
	want(t, "the context has ended", ls.Context().Err(), nil)
	if n, err := len(ls.All()), errors.Join(ls.Err(), ls.Unlock(t.Context())); n != 0 || err != nil {
		t.Errorf("%d leases, %v", n, err)
	}
}

func TestLeadRefusesBadInputAtOnce(t *testing.T) {
	onBench(t, func(t *bench) {
		fn := func(context.Context, *hasp.Lease) error { t.Error("fn ran"); return nil }
		start := time.Now()
		refused := func(key string, fn leaseFn, says string, opts ...hasp.Option) {
			err := hasp.Lead(t.Context(), t.Client, key, fn, opts...)
			want(t, says, err, hasp.ErrInvalid)
			wantCall(t, err, "lead", key)
			if !strings.Contains(err.Error(), says) {
				t.Errorf("got %v, want %q in it", err, says)
			}
		}
		refused("k", nil, "pass the function")
		refused("", fn, "empty key")
		for says, opts := range map[string]options{
			"bound that instead": {hasp.WithMaxWait(time.Second), hasp.WithMaxWait(0)},
			"several would lead": {hasp.WithShared(), hasp.WithSlots(2)},
			"below":              {hasp.WithTTL(time.Millisecond)},
		} {
			for _, o := range opts {
				refused("k", fn, says, o)
			}
		}
		if a := t.attempts(); a != 0 || time.Since(start) != 0 {
			t.Errorf("%d attempts, %v", a, time.Since(start))
		}
		t.Client.Close()
		want(t, "closed", hasp.Lead(t.Context(), t.Client, "k", fn), hasp.ErrClosed)
	})
	synctest.Test(t, func(t *testing.T) {
		c := opened(t, &bulk{Driver: memlock.NewDriver().(Driver)}, nil)
		err := hasp.Lead(t.Context(), c, "k", func(context.Context, *hasp.Lease) error { return nil }, hasp.WithFence())
		want(t, "no fences", err, errors.ErrUnsupported)
	})
}

// After each loss of the lease, fn runs again, whatever it has returned.
func TestLeadCompetesAgainAfterALoss(t *testing.T) {
	onBench(t, func(t *bench) {
		var runs int
		var last uint64
		var returned time.Time
		inside := false
		err := hasp.Lead(t.Context(), t.Client, "k", func(ctx context.Context, l *hasp.Lease) error {
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
				t.set(down)
				<-ctx.Done()
				want(t, "cause", context.Cause(ctx), hasp.ErrLost)
				t.set(up)
				return nil
			case 2: // a max hold makes leaders take turns
				<-ctx.Done()
				want(t, "cause", context.Cause(ctx), hasp.ErrLost)
				return errors.New("of a term that was lost")
			case 3:
				// Ignore the context, and run beside the next leader.
				t.faulty.Break(ctx, "k")
				time.Sleep(3 * hasp.DefaultTTL)
				unlock(t, t.lock("k", hasp.WithMaxWait(0)))
				return nil
			}
			return nil
		}, hasp.WithFence(), hasp.WithMaxHold(time.Hour))
		if err != nil || runs != 4 {
			t.Errorf("%v after %d runs, want nil after 4", err, runs)
		}
	})
}

// Lead pauses before it repeats a Lock that failed, even if Lock fails immediately, or with the
// ErrHeld of a wrapper that calls TryLock, which makes one attempt. Once it has led, the first pause is short again, however long the outage
// before was.
func TestLeadPausesBeforeItTriesAgain(t *testing.T) {
	for _, refusal := range []error{errNet, hasp.ErrHeld} {
		withTwo(t, nil, func(t *bench, rival *hasp.Client) {
			start, refused := time.Now(), time.Time{}
			taken := lockNow(t, rival, "k")
			time.AfterFunc(time.Minute, func() { unlock(t, taken) })
			tries, runs := 0, 0
			l := lockerFunc(func(ctx context.Context, key string, opts ...hasp.Option) (*hasp.Lease, error) {
				tries++
				began := time.Now()
				l, err := t.TryLock(ctx, key, opts...)
				within(t, "TryLock", began, 0)
				if err == nil {
					return l, nil
				}
				refused = began
				if runs == 1 {
					unlock(t, taken)
				}
				return nil, refusal
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
				t.faulty.Break(ctx, "k")
				taken = lockNow(t, rival, "k")
				<-ctx.Done()
				return nil
			}), nil)
			equal(t, "runs", runs, 2)
		})
	}
}

func TestLeadEndsWithItsContext(t *testing.T) {
	boom := errors.New("boom")
	for _, tc := range []struct {
		name  string
		begin func(t *bench, rival *hasp.Client)
		wants []error
	}{
		{"waiting", func(t *bench, rival *hasp.Client) { lockNow(t, rival, "k") }, []error{hasp.ErrHeld, boom}},
		{"in an outage", func(t *bench, _ *hasp.Client) { t.set(down) }, []error{boom}},
		{"before a store that hangs", func(t *bench, _ *hasp.Client) {
			t.onAcquire(hungFor(10 * time.Second))
		}, []error{boom}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for after := 20 * time.Second; after < 24*time.Second; after += 170 * time.Millisecond {
				withTwo(t, nil, func(t *bench, rival *hasp.Client) {
					tc.begin(t, rival)
					ctx, cancel := context.WithCancelCause(t.Context())
					var cancelled time.Time
					time.AfterFunc(after, func() { cancelled = time.Now(); cancel(boom) })
					err := hasp.Lead(ctx, t.Client, "k", func(context.Context, *hasp.Lease) error { t.Error("fn ran"); return nil })
					within(t, "the return", cancelled, 50*time.Millisecond)
					want(t, "Lead", err, context.Canceled)
					for _, target := range tc.wants {
						want(t, "Lead", err, target)
					}
					time.Sleep(20 * time.Second) // until calls that hang have ended
				})
			}
		})
	}
}

// If ctx ends just before a wrapper reports an outage, the error matches the outage and ctx.Err().
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
