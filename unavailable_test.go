package hasp_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
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

// kinds are the errors that a caller tests for, except ErrUnavailable.
var kinds = []error{hasp.ErrHeld, hasp.ErrLost, hasp.ErrReleased, hasp.ErrClosed, hasp.ErrInvalid, errors.ErrUnsupported}

// wantOnly fails the test unless err matches all targets, and no other error that a caller tests
// for.
func wantOnly(t testing.TB, what string, err error, targets ...error) {
	t.Helper()
	for _, target := range targets {
		want(t, what, err, target)
	}
	for _, k := range append(kinds, hasp.ErrUnavailable, context.Canceled, context.DeadlineExceeded) {
		if errors.Is(err, k) && !slices.Contains(targets, k) {
			t.Errorf("%s: %v also matches %v", what, err, k)
		}
	}
}

// wantOutage fails the test unless err matches ErrUnavailable and all errors in also, and no other
// error that a caller tests for.
func wantOutage(t testing.TB, what string, err error, also ...error) {
	t.Helper()
	wantOnly(t, what, err, append(also, hasp.ErrUnavailable)...)
}

// refusal returns the details of an err that says that a key is held.
func refusal(t testing.TB, err error) (held *backend.HeldError) {
	t.Helper()
	if !errors.As(err, &held) {
		t.Fatalf("got %v, want a HeldError", err)
	}
	return held
}

// wantCall fails the test unless err says that it is of the call op for key.
func wantCall(t testing.TB, err error, op, key string) {
	t.Helper()
	var e *hasp.Error
	if !errors.As(err, &e) || e.Op != op || e.Key != key {
		t.Errorf("got %#v, want an error of %s %q", err, op, key)
	}
}

// between fails the test unless got is least, most, or between them.
func between[T cmp.Ordered](t testing.TB, what string, got, least, most T) {
	t.Helper()
	if got < least || got > most {
		t.Errorf("%s: got %v, want %v to %v", what, got, least, most)
	}
}

// everyEnd has all values of Traits.Cancellation, because the engine makes its calls differently
// for each.
var everyEnd = []backend.Cancellation{backend.CancelNone, backend.CancelByDeadline, backend.CancelPrompt}

// In every call, each error of a driver that is not definite is an outage, and so is silence. The
// driver need not mark its error, which stays wrapped.
func TestEveryFailureOfTheStoreIsUnavailable(t *testing.T) {
	silence := errors.New("stands for no answer")
	for _, ends := range everyEnd {
		for _, err := range []error{
			silence,
			errNet,
			errors.New("OOM command not allowed when used memory > 'maxmemory'"),
			fmt.Errorf("dial: %w", context.DeadlineExceeded), // like a timeout of package net
			&backend.UnavailableError{Since: time.Now(), Err: errNet},
		} {
			withEnds(t, ends, nil, func(t *bench) {
				l := t.lock("held")
				t.set(func(f *faulty) {
					failWith(f, err)
					f.inspect = failing(err)
					if err == silence {
						f.acquire, f.renew, f.release = hung, untilEnd, hung
					}
				})

				extended := l.Extend(t.Context(), time.Minute)
				start := time.Now()
				unlocked := l.Unlock(t.Context())
				within(t, "Unlock", start, hasp.DefaultTimeout+50*time.Millisecond)
				for what, got := range map[string]error{
					"Lock":                   t.lockErr("k"),
					"Lock with a bound":      t.lockErr("k", hasp.WithMaxWait(20*time.Millisecond)),
					"TryLock":                t.tryErr("k"),
					"Extend, outcome open":   extended,
					"Inspect":                errOf(t.Client.Inspect(t.Context(), "k")),
					"Break":                  t.Client.Break(t.Context(), "k"),
					"Unlock, outcome open":   unlocked,
					"Unlock again, the same": l.Unlock(t.Context()),
				} {
					wantOutage(t, what, got)
					if err == silence {
						continue
					}
					if !errors.Is(err, context.DeadlineExceeded) { // the engine keeps only the text of that error
						want(t, what, got, err)
					}
					var e *hasp.Error
					if !errors.As(got, &e) || !strings.HasPrefix(e.Err.Error(), err.Error()) {
						t.Errorf("%s: %q, want the text of the driver's error", what, got)
					}
				}
			})
		}
	}
}

