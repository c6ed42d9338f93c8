package hasp_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/memlock"
)

// heldByAnother makes a stranger hold "k" in the store of f.
func heldByAnother(t testing.TB, f *faulty, ttl time.Duration) {
	t.Helper()
	stranger := backend.Claim{Key: "k", Token: "stranger", Owner: "stranger", TTL: ttl}
	await.Must(t, errOf(f.Driver.Acquire(t.Context(), stranger)))
}

// hooked is a driver in memory with the given traits, and with hooks that may be nil.
type hooked struct {
	traits                 backend.Traits
	acquire, wait, release hook
}

// waiting is a faulty driver that is a Waiter. Its acquired has the tokens of all Waits as well.
type waiting struct {
	*faulty
	traits backend.Traits
	wait   hook
}

func (h hooked) over(store *memlock.Store) *waiting {
	f := faultyOver(store)
	f.acquire = h.acquire
	f.release = h.release
	return &waiting{f, h.traits, h.wait}
}

func (d *waiting) Traits() backend.Traits { return d.traits }

func (d *waiting) Wait(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	d.set(func(f *faulty) { f.acquired = append(f.acquired, c.Token) })
	return d.wait.run(ctx, c, func() (backend.Grant, error) { return d.Driver.Wait(ctx, c) })
}

// These are the traits of two Waiters over a network. Only the first one is Ordered.
var (
	inOrderOfArrival = backend.Traits{Ordered: true, Fenced: true, Shared: true, Reach: backend.Network, Cancellation: backend.CancelPrompt}
	inNoOrder        = backend.Traits{Reach: backend.Network, Cancellation: backend.CancelPrompt}
)

// withRival runs a test in a bubble, with a Client c over the driver d. Another Client of the same
// store holds "k" by the lease rival.
func withRival(t *testing.T, d hooked, run func(t *bench, rival *hasp.Lease)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		store := new(memlock.Store)
		w := d.over(store)
		c, other := opened(t, w, nil), opened(t, store.Driver(), nil)
		run(&bench{t, w.faulty, c}, lockNow(t, other, "k"))
	})
}

