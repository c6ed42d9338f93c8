package hasp_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/memlock"
)

// heldByAnother returns a faulty driver whose store has "k" held by a stranger.
func heldByAnother(t *testing.T) *faulty {
	t.Helper()
	f := newFaulty()
	stranger := backend.Claim{Key: "k", Token: "stranger", Owner: "stranger", TTL: time.Hour}
	if _, err := f.Driver.Acquire(t.Context(), stranger); err != nil {
		t.Fatal(err)
	}
	return f
}

func TestErrorsOfAWait(t *testing.T) {
	cause := errors.New("shutting down")
	refused := func(f *faulty) { down(f) }
	hung := func(f *faulty) {
		f.acquire = func(backend.Claim, func() (backend.Grant, error)) (backend.Grant, error) {
			time.Sleep(time.Hour)
			return backend.Grant{}, errNet
		}
	}
	for _, tc := range []struct {
		name    string
		store   func(*faulty)
		ctx     func(context.Context) (context.Context, context.CancelFunc)
		opts    []hasp.Option
		within  time.Duration
		atLeast time.Duration
		is      []error
		isNot   []error
	}{
		{name: "held, max wait", opts: []hasp.Option{hasp.WithMaxWait(5 * time.Second)},
			within: 5 * time.Second, atLeast: 4900 * time.Millisecond, is: []error{hasp.ErrHeld}, isNot: []error{context.DeadlineExceeded}},
		{name: "held, deadline", ctx: func(ctx context.Context) (context.Context, context.CancelFunc) {
			return context.WithTimeout(ctx, 5*time.Second)
		}, within: 5050 * time.Millisecond, atLeast: 5 * time.Second, is: []error{hasp.ErrHeld, context.DeadlineExceeded}},
		{name: "held, cancelled with a cause", ctx: func(ctx context.Context) (context.Context, context.CancelFunc) {
			ctx, cancel := context.WithCancelCause(ctx)
			time.AfterFunc(time.Second, func() { cancel(cause) })
			return ctx, func() {}
		}, within: 1050 * time.Millisecond, atLeast: time.Second, is: []error{hasp.ErrHeld, context.Canceled, cause}},
		{name: "held, one attempt", opts: []hasp.Option{hasp.WithMaxWait(0)},
			within: time.Millisecond, is: []error{hasp.ErrHeld}},
		{name: "refused", store: refused,
			within: 3500 * time.Millisecond, atLeast: hasp.DefaultTimeout, is: []error{errNet}, isNot: []error{hasp.ErrHeld}},
		{name: "refused, max wait", store: refused, opts: []hasp.Option{hasp.WithMaxWait(time.Second)},
			within: time.Second, is: []error{errNet}, isNot: []error{hasp.ErrHeld}},
		{name: "refused, deadline", store: refused, ctx: func(ctx context.Context) (context.Context, context.CancelFunc) {
			return context.WithTimeout(ctx, time.Second)
		}, within: 1050 * time.Millisecond, is: []error{errNet, context.DeadlineExceeded}, isNot: []error{hasp.ErrHeld}},
		{name: "hung", store: hung,
			within: 3500 * time.Millisecond, atLeast: hasp.DefaultTimeout, isNot: []error{hasp.ErrHeld, context.DeadlineExceeded}},
		{name: "hung, max wait", store: hung, opts: []hasp.Option{hasp.WithMaxWait(time.Second)},
			within: 1050 * time.Millisecond, atLeast: time.Second, isNot: []error{hasp.ErrHeld, context.DeadlineExceeded}},
		{name: "held, then hung, max wait", store: func(f *faulty) {
			began := time.Now()
			f.acquire = func(_ backend.Claim, send func() (backend.Grant, error)) (backend.Grant, error) {
				if time.Since(began) > 990*time.Millisecond {
					time.Sleep(time.Hour)
				}
				return send()
			}
		}, opts: []hasp.Option{hasp.WithMaxWait(time.Second)},
			within: 1060 * time.Millisecond, atLeast: time.Second},
		{name: "hung, cancelled", store: hung, ctx: func(ctx context.Context) (context.Context, context.CancelFunc) {
			ctx, cancel := context.WithCancel(ctx)
			time.AfterFunc(time.Second, cancel)
			return ctx, func() {}
		}, within: 1050 * time.Millisecond, atLeast: time.Second, is: []error{context.Canceled}, isNot: []error{hasp.ErrHeld}},
		{name: "cancelled before", ctx: func(ctx context.Context) (context.Context, context.CancelFunc) {
			ctx, cancel := context.WithCancelCause(ctx)
			cancel(cause)
			return ctx, func() {}
		}, is: []error{context.Canceled, cause}, isNot: []error{hasp.ErrHeld}},
		{name: "unsupported", store: func(f *faulty) {
			f.acquire = func(backend.Claim, func() (backend.Grant, error)) (backend.Grant, error) {
				return backend.Grant{}, errors.ErrUnsupported
			}
		}, is: []error{errors.ErrUnsupported}},
	} {
		for _, ends := range []backend.Ends{backend.EndsSometime, backend.EndsByDeadline, backend.EndsPromptly} {
			t.Run(fmt.Sprint(tc.name, " ", ends), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					f := heldByAnother(t)
					f.ends = ends
					if tc.store != nil {
						f.set(tc.store)
					}
					c := hasp.New(f, nil)
					ctx, cancel := t.Context(), context.CancelFunc(func() {})
					if tc.ctx != nil {
						ctx, cancel = tc.ctx(ctx)
					}
					defer cancel()
					start := time.Now()
					_, err := c.Lock(ctx, "k", tc.opts...)
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
					time.Sleep(2 * time.Hour) // for calls that hang
					c.Close()
				})
			})
		}
	}
}

