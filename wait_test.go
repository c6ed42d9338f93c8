package hasp_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/memlock"
)

// heldByAnother makes a stranger hold "k" in the store of f. It returns f.
func heldByAnother(t testing.TB, f *faulty, ttl time.Duration) *faulty {
	t.Helper()
	stranger := backend.Claim{Key: "k", Token: "stranger", Owner: "stranger", TTL: ttl}
	await.Must(t, errOf(f.Driver.Acquire(t.Context(), stranger)))
	return f
}

// hooked is a driver in memory with the given traits, and with hooks that may be nil.
type hooked struct {
	Driver
	traits                 backend.Traits
	acquire, wait, release hook
}

func (d *hooked) Traits() backend.Traits { return d.traits }

func (d *hooked) Acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	return d.acquire.run(ctx, c, func() (backend.Grant, error) { return d.Driver.Acquire(ctx, c) })
}

func (d *hooked) Wait(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	return d.wait.run(ctx, c, func() (backend.Grant, error) { return d.Driver.Wait(ctx, c) })
}

func (d *hooked) Release(ctx context.Context, c backend.Claim) error {
	_, err := d.release.run(ctx, c, func() (g backend.Grant, err error) {
		return g, d.Driver.Release(ctx, c)
	})
	return err
}

// These are the traits of two Waiters over a network. Only the first one is Ordered.
var (
	inOrderOfArrival = backend.Traits{Ordered: true, Fenced: true, Shared: true, Reach: backend.Network, Cancellation: backend.CancelPrompt}
	inNoOrder        = backend.Traits{Reach: backend.Network, Cancellation: backend.CancelPrompt}
)

// withRival runs a test in a bubble, with a Client c over d, whose store is in memory. Another
// Client of the same store holds "k" by the lease rival.
func withRival(t *testing.T, d hooked, run func(t *bench, rival *hasp.Lease)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		store := new(memlock.Store)
		d.Driver = store.Driver().(Driver)
		c, other := opened(t, &d, nil), opened(t, store.Driver(), nil)
		run(&bench{T: t, Client: c}, lockNow(t, other, "k"))
	})
}