// If the store failed before the context ended, the error says both, also to callers in line.
func TestEndOfTheContextAfterTheStoreFailedIsBoth(t *testing.T) {
	for _, ends := range everyEnd {
		for _, then := range []hook{nil, hung} {
			withEnds(t, ends, nil, func(t *bench) {
				t.acquire = failing(errNet)
				last := []error{errNet, context.DeadlineExceeded}
				if then != nil { // the store fails once, and then hangs for longer than Timeout/3
					last = last[1:] // the second call may fail as well before the context ends
					onlyOnce(t.faulty, func(q *call) error {
						t.onAcquire(then)
						return errNet
					})
				}
				ctx := timeout(t, t.Context(), hasp.DefaultTimeout/2)
				head, next := t.lockLater(ctx), t.lockLater(ctx)
				wantOutage(t, "Lock", <-head, last...)
				wantOutage(t, "Lock in line", <-next, last...)
			})
		}
	}
}

// The cause of a context is the caller's own error, and decides nothing, whatever it matches. A
// Lock whose context had ended before returns the context's error, and not the last refusal.
func TestCauseOfAContextDecidesNothing(t *testing.T) {
	onBench(t, func(t *bench) {
		l := t.lock("k")
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Second, hasp.ErrUnavailable)
		defer cancel()
		wantOnly(t, "held", errOf(t.Lock(ctx, "k")), hasp.ErrHeld, context.DeadlineExceeded)
		wantOnly(t, "ended", errOf(t.Lock(ctx, "k")), context.DeadlineExceeded)

		ended, stop := context.WithCancelCause(t.Context())
		stop(fmt.Errorf("stop: %w", context.Canceled))
		wantOnly(t, "a cause that is a context's error", errOf(t.Lock(ended, "k")), context.Canceled, context.Cause(ended))
		unlock(t, l)
	})
}

// While the store is down, the outer lease is lost, which ends the Lock inside it. The error
// matches ErrLost, and so it does not match ErrUnavailable. errors.As still finds the details.
func TestLossOfTheOuterLeaseIsNotUnavailable(t *testing.T) {
	withClient(t, &hasp.Options{TTL: time.Second, Timeout: time.Minute}, func(t *bench) {
		outer := t.lock("outer")
		t.set(func(f *faulty) { failWith(f, &backend.UnavailableError{Err: errNet}) })
		err := errOf(t.Lock(outer.Context(), "inner"))
		want(t, "Lock", err, hasp.ErrLost)
		want(t, "Lock", err, errNet)
		var out *backend.UnavailableError
		if !errors.As(err, &out) {
			t.Errorf("%v: its details are hidden", err)
		}
		t.set(up)
	})
}

// The loss of an outer lease is no answer of the store about the key of an inner call, even if a
// driver returns the cause of its context's end, as net/http does: a key that the call has taken is
// freed, a lease that it renews goes on, and a place in a queue is given up.
func TestACallThatReturnsItsCause(t *testing.T) {
	for name, try := range map[string]func(t robbed){
		"Lock": func(t robbed) {
			t.fails(func(ctx context.Context) error { return errOf(t.Lock(ctx, "inner")) })
			t.freed("the key of the failed Lock is held", "inner")
		},
		"Wait": func(t robbed) {
			l := lockNow(t, t.other, "inner")
			t.fails(func(ctx context.Context) error { return errOf(t.Lock(ctx, "inner")) })
			time.Sleep(10 * time.Second)
			t.set(func(f *faulty) {
				if place := f.acquired[len(f.acquired)-1]; !slices.Contains(f.released, place) {
					t.Error("the place in the queue was not given up")
				}
			})
			unlock(t, l)
		},
		"Extend": func(t robbed) {
			l := t.lock("inner")
			t.fails(func(ctx context.Context) error { return l.Extend(ctx, time.Minute) })
			unlock(t, l)
		},
		"Resume": func(t robbed) {
			x := detachNow(t, lockNow(t, t.other, "inner"), time.Minute)
			t.fails(func(ctx context.Context) error { return errOf(t.Resume(ctx, x)) })
			if t.free("inner") {
				t.Error("the hold of the handle was released")
			}
		},
	} {
		runBubble(t, name, func(t *testing.T) {
			store := new(memlock.Store)
			elsewhere := opened(t, memlock.NewDriver(), nil)
			outer := lockNow(t, elsewhere, "outer")

			hangs := func(q *call) error {
				<-q.ctx.Done()
				return fmt.Errorf("get: %w", context.Cause(q.ctx))
			}
			d := hooked{traits: inNoOrder, wait: hangs}.over(store)
			b := &bench{t, d.faulty, opened(t, d, nil)}
			try(robbed{b, opened(t, store.Driver(), nil), func(inner func(context.Context) error) {
				b.set(func(f *faulty) {
					f.renew = hangs
					f.acquire = func(q *call) error {
						if err := q.send(); err != nil {
							return err
						}
						return hangs(q)
					}
				})
				failed := soon(func() error { return inner(outer.Context()) })
				await.Must(t, elsewhere.Break(t.Context(), "outer"))
				want(t, "the call", <-failed, context.Canceled)
				b.set(up)
				synctest.Wait()
			}})
		})
	}
}