// A key that is freed a moment before the wait ends is still had.
func TestLastAttemptARoundTripBeforeTheEnd(t *testing.T) {
	for name, lock := range map[string]func(t *testing.T, c *hasp.Client) (*hasp.Lease, error){
		"max wait": func(t *testing.T, c *hasp.Client) (*hasp.Lease, error) {
			return c.Lock(t.Context(), "k", hasp.WithMaxWait(time.Minute))
		},
		"deadline": func(t *testing.T, c *hasp.Client) (*hasp.Lease, error) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			time.AfterFunc(time.Hour, cancel)
			return c.Lock(ctx, "k")
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := heldByAnother(t)
				const trip = 10 * time.Millisecond
				f.acquire = func(_ backend.Claim, send func() (backend.Grant, error)) (backend.Grant, error) {
					time.Sleep(trip / 2)
					defer time.Sleep(trip / 2)
					return send()
				}
				c := hasp.New(f, &hasp.Options{Backoff: func(int) time.Duration { return 40 * time.Second }})
				time.AfterFunc(time.Minute-3*trip, func() { f.Break(context.Background(), "k") })
				l, err := lock(t, c)
				if err != nil {
					t.Fatal(err)
				}
				l.Unlock(t.Context())
				c.Close()
				time.Sleep(2 * time.Hour)
			})
		})
	}
}

func TestLockRidesOutAnOutageShorterThanTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFaulty()
		f.set(down)
		c := hasp.New(f, nil)
		time.AfterFunc(hasp.DefaultTimeout*8/10, func() { f.set(up) })
		l := lockNow(t, c, "k")
		noTokenTwice(t, f)
		l.Unlock(t.Context())
		c.Close()
	})
}

// Callers that stand in line behind one that rides out an outage do not each
// ride it out anew.
func TestALineOfCallersDuringAnOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFaulty()
		f.set(down)
		c := hasp.New(f, nil)
		start := time.Now()
		for range 20 {
			go func() {
				_, err := c.Lock(t.Context(), "k")
				want(t, "Lock", err, errNet)
				if waited := time.Since(start); waited > 2*hasp.DefaultTimeout {
					t.Errorf("told after %v", waited)
				}
			}()
		}
		synctest.Wait()
		time.Sleep(time.Hour)
		c.Close()
	})
}

func TestPollingSleepsAreBoundedByTheHoldersTerm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFaulty()
		stranger := backend.Claim{Key: "k", Token: "stranger", TTL: 5 * time.Second}
		if _, err := f.Driver.Acquire(t.Context(), stranger); err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		c := hasp.New(f, &hasp.Options{Backoff: func(int) time.Duration { return time.Hour }})
		l := lockNow(t, c, "k")
		if waited := time.Since(start); waited > 5*time.Second+time.Millisecond {
			t.Errorf("slept %v past the end of the holder's term", waited-5*time.Second)
		}
		l.Unlock(t.Context())
		c.Close()
	})
}

func TestAttemptsOfALongWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := heldByAnother(t)
		c := hasp.New(f, nil)
		_, err := c.Lock(t.Context(), "k", hasp.WithMaxWait(time.Minute))
		want(t, "Lock", err, hasp.ErrHeld)
		// The sleeps grow to 25 to 75 ms, which is 50 ms in the mean.
		if a, _, _ := f.calls(); a < 900 || a > 1600 {
			t.Errorf("%d attempts in a minute", a)
		}
		c.Close()
	})
}

func TestOrderedDriverKeepsTheOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memlock.NewStore()
		a, b := hasp.New(store.Driver(), nil), hasp.New(store.Driver(), nil)
		l := lockNow(t, a, "k")
		var served []int
		var wg sync.WaitGroup
		for i := range 40 {
			wg.Go(func() {
				l := lockNow(t, []*hasp.Client{a, b}[i%2], "k")
				served = append(served, i)
				l.Unlock(t.Context())
			})
			synctest.Wait()
		}
		_, err := a.TryLock(t.Context(), "k")
		want(t, "TryLock", err, hasp.ErrHeld)
		l.Unlock(t.Context())
		wg.Wait()
		inOrder(t, served, 40)
		a.Close()
		b.Close()
	})
}

// A caller that finds a key held, which was held by others a moment ago, takes
// its place in the queue at once, rather than make an attempt that is refused.
func TestSoughtKeysAreQueuedForAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memlock.NewStore()
		d := &attempts{Driver: store.Driver()}
		a, b := hasp.New(store.Driver(), nil), hasp.New(d, nil)
		for round, want := range []int64{1, 0, 0, 1} { // the last after a pause
			l := lockNow(t, a, "k")
			before := d.n.Load()
			done := make(chan struct{})
			go func() {
				defer close(done)
				lockNow(t, b, "k").Unlock(t.Context())
			}()
			synctest.Wait()
			l.Unlock(t.Context())
			<-done
			if got := d.n.Load() - before; got != want {
				t.Errorf("round %d: %d attempts, want %d", round, got, want)
			}
			if round == 2 {
				time.Sleep(time.Second)
			}
		}
		a.Close()
		b.Close()
	})
}

// attempts counts those made by Acquire.
type attempts struct {
	*memlock.Driver
	n atomic.Int64
}

func (a *attempts) Acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	a.n.Add(1)
	return a.Driver.Acquire(ctx, c)
}

func TestWaiterThatNeverReturnsIsLeftBehind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &stuck{faulty: heldByAnother(t), release: make(chan struct{})}
		c := hasp.New(d, nil)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		start := time.Now()
		_, err := c.Lock(ctx, "k")
		if late := time.Since(start) - time.Second; late > 50*time.Millisecond {
			t.Errorf("returned %v late", late)
		}
		want(t, "Lock", err, hasp.ErrHeld)
		want(t, "Lock", err, context.DeadlineExceeded)
		d.faulty.Break(t.Context(), "k")
		close(d.release) // now it is granted, and nobody wants it
		synctest.Wait()
		if !free(t, d.faulty, "k") {
			t.Error("the late grant was left behind")
		}
		c.Close()
	})
}

// stuck is a Waiter that ignores its context.
type stuck struct {
	*faulty
	release chan struct{}
}

func (s *stuck) Wait(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	<-s.release
	return s.faulty.Driver.Acquire(ctx, c)
}

// An outage that a Waiter has ridden out is not ridden out again by the
// engine: Options.Timeout bounds the whole of it.
func TestOutageIsCountedOnce(t *testing.T) {
	for name, dated := range map[string]func(since time.Time) error{
		"as it is": func(since time.Time) error { return outage{errNet, since} },
		"a deadline's": func(since time.Time) error {
			return outage{context.DeadlineExceeded, since}
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := &enduring{heldByAnother(t), dated}
				c := hasp.New(d, nil)
				defer c.Close()
				start := time.Now()
				_, err := c.Lock(t.Context(), "k")
				if took := time.Since(start); took > time.Minute+hasp.DefaultTimeout+500*time.Millisecond {
					t.Errorf("the outage began after a minute, and Lock returned after %v", took)
				}
				if err == nil || errors.Is(err, hasp.ErrHeld) || errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("got %v, want the outage", err)
				}
			})
		})
	}
}

// enduring is a Waiter whose store goes down after a minute, and which rides
// that out as long as it may.
type enduring struct {
	*faulty
	dated func(since time.Time) error
}