func TestErrorsOfAWait(t *testing.T) {
	cause := errors.New("shutting down")
	hung := func(f *faulty) { f.acquire = hung }
	for _, tc := range []struct {
		name     string
		store    func(*faulty)
		deadline time.Duration // deadline of the context; 0 if there is none
		cancel   time.Duration // when the context is cancelled; 0 if it is not; below 0 if it was cancelled before
		opts     []hasp.Option
		within   time.Duration
		atLeast  time.Duration
		is       []error
		isNot    []error
	}{
		{name: "held, max wait", opts: options{hasp.WithMaxWait(5 * time.Second)},
			within: 5 * time.Second, atLeast: 4900 * time.Millisecond, is: []error{hasp.ErrHeld}, isNot: []error{context.DeadlineExceeded}},
		{name: "held, deadline", deadline: 5 * time.Second,
			within: 5050 * time.Millisecond, atLeast: 5 * time.Second, is: []error{hasp.ErrHeld, context.DeadlineExceeded}},
		{name: "held, cancelled with a cause", cancel: time.Second,
			within: 1050 * time.Millisecond, atLeast: time.Second, is: []error{hasp.ErrHeld, context.Canceled, cause}},
		{name: "held, one attempt", opts: options{hasp.WithMaxWait(0)},
			within: time.Millisecond, is: []error{hasp.ErrHeld}},
		{name: "refused", store: down,
			within: 3500 * time.Millisecond, atLeast: hasp.DefaultTimeout, is: []error{errNet}, isNot: []error{hasp.ErrHeld}},
		{name: "refused, max wait", store: down, opts: options{hasp.WithMaxWait(time.Second)},
			within: time.Second, is: []error{errNet}, isNot: []error{hasp.ErrHeld}},
		{name: "refused, deadline", store: down, deadline: time.Second,
			within: 1050 * time.Millisecond, is: []error{errNet, context.DeadlineExceeded}, isNot: []error{hasp.ErrHeld}},
		{name: "hung", store: hung,
			within: 3500 * time.Millisecond, atLeast: hasp.DefaultTimeout, isNot: []error{hasp.ErrHeld, context.DeadlineExceeded}},
		{name: "hung, max wait", store: hung, opts: options{hasp.WithMaxWait(time.Second)},
			within: 1050 * time.Millisecond, atLeast: time.Second, isNot: []error{hasp.ErrHeld, context.DeadlineExceeded}},
		{name: "held, then hung, max wait", store: func(f *faulty) {
			began := time.Now()
			f.acquire = func(q *call) error {
				if time.Since(began) > 990*time.Millisecond {
					time.Sleep(time.Hour)
				}
				return q.send()
			}
		}, opts: options{hasp.WithMaxWait(time.Second)},
			within: 1060 * time.Millisecond, atLeast: time.Second},
		{name: "hung, cancelled", store: hung, cancel: time.Second,
			within: 1050 * time.Millisecond, atLeast: time.Second, is: []error{context.Canceled}, isNot: []error{hasp.ErrHeld}},
		{name: "cancelled before", cancel: -1,
			is: []error{context.Canceled, cause}, isNot: []error{hasp.ErrHeld}},
		{name: "unsupported", store: func(f *faulty) { f.acquire = failing(errors.ErrUnsupported) },
			is: []error{errors.ErrUnsupported}},
	} {
		for _, ends := range everyEnd {
			runEnds(t, fmt.Sprint(tc.name, " ", ends), ends, nil, func(t *bench) {
				heldByAnother(t, t.faulty, time.Hour)
				if tc.store != nil {
					t.set(tc.store)
				}
				ctx, cancel := context.WithCancelCause(t.Context())
				switch {
				case tc.cancel > 0:
					time.AfterFunc(tc.cancel, func() { cancel(cause) })
				case tc.cancel < 0:
					cancel(cause)
				case tc.deadline > 0:
					var stop context.CancelFunc
					ctx, stop = context.WithTimeout(ctx, tc.deadline)
					defer stop()
				}
				defer cancel(nil)
				start := time.Now()
				_, err := t.Lock(ctx, "k", tc.opts...)
				if took := time.Since(start); took > tc.within || took < tc.atLeast {
					t.Errorf("returned after %v, want %v to %v", took, tc.atLeast, tc.within)
				}
				var e *hasp.Error
				if !errors.As(err, &e) || e.Op != "lock" || e.Key != "k" {
					t.Errorf("got %#v, want a *hasp.Error", err)
				}
				for _, target := range tc.is {
					want(t, "Lock", err, target)
				}
				for _, target := range tc.isNot {
					if errors.Is(err, target) {
						t.Errorf("%v matches %q", err, target)
					}
				}
				var he *backend.HeldError
				if errors.Is(err, hasp.ErrHeld) && (!errors.As(err, &he) || he.Owner != "stranger" || he.RetryAfter <= 0) {
					t.Errorf("got %+v, want owner and term", he)
				}
			})
		}
	}
}

// If the key is freed a moment before the wait ends, the caller still gets it.
func TestLastAttemptARoundTripBeforeTheEnd(t *testing.T) {
	for deadline, opts := range map[time.Duration]options{time.Minute: nil, time.Hour: {hasp.WithMaxWait(time.Minute)}} {
		o := &hasp.Options{Backoff: func(int) time.Duration { return 40 * time.Second }}
		withClient(t, o, func(t *bench) {
			heldByAnother(t, t.faulty, time.Hour)
			const trip = 10 * time.Millisecond
			far(t.faulty, trip)
			time.AfterFunc(time.Minute-3*trip, func() { t.faulty.Break(context.Background(), "k") })
			ctx := timeout(t, t.Context(), deadline)
			unlock(t, t.lockIn(ctx, "k", opts...))
		})
	}
}

