package hasp_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync/atomic"
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

// wantOutage fails the test unless err matches ErrUnavailable and all errors in also, and no other
// error that a caller tests for.
func wantOutage(t testing.TB, what string, err error, also ...error) {
	t.Helper()
	for _, target := range append(also, hasp.ErrUnavailable) {
		want(t, what, err, target)
	}
	for _, k := range kinds {
		if errors.Is(err, k) {
			t.Errorf("%s: %v matches ErrUnavailable and %v", what, err, k)
		}
	}
	if ended := errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded); ended && len(also) < 2 {
		t.Errorf("%s: %v matches a context's error", what, err)
	}
}

// wantOnly fails the test unless err matches target, and not ErrUnavailable.
func wantOnly(t testing.TB, what string, err, target error) {
	t.Helper()
	want(t, what, err, target)
	if errors.Is(err, hasp.ErrUnavailable) {
		t.Errorf("%s: %v matches ErrUnavailable", what, err)
	}
}

// inspected is a faulty driver whose Inspect and Break fail with err.
type inspected struct {
	*faulty
	err error
}

func (d inspected) Inspect(context.Context, string) (backend.Status, error) {
	return backend.Status{}, d.err
}

func (d inspected) Break(context.Context, string) error { return d.err }

// everyEnd has all values of Traits.Cancellation, because the engine makes its calls differently
// for each.
var everyEnd = []backend.Cancellation{backend.CancelNone, backend.CancelByDeadline, backend.CancelPrompt}

// In every call, each error of a driver that is not definite is an outage. The driver need not mark
// it, and its error stays wrapped.
func TestEveryFailureOfTheStoreIsUnavailable(t *testing.T) {
	for _, ends := range everyEnd {
		for _, err := range []error{
			errNet,
			errors.New("OOM command not allowed when used memory > 'maxmemory'"),
			fmt.Errorf("dial: %w", context.DeadlineExceeded), // like a timeout of package net
			&backend.UnavailableError{Since: time.Now(), Err: errNet},
		} {
			synctest.Test(t, func(t *testing.T) {
				f := newFaulty()
				f.ends = ends
				c := opened(t, inspected{f, err}, nil)
				l := lockNow(t, c, "held")
				f.set(func(f *faulty) { failWith(f, err) })

				text := err.Error()
				for what, got := range map[string]error{
					"Lock":                   errOf(c.Lock(t.Context(), "k")),
					"Lock with a bound":      errOf(c.Lock(t.Context(), "k", hasp.WithMaxWait(time.Second))),
					"TryLock":                errOf(c.TryLock(t.Context(), "k")),
					"Extend, outcome open":   l.Extend(t.Context(), time.Minute),
					"Inspect":                errOf(c.Inspect(t.Context(), "k")),
					"Break":                  c.Break(t.Context(), "k"),
					"Unlock, outcome open":   l.Unlock(t.Context()),
					"Unlock again, the same": l.Unlock(t.Context()),
				} {
					wantOutage(t, what, got)
					if !isTimeout(err) {
						want(t, what, got, err)
					}
					var e *hasp.Error
					if !errors.As(got, &e) || len(e.Err.Error()) < len(text) || e.Err.Error()[:len(text)] != text {
						t.Errorf("%s: %q, want the text of the driver's error", what, got)
					}
				}
			})
		}
	}
}

// isTimeout reports whether err is a timeout of the network that matches a context's error. The
// engine keeps only the text of such an error.
func isTimeout(err error) bool { return errors.Is(err, context.DeadlineExceeded) }

// A store that does not answer is unavailable, even if WithMaxWait ends the wait.
func TestSilenceIsUnavailable(t *testing.T) {
	for _, ends := range everyEnd {
		withEnds(t, ends, nil, func(t *bench) {
			l := t.lock("held")
			t.set(func(f *faulty) { f.acquire, f.renew, f.release = hung, untilEnd, hung })
			wantOutage(t, "Lock", t.lockErr("k"))
			wantOutage(t, "Lock with a bound", t.lockErr("k", hasp.WithMaxWait(20*time.Millisecond)))
			wantOutage(t, "TryLock", t.tryErr("k"))
			wantOutage(t, "Extend", l.Extend(t.Context(), time.Minute))
			start := time.Now()
			wantOutage(t, "Unlock", l.Unlock(t.Context()))
			within(t, "Unlock", start, hasp.DefaultTimeout+50*time.Millisecond)
		})
	}
}