// Each wait ends in time, and its error matches what has ended it, and nothing else.
func TestErrorsOfAWait(t *testing.T) {
	cause := errors.New("shutting down")
	silent := func(f *faulty) { f.acquire = hung }
	second := options{hasp.WithMaxWait(time.Second)}
	for _, tc := range []struct {
		name     string
		store    func(*faulty)
		opts     []hasp.Option
		deadline time.Duration // deadline of the context; 0 if there is none
		cancel   time.Duration // when the context is cancelled; 0 if it is not; below 0 if it was cancelled before
		after    time.Duration // least time until the end
		slack    time.Duration // how much longer it may take
		is       []error       // nil if it may match ErrHeld or ErrUnavailable
	}{
		{name: "held, max wait", opts: options{hasp.WithMaxWait(5 * time.Second)},
			after: 4900 * time.Millisecond, slack: 100 * time.Millisecond, is: []error{hasp.ErrHeld}},
		{name: "held, deadline", deadline: time.Second,
			after: time.Second, is: []error{hasp.ErrHeld, context.DeadlineExceeded}},
		{name: "held, cancelled with a cause", cancel: time.Second,
			after: time.Second, is: []error{hasp.ErrHeld, context.Canceled, cause}},
		{name: "held, one attempt", opts: options{hasp.WithMaxWait(0)}, is: []error{hasp.ErrHeld}},
		{name: "refused", store: down,
			after: hasp.DefaultTimeout, slack: 500 * time.Millisecond, is: []error{hasp.ErrUnavailable, errNet}},
		{name: "refused, deadline", store: down, deadline: time.Second,
			after: time.Second, is: []error{hasp.ErrUnavailable, errNet, context.DeadlineExceeded}},
		{name: "hung, max wait", store: silent, opts: second,
			after: time.Second, is: []error{hasp.ErrUnavailable}},
		{name: "held, then hung, max wait", store: func(f *faulty) {
			time.AfterFunc(990*time.Millisecond, func() { f.onAcquire(hung) })
		}, opts: second, after: time.Second},
		{name: "hung, deadline", store: silent, deadline: time.Second / 2,
			after: time.Second / 2, is: []error{context.DeadlineExceeded}},
		{name: "hung, cancelled", store: silent, cancel: time.Second / 2,
			after: time.Second / 2, is: []error{context.Canceled, cause}},
		{name: "cancelled before", cancel: -1, is: []error{context.Canceled, cause}},
		{name: "unsupported", store: func(f *faulty) { f.acquire = failing(errors.ErrUnsupported) },
			is: []error{errors.ErrUnsupported}},
	} {
		for _, ends := range everyEnd {
			runEnds(t, fmt.Sprint(tc.name, " ", ends), ends, nil, func(t *bench) {
				heldByAnother(t, t.faulty, time.Hour)
				if tc.store != nil {
					tc.store(t.faulty)
				}
				ctx, cancel := context.WithCancelCause(t.Context())
				defer cancel(nil)
				switch {
				case tc.cancel > 0:
					time.AfterFunc(tc.cancel, func() { cancel(cause) })
				case tc.cancel < 0:
					cancel(cause)
				case tc.deadline > 0:
					ctx = timeout(t, ctx, tc.deadline)
				}

				start := time.Now()
				err := errOf(t.Lock(ctx, "k", tc.opts...))
				between(t, "the time of Lock", time.Since(start), tc.after, tc.after+max(tc.slack, 60*time.Millisecond))
				if tc.is != nil {
					wantOnly(t, "Lock", err, tc.is...)
				}
				wantCall(t, err, "lock", "k")
				if errors.Is(err, hasp.ErrHeld) {
					if he := refusal(t, err); he.Owner != "stranger" || he.RetryAfter <= 0 {
						t.Errorf("got %+v, want owner and term", he)
					}
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
			unlock(t, await.Value(hasp.LockAll(ctx, t.Client, []string{"k"}, opts...))) // by a Lock
		})
	}
}

func TestLockRidesOutAnOutageShorterThanTimeout(t *testing.T) {
	onBench(t, func(t *bench) {
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
		attempts := 0
		d := hooked{traits: store.Driver().Traits(), acquire: func(q *call) error {
			attempts++
			return q.send()
		}}.over(store)
		a, b := opened(t, store.Driver(), nil), &bench{t, d.faulty, opened(t, d, nil)}
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
	return soon(func() error {
		l, err := t.Lock(ctx, "k", opts...)
		if err == nil {
			l.Unlock(ctx)
		}
		return err
	})
}

// soon calls f on a goroutine of its own, and returns when f waits or has ended.
func soon(f func() error) <-chan error {
	done := make(chan error, 1)
	go func() { done <- f() }()
	synctest.Wait()
	return done
}

// If a wait is nearly over, or shorter than a round trip, its error is not an outage.
func TestShortWaitsAreAnsweredByAHealthyStore(t *testing.T) {
	onBench(t, func(t *bench) {
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
			if err := <-done; err != nil {
				wantOnly(t, fmt.Sprintf("unlocked %d x 100 µs before the end of the wait", late), err, hasp.ErrHeld)
			}
		}
	})
}

// The store refuses an attempt, and then does not answer the Wait. After most of a Timeout, the
// refusal is too old to report.
func TestWaitWithoutAnAnswer(t *testing.T) {
	withRival(t, hooked{traits: memlock.NewDriver().Traits(), wait: untilEnd}, func(t *bench, rival *hasp.Lease) {
		ctx := timeout(t, t.Context(), 2*time.Second)
		wantOnly(t, "a long wait", errOf(t.Lock(ctx, "k")), context.DeadlineExceeded)

		first := t.lockLater(t.Context(), hasp.WithMaxWait(900*time.Millisecond))
		wantOutage(t, "a caller that has made no attempt", t.lockErr("k", hasp.WithMaxWait(100*time.Millisecond)))
		want(t, "Lock", <-first, hasp.ErrHeld) // because of the attempt before the Wait
		unlock(t, rival)

		own := t.lock("own")
		want(t, "Lock of what this Client holds", t.lockErr("own", hasp.WithMaxWait(10*time.Millisecond)), hasp.ErrHeld)
		unlock(t, own)
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
	var waited []string // tokens
	leaves := hooked{traits: inOrderOfArrival, release: failing(backend.ErrLost), wait: func(q *call) error {
		waited = append(waited, q.Token)
		<-q.ctx.Done()
		return errors.Join(&backend.HeldError{Owner: "stranger"}, q.ctx.Err())
	}}
	withRival(t, leaves, func(t *bench, _ *hasp.Lease) {
		first := t.lockLater(t.Context(), hasp.WithMaxWait(time.Second))
		second := t.lockLater(t.Context(), hasp.WithMaxWait(2*time.Second))
		for i, done := range []<-chan error{first, second} {
			err := <-done
			wantOnly(t, "Lock", err, hasp.ErrHeld)
			equal(t, "the holder", refusal(t, err).Owner, "stranger")
			time.Sleep(120 * time.Millisecond) // a store may carry out the release before the Wait
			equal(t, "releases, at once and soon", t.releases(), 2*i+2)
		}
		time.Sleep(2 * hasp.DefaultTimeout)
		equal(t, "releases, also after Timeout", t.releases(), 6)
		for _, token := range waited {
			kept := slices.DeleteFunc(slices.Clone(t.released), func(r string) bool { return r == token })
			equal(t, "releases of the other token", len(kept), 3)
		}
	})
}

// The head's attempt has had no answer for most of a Timeout. A caller behind the head must not
// report the earlier ErrHeld.
func TestSilenceIsNotHeldForACallerInLine(t *testing.T) {
	for _, alone := range []bool{true, false} {
		onBench(t, func(t *bench) {
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
		onBench(t, func(t *bench) {
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