func TestLockRidesOutAnOutageShorterThanTimeout(t *testing.T) {
	withClient(t, nil, func(t *bench) {
		t.set(down)
		time.AfterFunc(hasp.DefaultTimeout*8/10, func() { t.set(up) })
		l := t.lock("k")
		tokens := slices.Sorted(slices.Values(t.acquired))
		if len(tokens) < 2 || len(slices.Compact(tokens)) != len(t.acquired) {
			t.Errorf("%q: want a token for each attempt", t.acquired)
		}
		unlock(t, l)
	})
}

// If the driver has refused the key lately, a caller joins the driver's queue without an attempt
// first.
func TestSoughtKeysAreQueuedForAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := new(memlock.Store)
		d := &hooked{Driver: store.Driver().(Driver), traits: store.Driver().Traits()}
		attempts := 0
		d.acquire = func(q *call) error {
			attempts++
			return q.send()
		}
		a, b := await.Value(hasp.New(store.Driver(), nil)), &bench{T: t, Client: await.Value(hasp.New(d, nil))}
		for round, want := range []int{1, 0, 0, 1} { // the last round comes after a pause
			l := lockNow(t, a, "k")
			attempts = 0
			done := b.lockLater(t.Context())
			unlock(t, l)
			if err := <-done; err != nil || attempts != want {
				t.Errorf("round %d: %d attempts, want %d; %v", round, attempts, want, err)
			}
			if round == 2 {
				time.Sleep(time.Second)
			}
		}
		a.Close()
		b.Client.Close()
	})
}

// If a Waiter has waited through a part of an outage, the engine waits only for the rest:
// Options.Timeout bounds the whole outage.
func TestOutageIsCountedOnce(t *testing.T) {
	for _, why := range []error{errNet, context.DeadlineExceeded} {
		var since time.Time // when the store goes down, which is after a minute
		d := hooked{traits: inNoOrder}
		d.acquire = func(q *call) error {
			if since.IsZero() {
				return q.send()
			}
			return errNet
		}
		d.wait = func(q *call) error {
			time.Sleep(time.Minute)
			since = time.Now()
			time.Sleep(q.Timeout)
			return &backend.UnavailableError{Since: since, Err: why}
		}
		withRival(t, d, func(t *bench, _ *hasp.Lease) {
			start := time.Now()
			_, err := t.Lock(t.Context(), "k")
			within(t, "Lock, with an outage that began after a minute,", start, time.Minute+hasp.DefaultTimeout+500*time.Millisecond)
			wantOutage(t, why.Error(), err)
		})
	}
}

// lockLater starts a caller that locks and unlocks "k", and returns when the caller waits.
func (t *bench) lockLater(ctx context.Context, opts ...hasp.Option) <-chan error {
	done := make(chan error, 1)
	go func() {
		l, err := t.Lock(ctx, "k", opts...)
		if err == nil {
			l.Unlock(ctx)
		}
		done <- err
	}()
	synctest.Wait()
	return done
}

// If a wait is nearly over, or shorter than a round trip, its error is not an outage.
func TestShortWaitsAreAnsweredByAHealthyStore(t *testing.T) {
	withClient(t, nil, func(t *bench) {
		heldByAnother(t, t.faulty, time.Hour)
		t.acquire = slow(time.Millisecond)
		for _, d := range []time.Duration{1, time.Microsecond, 500 * time.Microsecond, 1500 * time.Microsecond} {
			want(t, d.String(), t.lockErr("k", hasp.WithMaxWait(d)), hasp.ErrHeld)
		}
		t.faulty.Break(t.Context(), "k")
		for late := range 40 {
			l := t.lock("k", hasp.WithoutRenewal()) // so that the hold is not handed over
			done := t.lockLater(t.Context(), hasp.WithMaxWait(time.Second))
			time.Sleep(time.Second - time.Duration(late)*100*time.Microsecond)
			unlock(t, l)
			if err := <-done; err != nil && !errors.Is(err, hasp.ErrHeld) {
				t.Errorf("unlocked %d x 100 µs before the end of the wait: %v", late, err)
			}
		}
	})
}