func TestEndOfTheContextBeforeTheStoreFailedIsNotUnavailable(t *testing.T) {
	for _, ends := range everyEnd {
		withEnds(t, ends, nil, func(t *bench) {
			l := t.lock("held")
			t.set(func(f *faulty) { f.acquire, f.renew = hung, untilEnd })
			short := func() context.Context {
				ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
				t.Cleanup(cancel)
				return ctx
			}
			wantOnly(t, "Lock", errOf(t.Lock(short(), "k")), context.DeadlineExceeded)
			wantOnly(t, "TryLock", errOf(t.TryLock(short(), "k")), context.DeadlineExceeded)
			wantOnly(t, "Extend", l.Extend(short(), time.Minute), context.DeadlineExceeded)

			// The cause is the caller's own error, so it decides nothing, whatever it matches.
			for _, cause := range []error{errors.New("enough"), hasp.ErrUnavailable, fmt.Errorf("stop: %w", context.Canceled)} {
				ended, cancel := context.WithCancelCause(t.Context())
				cancel(cause)
				err := errOf(t.Lock(ended, "k"))
				wantOnly(t, "Lock with a context that has ended", err, context.Canceled)
				if cause != hasp.ErrUnavailable {
					want(t, "its cause", err, cause)
				}
			}
			t.set(up)
			unlock(t, l)
		})
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
					last[0] = hasp.ErrUnavailable // the second call may fail as well before the context ends
					onlyOnce(t.faulty, func(q *call) error {
						t.onAcquire(then)
						return errNet
					})
				}
				ctx := timeout(t, t.Context(), hasp.DefaultTimeout/2)
				inLine := make(chan error)
				time.AfterFunc(time.Millisecond, func() { inLine <- errOf(t.Lock(ctx, "k")) })
				wantOutage(t, "Lock", errOf(t.Lock(ctx, "k")), last...)
				wantOutage(t, "Lock in line", <-inLine, last...)
			})
		}
	}
}