func (e *enduring) Wait(_ context.Context, c backend.Claim) (backend.Grant, error) {
	time.Sleep(time.Minute)
	e.set(down)
	since := time.Now()
	time.Sleep(c.Timeout)
	return backend.Grant{}, e.dated(since)
}

// outage is an error that says since when.
type outage struct {
	error
	since time.Time
}

func (o outage) Unwrap() error    { return o.error }
func (o outage) Since() time.Time { return o.since }

// failing has the attempts of these numbers, from 1, fail.
func failing(f *faulty, numbers ...int) {
	f.acquire = func(_ backend.Claim, send func() (backend.Grant, error)) (backend.Grant, error) {
		time.Sleep(time.Millisecond)
		f.mu.Lock()
		n := len(f.acquired)
		f.mu.Unlock()
		if slices.Contains(numbers, n) {
			return backend.Grant{}, errNet
		}
		return send()
	}
}

func lockLater(t *testing.T, c *hasp.Client, ctx context.Context) <-chan error {
	done := make(chan error, 1)
	go func() {
		l, err := c.Lock(ctx, "k")
		if err == nil {
			l.Unlock(ctx)
		}
		done <- err
	}()
	synctest.Wait()
	return done
}

// The end of one caller's context is not another's error.
func TestHeadCancelledDuringAnOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFaulty()
		failing(f, 2, 3)
		c := hasp.New(f, nil)
		l := lockNow(t, c, "k")
		ctx, cancel := context.WithCancel(t.Context())
		head := lockLater(t, c, ctx)
		next := lockLater(t, c, t.Context())
		time.Sleep(10 * time.Second)
		time.AfterFunc(2*time.Millisecond, cancel)
		if err := l.Extend(t.Context(), time.Minute); err != nil { // so that it is not handed over
			t.Fatal(err)
		}
		l.Unlock(t.Context())
		want(t, "the head", <-head, context.Canceled)
		if err := <-next; err != nil {
			t.Errorf("the next in line: %v", err)
		}
		c.Close()
	})
}

// If the store is healthy, callers in line go on waiting when their head gives
// up, although they have waited for longer than Timeout.
func TestHeadThatGivesUpEndsNoOtherWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := hasp.New(heldByAnother(t), nil)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		head := lockLater(t, c, ctx)
		next := lockLater(t, c, t.Context())
		want(t, "the head", <-head, hasp.ErrHeld)
		synctest.Wait()
		select {
		case err := <-next:
			t.Fatalf("the next in line: %v, want it to wait", err)
		default:
		}
		if err := c.Break(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		if err := <-next; err != nil {
			t.Errorf("the next in line: %v", err)
		}
		c.Close()
	})
}

// Two short faults with a good answer between them are not one long outage.
func TestFaultsFarApartAreNotAnOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFaulty()
		failing(f, 1, 3)
		c := hasp.New(f, nil)
		l := lockNow(t, c, "k")
		b, d := lockLater(t, c, t.Context()), lockLater(t, c, t.Context())
		time.Sleep(10 * time.Second)
		l.Unlock(t.Context())
		for _, done := range []<-chan error{b, d} {
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
		c.Close()
	})
}

func TestOutageIsNotHeldForThoseInLine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFaulty()
		f.set(down)
		c := hasp.New(f, nil)
		head := lockLater(t, c, t.Context())
		time.Sleep(100 * time.Millisecond)
		for name, lock := range map[string]func() (*hasp.Lease, error){
			"Lock":    func() (*hasp.Lease, error) { return c.Lock(t.Context(), "k", hasp.WithMaxWait(time.Second)) },
			"TryLock": func() (*hasp.Lease, error) { return c.TryLock(t.Context(), "k") },
		} {
			_, err := lock()
			if want(t, name, err, errNet); errors.Is(err, hasp.ErrHeld) {
				t.Errorf("%s: the store is down, nobody holds the key: %v", name, err)
			}
		}
		<-head
		c.Close()
	})
}