func TestWaitThatEndsBeforeTheFirstAnswer(t *testing.T) {
	withRival(t, hooked{traits: memlock.NewDriver().Traits(), wait: untilEnd}, func(t *bench, rival *hasp.Lease) {
		first := t.lockLater(t.Context(), hasp.WithMaxWait(900*time.Millisecond))
		wantOutage(t, "Lock", t.lockErr("k", hasp.WithMaxWait(100*time.Millisecond)))
		want(t, "Lock", <-first, hasp.ErrHeld) // because of the attempt before the Wait
		unlock(t, rival)

		own := t.lock("own")
		want(t, "Lock of what this Client holds", t.lockErr("own", hasp.WithMaxWait(10*time.Millisecond)), hasp.ErrHeld)
		unlock(t, own)
	})
}

// The store refuses an attempt, and then does not answer the Wait for most of a Timeout. Then the
// refusal is too old to report.
func TestWaitWithoutAnAnswerIsNotHeld(t *testing.T) {
	withRival(t, hooked{traits: memlock.NewDriver().Traits(), wait: untilEnd}, func(t *bench, _ *hasp.Lease) {
		ctx := timeout(t, t.Context(), 2*time.Second)
		_, err := t.Lock(ctx, "k")
		if !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, hasp.ErrHeld) {
			t.Errorf("got %v, want only the end of the context", err)
		}
	})
}

// With an Ordered driver, a caller calls Wait for a contended key without an attempt first. If the
// wait is shorter than a round trip, the caller still gets an answer.
func TestShortWaitsOnAContendedKeyAreAnswered(t *testing.T) {
	away := func(q *call) error {
		select {
		case <-time.After(20 * time.Millisecond):
			return q.send()
		case <-q.ctx.Done():
			return q.ctx.Err()
		}
	}
	withRival(t, hooked{traits: inOrderOfArrival, acquire: away, wait: away}, func(t *bench, rival *hasp.Lease) {
		first := t.lockLater(t.Context())
		time.Sleep(time.Second)
		for d := time.Millisecond; d <= 100*time.Millisecond; d += time.Millisecond {
			want(t, d.String(), t.lockErr("k", hasp.WithMaxWait(d)), hasp.ErrHeld)
		}
		unlock(t, rival)
		<-first
	})
}

// If an error of Wait matches the end of its context, the outcome is unknown: the claim may still
// be in the queue. The engine releases its token, and uses the token for no other caller.
func TestClaimOfAWaitThatWasCutShortIsReleased(t *testing.T) {
	var mu sync.Mutex            // guards released
	released := map[string]int{} // number of releases, by the token of a Wait
	leaves := hooked{traits: inOrderOfArrival}
	leaves.wait = func(q *call) error {
		mu.Lock()
		released[q.Token] = 0
		mu.Unlock()
		<-q.ctx.Done()
		return errors.Join(&backend.HeldError{Owner: "stranger"}, q.ctx.Err())
	}
	leaves.release = func(q *call) error {
		mu.Lock()
		defer mu.Unlock()
		released[q.Token]++
		return backend.ErrLost
	}
	withRival(t, leaves, func(t *bench, _ *hasp.Lease) {
		var callers sync.WaitGroup
		for i := range 2 {
			callers.Go(func() {
				_, err := t.Lock(t.Context(), "k", hasp.WithMaxWait(time.Duration(i+1)*time.Second))
				var held *backend.HeldError
				if !errors.As(err, &held) || held.Owner != "stranger" || errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("caller %d: got %v, want ErrHeld and no more", i, err)
				}
			})
			synctest.Wait()
		}
		callers.Wait()
		time.Sleep(2 * hasp.DefaultTimeout)
		mu.Lock()
		defer mu.Unlock()
		if len(released) != 2 {
			t.Errorf("waited and released with %v, want two tokens", released)
		}
		for token, n := range released {
			equal(t, "releases, at once, soon and after Timeout, of "+token, n, 3)
		}
	})
}