// The cause of a context is the caller's own error, and decides nothing. A Lock whose context had
// ended before returns the context's error, and not the last refusal.
func TestDefiniteErrorsAreNotUnavailable(t *testing.T) {
	withClient(t, nil, func(t *bench) {
		l := t.lock("k")
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Second, hasp.ErrUnavailable)
		defer cancel()
		want(t, "held", errOf(t.Lock(ctx, "k")), hasp.ErrHeld)
		var held *backend.HeldError
		if err := errOf(t.Lock(ctx, "k")); errors.As(err, &held) {
			t.Errorf("%v, want the context's error", err)
		}
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

// causing returns the cause of a context that ends during a call, as net/http does. Its calls reach
// the store, and hang if the field hangs is set.
type causing struct {
	*faulty
	hangs *atomic.Bool
}

func (d causing) Acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	g, err := d.Driver.Acquire(ctx, c)
	if d.hangs.Load() && err == nil {
		<-ctx.Done()
		return backend.Grant{}, fmt.Errorf("get: %w", context.Cause(ctx))
	}
	return g, err
}

func (d causing) Renew(ctx context.Context, cs []backend.Claim, done func(int, backend.Grant, error)) {
	if !d.hangs.Load() {
		d.faulty.Renew(ctx, cs, done)
		return
	}
	<-ctx.Done()
	done(0, backend.Grant{}, fmt.Errorf("put: %w", context.Cause(ctx)))
}

// waitsAndCauses is a Waiter, which leaves its place in the queue to the engine.
type waitsAndCauses struct{ causing }

func (d waitsAndCauses) Wait(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	d.set(func(f *faulty) { f.acquired = append(f.acquired, c.Token) })
	<-ctx.Done()
	return backend.Grant{}, fmt.Errorf("get: %w", context.Cause(ctx))
}

// The loss of an outer lease is no answer of the store about the key of an inner call: a key that
// the call has taken is freed, a lease that it renews goes on, and a place in a queue is given up.
func TestACallThatReturnsItsCause(t *testing.T) {
	for _, call := range []string{"Lock", "Wait", "Extend", "Detach", "Resume"} {
		runBubble(t, call, func(t *testing.T) {
			f := newFaulty()
			f.ends = backend.CancelPrompt
			hangs := new(atomic.Bool)
			var d backend.Driver = causing{f, hangs}
			if call == "Wait" {
				d = waitsAndCauses{causing{f, hangs}}
			}
			c := await.Value(hasp.New(d, &hasp.Options{Timeout: 4 * time.Second}))
			elsewhere := opened(t, memlock.NewDriver(), nil)   // has the outer lock
			other := opened(t, &faulty{Driver: f.Driver}, nil) // takes the inner key without trouble

			outer := lockNow(t, elsewhere, "outer")
			ctx := outer.Context()
			var inner *hasp.Lease
			var err error
			ended := make(chan struct{})
			begin := func(run func()) {
				hangs.Store(true)
				go func() { defer close(ended); run() }()
				time.Sleep(time.Second)
			}
			switch call {
			case "Lock":
				begin(func() { _, err = c.Lock(ctx, "inner") })
			case "Wait":
				inner = lockNow(t, other, "inner")
				begin(func() { _, err = c.Lock(ctx, "inner") })
			case "Extend", "Detach":
				inner = await.Value(c.Lock(context.Background(), "inner"))
				begin(func() {
					if err = inner.Extend(ctx, time.Minute); call == "Detach" {
						_, err = inner.Detach(ctx, time.Minute)
					}
				})
			case "Resume":
				x := detachNow(t, lockNow(t, other, "inner"), time.Minute)
				begin(func() { _, err = c.Resume(ctx, x) })
			}
			await.Must(t, elsewhere.Break(t.Context(), "outer"))
			<-ended
			hangs.Store(false)
			want(t, call, err, context.Canceled)
			synctest.Wait()
			switch call {
			case "Lock":
				(&bench{t, f, c}).freed("the key of the failed Lock is held", "inner")
			case "Wait":
				time.Sleep(10 * time.Second)
				f.set(func(f *faulty) {
					place := f.acquired[len(f.acquired)-1]
					if !slices.Contains(f.released, place) {
						t.Error("the place in the queue was not given up")
					}
				})
				unlock(t, inner)
			case "Extend", "Detach":
				want(t, "the lease, which the store has", inner.Err(), nil)
				unlock(t, inner)
			case "Resume":
				if (&bench{t, f, c}).free("inner") {
					t.Error("the hold of the handle was released")
				}
			}
			c.Close()
		})
	}
}

// A first call over a connection that a firewall has forgotten gets no answer. Lock, and also TryLock
// and a Lock with WithMaxWait, ask again within Timeout.
func TestAnAttemptWithoutAnAnswerIsRepeated(t *testing.T) {
	for name, lock := range map[string]func(context.Context, *hasp.Client) (*hasp.Lease, error){
		"Lock":    func(ctx context.Context, c *hasp.Client) (*hasp.Lease, error) { return c.Lock(ctx, "k") },
		"TryLock": func(ctx context.Context, c *hasp.Client) (*hasp.Lease, error) { return c.TryLock(ctx, "k") },
		"WithMaxWait(0)": func(ctx context.Context, c *hasp.Client) (*hasp.Lease, error) {
			return c.Lock(ctx, "k", hasp.WithMaxWait(0))
		},
		"WithMaxWait(2s)": func(ctx context.Context, c *hasp.Client) (*hasp.Lease, error) {
			return c.Lock(ctx, "k", hasp.WithMaxWait(2*time.Second))
		},
		"TryLock of a slot": func(ctx context.Context, c *hasp.Client) (*hasp.Lease, error) {
			return c.TryLock(ctx, "k", hasp.WithSlots(1))
		},
	} {
		for _, ends := range everyEnd {
			runEnds(t, fmt.Sprint(name, " ", ends), ends, nil, func(t *bench) {
				onlyOnce(t.faulty, hung)
				began := time.Now()
				l, err := lock(t.Context(), t.Client)
				await.Must(t, err)
				within(t, name, began, hasp.DefaultTimeout/2)
				unlock(t, l)

				t.onAcquire(hung)
				began = time.Now()
				want(t, "during an outage", errOf(lock(t.Context(), t.Client)), hasp.ErrUnavailable)
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
		failed := make(chan error)
		go func() { failed <- t.lockErr("k") }()
		synctest.Wait()
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
	try := func(ctx context.Context, o func(context.Context, hasp.Config) (backend.Driver, error)) error {
		zone = o
		return errOf(hasp.Open(ctx, "zone://?timeout=1s", nil))
	}
	hang := func(ctx context.Context, _ hasp.Config) (backend.Driver, error) {
		<-ctx.Done()
		return nil, fmt.Errorf("ping: %w", ctx.Err())
	}
	refuse := func(context.Context, hasp.Config) (backend.Driver, error) { return nil, errNet }

	synctest.Test(t, func(t *testing.T) {
		wantOutage(t, "refused", try(t.Context(), refuse), errNet)
		wantOutage(t, "silent", try(t.Context(), hang))
		ctx := timeout(t, t.Context(), time.Millisecond)
		wantOnly(t, "a short deadline", try(ctx, hang), context.DeadlineExceeded)
		wantOnly(t, "a short deadline of a connection", try(ctx, func(context.Context, hasp.Config) (backend.Driver, error) {
			return nil, fmt.Errorf("read: %w", os.ErrDeadlineExceeded)
		}), context.DeadlineExceeded)
		wantOutage(t, "refused, then ended", try(ctx, refuse), errNet, context.DeadlineExceeded)
		wantOnly(t, "a bad parameter", try(t.Context(), func(_ context.Context, c hasp.Config) (backend.Driver, error) {
			return nil, fmt.Errorf("%w: size", hasp.ErrInvalid)
		}), hasp.ErrInvalid)
		want(t, "no such strategy", errOf(hasp.Open(t.Context(), "nosuch://", nil)), hasp.ErrInvalid)
	})
}