// A wait that is nearly over, or shorter than a round trip, is not an outage.
func TestShortWaitsAreAnsweredByAHealthyStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := heldByAnother(t)
		failing(f)
		c := hasp.New(f, nil)
		for _, d := range []time.Duration{1, time.Microsecond, 500 * time.Microsecond, 1500 * time.Microsecond} {
			_, err := c.Lock(t.Context(), "k", hasp.WithMaxWait(d))
			want(t, d.String(), err, hasp.ErrHeld)
		}
		f.Break(t.Context(), "k")
		for late := range 40 {
			l := lockNow(t, c, "k", hasp.WithoutRenewal()) // so that it is not handed over
			done := make(chan error, 1)
			go func() {
				l, err := c.Lock(t.Context(), "k", hasp.WithMaxWait(time.Second))
				if err == nil {
					l.Unlock(t.Context())
				}
				done <- err
			}()
			time.Sleep(time.Second - time.Duration(late)*100*time.Microsecond)
			l.Unlock(t.Context())
			if err := <-done; err != nil && !errors.Is(err, hasp.ErrHeld) {
				t.Errorf("unlocked %d x 100 µs before the end of the wait: %v", late, err)
			}
		}
		c.Close()
	})
}

func TestHungStoreIsRiddenOutOnceByAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFaulty()
		f.acquire = func(backend.Claim, func() (backend.Grant, error)) (backend.Grant, error) {
			time.Sleep(time.Hour)
			return backend.Grant{}, errNet
		}
		c := hasp.New(f, nil)
		start := time.Now()
		var all []<-chan error
		for range 3 {
			all = append(all, lockLater(t, c, t.Context()))
			time.Sleep(time.Second)
		}
		for i, done := range all {
			err := <-done
			if took := time.Since(start) - time.Duration(i)*time.Second; took > hasp.DefaultTimeout+500*time.Millisecond {
				t.Errorf("caller %d was told %v after %v", i, err, took)
			}
		}
		time.Sleep(2 * time.Hour)
		c.Close()
	})
}

// A Waiter that is cut short before the store's first word.
func TestWaitThatEndsBeforeTheFirstAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memlock.NewStore()
		a, c := hasp.New(store.Driver(), nil), hasp.New(mute{store.Driver()}, nil)
		l := lockNow(t, a, "k")
		first := make(chan error, 1)
		go func() {
			_, err := c.Lock(t.Context(), "k", hasp.WithMaxWait(time.Second))
			first <- err
		}()
		synctest.Wait()
		_, err := c.Lock(t.Context(), "k", hasp.WithMaxWait(100*time.Millisecond))
		if err == nil || errors.Is(err, hasp.ErrHeld) || errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v, want no answer", err)
		}
		want(t, "Lock", <-first, hasp.ErrHeld) // the attempt before it waited
		l.Unlock(t.Context())

		own := lockNow(t, c, "own")
		_, err = c.Lock(t.Context(), "own", hasp.WithMaxWait(10*time.Millisecond))
		want(t, "Lock of what this Client holds", err, hasp.ErrHeld)
		own.Unlock(t.Context())
		a.Close()
		c.Close()
	})
}

// mute is an ordered Waiter that says nothing of what it heard.
type mute struct{ *memlock.Driver }

func (m mute) Wait(ctx context.Context, _ backend.Claim) (backend.Grant, error) {
	<-ctx.Done()
	return backend.Grant{}, ctx.Err()
}

// A store that hangs does not mean that the key is held. Neither the callers in
// line nor a head whose context ends may report it as held.
func TestHungStoreIsNotHeldForThoseInLine(t *testing.T) {
	for _, ends := range []backend.Ends{backend.EndsSometime, backend.EndsPromptly} {
		for _, before := range []string{"nothing", "held", "held here"} {
			synctest.Test(t, func(t *testing.T) {
				f := newFaulty()
				f.ends = ends
				c := hasp.New(f, nil)
				switch before { // the store has answered before it hangs
				case "held":
					f.Driver.Acquire(t.Context(), backend.Claim{Key: "k", Token: "stranger", TTL: time.Hour})
					c.Lock(t.Context(), "k", hasp.WithMaxWait(time.Second))
				case "held here":
					l := lockNow(t, c, "k")
					go func() {
						time.Sleep(time.Minute)
						l.Unlock(t.Context())
					}()
				}
				f.set(func(f *faulty) {
					f.acquire = func(backend.Claim, func() (backend.Grant, error)) (backend.Grant, error) {
						time.Sleep(time.Hour)
						return backend.Grant{}, errNet
					}
				})

				var wg sync.WaitGroup
				var held, bounded atomic.Int32
				for i := range 2400 { // one every 50 ms, for two minutes
					wg.Go(func() {
						began := time.Now()
						ctx, cancel := context.WithTimeout(t.Context(), time.Second)
						defer cancel()
						var err error
						if i%2 == 0 {
							_, err = c.Lock(ctx, "k")
						} else {
							_, err = c.Lock(t.Context(), "k", hasp.WithMaxWait(time.Second))
							bounded.Add(1)
						}
						if late := time.Since(began); late > 1050*time.Millisecond {
							t.Errorf("%v: returned after %v", err, late)
						}
						if errors.Is(err, hasp.ErrHeld) {
							held.Add(1)
						}
						if i%2 == 1 && (err == nil || errors.Is(err, context.DeadlineExceeded)) {
							t.Errorf("max wait: %v", err)
						}
					})
					time.Sleep(50 * time.Millisecond)
				}
				wg.Wait()
				most := int32(20) // those who began before the head was not answered
				if before == "held here" {
					most += 1200 // and all of the first minute
				}
				if n := held.Load(); n > most {
					t.Errorf("ends %v, %s before: %d of 2400 were told that the key is held, want at most %d", ends, before, n, most)
				}
				time.Sleep(2 * time.Hour) // for calls that hang
				c.Close()
			})
		}
	}
}