// The head's attempt has had no answer for most of a Timeout. A caller behind the head must not
// report the earlier ErrHeld.
func TestSilenceIsNotHeldForACallerInLine(t *testing.T) {
	for _, alone := range []bool{true, false} {
		withClient(t, nil, func(t *bench) {
			heldByAnother(t, t.faulty, time.Hour)
			ctx, cancel := context.WithCancel(t.Context())
			if !alone {
				go t.Lock(ctx, "k")
			}
			time.Sleep(time.Second)
			t.onAcquire(hungFor(hasp.DefaultTimeout))
			time.Sleep(200 * time.Millisecond)
			err := t.lockErr("k", hasp.WithMaxWait(2500*time.Millisecond))
			wantOutage(t, fmt.Sprint("after 2.5 s of silence, alone ", alone), err)
			cancel()
			time.Sleep(10 * time.Second)
		})
	}
}

// After an outage has ended a Wait, the next Wait may go on for long. Then the outage is over, and
// a later fault begins a new one.
func TestOutageThatIsOverIsForgotten(t *testing.T) {
	for _, traits := range []backend.Traits{inOrderOfArrival, inNoOrder} {
		cuts := []time.Duration{0, time.Minute} // after how long the next Waits fail; one caller waits at a time
		cut := func(q *call) error {
			if len(cuts) == 0 {
				return q.send()
			}
			after := cuts[0]
			cuts = cuts[1:]
			time.Sleep(after)
			return errNet
		}
		withRival(t, hooked{traits: traits, wait: cut}, func(t *bench, rival *hasp.Lease) {
			want(t, "TryLock", t.tryErr("k"), hasp.ErrHeld)
			waits := t.lockLater(t.Context())
			time.Sleep(30 * time.Second)
			want(t, "TryLock after an outage", t.tryErr("k"), hasp.ErrHeld)
			time.Sleep(time.Minute)
			unlock(t, rival)
			want(t, "two faults a minute apart", <-waits, nil)
		})
	}
}

// A suspend is not a part of an outage, because the Client cannot ask the store meanwhile.
func TestSuspendIsNoOutage(t *testing.T) {
	for _, ends := range []backend.Cancellation{backend.CancelNone, backend.CancelPrompt} {
		withEnds(t, ends, nil, func(t *bench) {
			suspend := hasp.Suspendable(t.Client)
			tries := 0
			t.acquire = func(q *call) error {
				time.Sleep(10 * time.Millisecond)
				tries++
				switch tries {
				case 2:
					suspend(time.Hour) // the suspend ends the connection
					fallthrough
				case 1, 3:
					return errNet
				}
				return q.send()
			}
			unlock(t, t.lock("k"))
		})
	}
}

// The store does not answer the renewals or the release of a hold, and then does not answer the
// attempts of the callers that wait for the key.
func TestHungStoreAfterAHoldIsNotHeld(t *testing.T) {
	for name, ttl := range map[string]time.Duration{"release": hasp.DefaultTTL, "renewals": 3 * time.Second} {
		withClient(t, nil, func(t *bench) {
			l := t.lock("k", hasp.WithTTL(ttl))
			t.set(func(f *faulty) { f.acquire, f.renew, f.release = hung, untilEnd, hung })
			ctx := timeout(t, t.Context(), 3500*time.Millisecond)
			head := t.lockLater(ctx, hasp.WithTTL(time.Minute)) // so that the hold is not handed over
			next := t.lockLater(t.Context(), hasp.WithMaxWait(3400*time.Millisecond))
			if name == "release" {
				go l.Unlock(context.Background())
			}
			for who, done := range map[string]<-chan error{"in line": next, "head": head} {
				if err := <-done; err == nil || errors.Is(err, hasp.ErrHeld) {
					t.Errorf("%s, %s: got %v, want no answer", name, who, err)
				}
			}
			l.Unlock(t.Context())
			t.set(up)
			time.Sleep(time.Hour) // until the calls have ended
		})
	}
}

func TestLongBackoffInAnOutage(t *testing.T) {
	o := &hasp.Options{Backoff: func(int) time.Duration { return time.Hour }}
	withClient(t, o, func(t *bench) {
		t.set(down)
		start := time.Now()
		head, next := t.lockLater(t.Context()), t.lockLater(t.Context())
		want(t, "head", <-head, errNet)
		want(t, "in line", <-next, errNet)
		within(t, "Lock", start, hasp.DefaultTimeout+100*time.Millisecond)
	})
}