// robbed is a bench whose inner calls lose the lease around them.
type robbed struct {
	*bench
	other *hasp.Client                               // another Client of the same store
	fails func(call func(ctx context.Context) error) // makes a call that hangs, and ends with the loss of the outer lease
}

// A first call over a connection that a firewall has forgotten gets no answer. Lock, and also TryLock
// and a Lock with WithMaxWait, ask again within Timeout.
func TestAnAttemptWithoutAnAnswerIsRepeated(t *testing.T) {
	for name, opts := range map[string]options{
		"Lock":              nil,
		"WithMaxWait(0)":    {hasp.WithMaxWait(0)},
		"WithMaxWait(2s)":   {hasp.WithMaxWait(2 * time.Second)},
		"TryLock":           nil,
		"TryLock of a slot": {oneSlot},
	} {
		for _, ends := range everyEnd {
			runEnds(t, fmt.Sprint(name, " ", ends), ends, nil, func(t *bench) {
				lock := t.Lock
				if strings.HasPrefix(name, "TryLock") {
					lock = t.TryLock
				}
				onlyOnce(t.faulty, hung)
				began := time.Now()
				l, err := lock(t.Context(), "k", opts...)
				await.Must(t, err)
				within(t, name, began, hasp.DefaultTimeout/2)
				unlock(t, l)

				t.onAcquire(hung)
				began = time.Now()
				want(t, "during an outage", errOf(lock(t.Context(), "k", opts...)), hasp.ErrUnavailable)
				within(t, "an outage", began, hasp.DefaultTimeout+200*time.Millisecond)
			})
		}
	}
}

// The outage of a Lock that waited behind an Unlock counts from the start of that Unlock.
func TestLockBehindAnUnlockThatHangs(t *testing.T) {
	withEnds(t, backend.CancelPrompt, nil, func(t *bench) {
		l := t.lock("k", hasp.WithFence())
		t.set(func(f *faulty) { f.release, f.acquire = hung, hung })
		began := time.Now()
		failed := t.lockLater(t.Context())
		want(t, "Unlock", l.Unlock(t.Context()), hasp.ErrUnavailable)
		wantOutage(t, "Lock", <-failed)
		within(t, "Lock", began, hasp.DefaultTimeout+time.Second)
	})
}

// zone opens the strategy "zone"; each test sets it.
var zone func(context.Context, hasp.Config) (backend.Driver, error)

func init() {
	hasp.Register("zone", func(ctx context.Context, c hasp.Config) (backend.Driver, error) { return zone(ctx, c) })
}

// Open reports an outage and the end of its context as the calls of a Client do.
func TestOpenOfAnUnavailableStore(t *testing.T) {
	for what, tc := range map[string]struct {
		err  error         // of the opener; nil if it waits for the end of its context
		ends time.Duration // when the context of Open ends, before the opener returns; 0 if it does not end
		is   []error
	}{
		"refused":             {err: errNet, is: []error{hasp.ErrUnavailable, errNet}},
		"silent":              {is: []error{hasp.ErrUnavailable}},
		"a short deadline":    {ends: 1, is: []error{context.DeadlineExceeded}},
		"of a connection":     {err: fmt.Errorf("read: %w", os.ErrDeadlineExceeded), ends: 1, is: []error{context.DeadlineExceeded}},
		"refused, then ended": {err: errNet, ends: 1, is: []error{hasp.ErrUnavailable, errNet, context.DeadlineExceeded}},
		"with a hint":         {err: fmt.Errorf("ping: %w (is it up?)", context.DeadlineExceeded), is: []error{hasp.ErrUnavailable}},
		"a bad parameter":     {err: fmt.Errorf("%w: size", hasp.ErrInvalid), is: []error{hasp.ErrInvalid}},
	} {
		synctest.Test(t, func(t *testing.T) {
			zone = func(ctx context.Context, _ hasp.Config) (backend.Driver, error) {
				if tc.err != nil && tc.ends == 0 {
					return nil, tc.err
				}
				<-ctx.Done()
				return nil, cmp.Or(tc.err, fmt.Errorf("ping: %w", ctx.Err()))
			}
			ctx := t.Context()
			if tc.ends > 0 {
				ctx = timeout(t, ctx, tc.ends)
			}
			err := errOf(hasp.Open(ctx, "zone://?timeout=1s", nil))
			wantOnly(t, what, err, tc.is...)
			if strings.Contains(err.Error(), "): no answer") {
				t.Errorf("%v: says twice that there was no answer", err)
			}
		})
	}
}