// slowWaiter is an ordered Waiter a round trip away.
type slowWaiter struct {
	*memlock.Driver
	trip time.Duration
}

func (s slowWaiter) Traits() backend.Traits {
	tr := s.Driver.Traits()
	tr.Reach, tr.Ends = backend.Network, backend.EndsPromptly
	return tr
}

// away sleeps for a round trip, unless ctx ends first.
func (s slowWaiter) away(ctx context.Context) error {
	select {
	case <-time.After(s.trip):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s slowWaiter) Acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	if err := s.away(ctx); err != nil {
		return backend.Grant{}, err
	}
	return s.Driver.Acquire(ctx, c)
}

func (s slowWaiter) Wait(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	if err := s.away(ctx); err != nil {
		return backend.Grant{}, err
	}
	return s.Driver.Wait(ctx, c)
}

// A caller of an ordered driver waits at once on a contended key. A wait that
// is shorter than a round trip still gets an answer.
func TestShortWaitsOnAContendedKeyAreAnswered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memlock.NewStore()
		other := hasp.New(store.Driver(), nil)
		defer other.Close()
		l := lockNow(t, other, "k")
		c := hasp.New(slowWaiter{store.Driver(), 20 * time.Millisecond}, nil)
		defer c.Close()
		first := lockLater(t, c, t.Context())
		time.Sleep(time.Second)
		for d := time.Millisecond; d <= 100*time.Millisecond; d += time.Millisecond {
			_, err := c.Lock(t.Context(), "k", hasp.WithMaxWait(d))
			want(t, d.String(), err, hasp.ErrHeld)
		}
		l.Unlock(t.Context())
		<-first
	})
}

// leaver is an ordered Waiter. When its caller's context ends, it returns at once
// and leaves the clean-up of its queue entry to the engine.
type leaver struct {
	*memlock.Driver
	mu       sync.Mutex
	waited   []string
	released []string
}

func (d *leaver) Traits() backend.Traits {
	return backend.Traits{Ordered: true, Turns: 4, Reach: backend.Network, Ends: backend.EndsPromptly}
}

func (d *leaver) Wait(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	d.mu.Lock()
	d.waited = append(d.waited, c.Token)
	d.mu.Unlock()
	<-ctx.Done()
	return backend.Grant{}, errors.Join(&backend.HeldError{Owner: "stranger"}, ctx.Err())
}

func (d *leaver) Release(ctx context.Context, c backend.Claim) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.released = append(d.released, c.Token)
	return backend.ErrLost
}

// An error that matches the end of Wait's context is of unknown outcome: the
// engine releases the claim, and gives its place to no other caller.
func TestClaimOfAWaitThatWasCutShortIsReleased(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memlock.NewStore()
		stranger := hasp.New(store.Driver(), nil)
		defer stranger.Close()
		lockNow(t, stranger, "k")
		d := &leaver{Driver: store.Driver()}
		c := hasp.New(d, nil)
		defer c.Close()
		var callers sync.WaitGroup
		for i := range 2 {
			callers.Go(func() {
				_, err := c.Lock(t.Context(), "k", hasp.WithMaxWait(time.Duration(i+1)*time.Second))
				var held *backend.HeldError
				if !errors.As(err, &held) || held.Owner != "stranger" || errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("caller %d: got %v, want ErrHeld and no more", i, err)
				}
			})
			synctest.Wait()
		}
		callers.Wait()
		time.Sleep(2 * hasp.DefaultTimeout)
		d.mu.Lock()
		defer d.mu.Unlock()
		if len(d.waited) != 2 || d.waited[0] == d.waited[1] {
			t.Errorf("waited with %q, want two tokens", d.waited)
		}
		for _, token := range d.waited {
			n := 0
			for _, r := range d.released {
				if r == token {
					n++
				}
			}
			if n != 2 {
				t.Errorf("%s was released %d times, want at once and after Timeout", token, n)
			}
		}
	})
}

// The head's attempt has been unanswered for most of a Timeout. A caller behind
// it must not take the answer before that for the store's word.
func TestSilenceIsNotHeldForACallerInLine(t *testing.T) {
	for _, alone := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			f := heldByAnother(t)
			c := hasp.New(f, nil)
			ctx, cancel := context.WithCancel(t.Context())
			if !alone {
				go c.Lock(ctx, "k")
			}
			time.Sleep(time.Second)
			f.set(func(f *faulty) {
				f.acquire = func(backend.Claim, func() (backend.Grant, error)) (backend.Grant, error) {
					time.Sleep(hasp.DefaultTimeout)
					return backend.Grant{}, errNet
				}
			})
			time.Sleep(200 * time.Millisecond)
			_, err := c.Lock(t.Context(), "k", hasp.WithMaxWait(2500*time.Millisecond))
			if err == nil || errors.Is(err, hasp.ErrHeld) {
				t.Errorf("alone %v: after 2.5 s of silence: %v", alone, err)
			}
			cancel()
			time.Sleep(10 * time.Second)
			c.Close()
		})
	}
}

// blinks is an ordered driver over a network whose Wait may be cut short.
type blinks struct {
	*memlock.Driver
	turns int
	cuts  []time.Duration // when the next Waits fail; then they do not
}

func (b *blinks) Traits() backend.Traits {
	return backend.Traits{Ordered: true, Turns: b.turns, Reach: backend.Network, Ends: backend.EndsPromptly}
}

// Wait is called by one caller at a time.
func (b *blinks) Wait(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	if len(b.cuts) == 0 {
		return b.Driver.Wait(ctx, c)
	}
	cut := b.cuts[0]
	b.cuts = b.cuts[1:]
	time.Sleep(cut)
	return backend.Grant{}, errNet
}

// A Wait that goes on says nothing of the outage that ended the one before it.
func TestOutageThatIsOverIsForgotten(t *testing.T) {
	for _, turns := range []int{1, 4} {
		synctest.Test(t, func(t *testing.T) {
			store := memlock.NewStore()
			other := hasp.New(store.Driver(), nil)
			defer other.Close()
			c := hasp.New(&blinks{Driver: store.Driver(), turns: turns, cuts: []time.Duration{0, time.Minute}}, nil)
			defer c.Close()
			l := lockNow(t, other, "k")
			_, err := c.TryLock(t.Context(), "k")
			want(t, "TryLock", err, hasp.ErrHeld)
			waits := lockLater(t, c, t.Context())
			time.Sleep(30 * time.Second)
			_, err = c.TryLock(t.Context(), "k")
			want(t, "TryLock after an outage", err, hasp.ErrHeld)
			time.Sleep(time.Minute)
			l.Unlock(t.Context())
			if err := <-waits; err != nil {
				t.Errorf("two faults a minute apart: %v", err)
			}
		})
	}
}

// Callers in line behind a Wait have no answer but the one that came before it.
func TestHeldForThoseInLineBehindAWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memlock.NewStore()
		other := hasp.New(store.Driver(), nil)
		defer other.Close()
		c := hasp.New(&blinks{Driver: store.Driver(), turns: 4}, nil)
		defer c.Close()
		l := lockNow(t, other, "k")
		_, err := c.TryLock(t.Context(), "k") // now the key is sought
		want(t, "TryLock", err, hasp.ErrHeld)
		head := lockLater(t, c, t.Context())
		_, err = c.Lock(t.Context(), "k", hasp.WithMaxWait(time.Second))
		want(t, "in line", err, hasp.ErrHeld)
		l.Unlock(t.Context())
		if err := <-head; err != nil {
			t.Error(err)
		}
	})
}
