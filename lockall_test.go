package hasp_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/memlock"
)

// This file tests that LockAll and Leases.Unlock make their calls at the same time, and that
// LockAll keeps its promises nevertheless.

// far makes each attempt and each release take a round trip, half of it on the way to the store.
func far(f *faulty, d time.Duration) { f.acquire, f.release = trip(d), trip(d) }

func several(n int) (keys []string) {
	for i := range n {
		keys = append(keys, fmt.Sprintf("%03d", i))
	}
	return keys
}

func TestLockAllTakesOneRoundTripForFreeKeys(t *testing.T) {
	onBench(t, func(t *bench) {
		far(t.faulty, 10*time.Millisecond)
		for _, tc := range []struct {
			keys  int
			trips time.Duration
			opts  []hasp.Option
		}{
			{2, 1, nil}, {64, 1, nil}, {65, 2, nil}, {64, 1, options{hasp.WithMaxWait(time.Second), hasp.WithFence()}},
			{4, 4, options{hasp.WithMaxWait(0), hasp.WithLinger()}},
			{4, 4, options{hasp.WithMaxWait(10 * time.Millisecond)}}, // there is no time to wait for another LockAll
		} {
			before := t.attempts()
			began := time.Now()
			ls := await.Value(t.lockAll(several(tc.keys), tc.opts...))
			equal(t, fmt.Sprintf("time of LockAll of %d", tc.keys), time.Since(began), tc.trips*10*time.Millisecond)
			equal(t, "attempts", t.attempts()-before, tc.keys)

			began = time.Now()
			unlock(t, await.Value(hasp.LockAll(ls.Context(), t.Client, several(tc.keys), hasp.WithMaxWait(0))))
			within(t, "re-entry", began, 0)
			unlock(t, ls)
			within(t, "Unlock", began, time.Duration((tc.keys+63)/64)*10*time.Millisecond)
			t.freed("it lingers", several(tc.keys)...)
			time.Sleep(time.Second) // until the gap is over
		}
		t.nothingLeft()
	})
}

// While LockAll waits for b, it holds a and none of the later keys. If it loses a meanwhile, it
// fails.
func TestLockAllWaitsWithoutLaterKeys(t *testing.T) {
	for name, wrap := range behind {
		withTwo(t, nil, func(t *bench, rival *hasp.Client) {
			far(t.faulty, 10*time.Millisecond)
			b := lockNow(t, rival, "b")
			failed := make(chan error)
			go func() {
				failed <- errOf(hasp.LockAll(t.Context(), wrap(t.Client), []string{"a", "b", "c", "d"}, hasp.WithMinHold(time.Hour)))
			}()
			time.Sleep(100 * time.Millisecond)
			equal(t, "a is free", t.free("a"), false)
			t.freed("it is held", "c", "d")

			began := time.Now()
			want(t, "Break", t.faulty.Break(t.Context(), "a"), nil)
			want(t, "LockAll of "+name, <-failed, hasp.ErrLost)
			within(t, "LockAll that has lost a key", began, hasp.DefaultTTL)
			unlock(t, b)
			time.Sleep(time.Second)
			t.freed("it is held", "a", "b", "c", "d")
			t.nothingLeft()
		})
	}
}

// behind are wrappers around a Client that LockAll must treat as the Client itself.
var behind = map[string]func(c *hasp.Client) hasp.Locker{
	"a Client":  func(c *hasp.Client) hasp.Locker { return c },
	"a wrapper": func(c *hasp.Client) hasp.Locker { return struct{ hasp.Locker }{c} },
	"a wrapper with contexts of its own": func(c *hasp.Client) hasp.Locker {
		return lockerFunc(func(ctx context.Context, key string, opts ...hasp.Option) (*hasp.Lease, error) {
			ctx, cancel := context.WithCancel(ctx)
			defer cancel()
			return c.Lock(ctx, key, opts...)
		})
	},
}

// An Unlock of one lease ends the joint context and the contexts derived from it. It does not end
// the contexts or the renewal of the other leases, whichever key LockAll had to wait for.
func TestUnlockOfOneOfSeveral(t *testing.T) {
	for name, wrap := range behind {
		for _, held := range []string{"", "a", "b"} {
			withTwo(t, nil, func(t *bench, rival *hasp.Client) {
				if held != "" {
					l := lockNow(t, rival, held)
					time.AfterFunc(time.Second, func() { l.Unlock(context.Background()) })
				}
				for i, keys := 0, []string{"a", "b", "c"}; i < len(keys); i++ {
					ls := await.Value(hasp.LockAll(t.Context(), wrap(t.Client), keys))
					unlock(t, await.Value(hasp.LockAll(ls.Context(), t.Client, keys, hasp.WithMaxWait(0))))
					derived, cancel := context.WithCancel(ls.Context())
					unlock(t, ls.All()[i])
					want(t, name+": the joint context", context.Cause(derived), hasp.ErrReleased)
					time.Sleep(3 * hasp.DefaultTTL)
					for j, l := range ls.All() {
						if j != i {
							want(t, name+": another lease", l.Context().Err(), nil)
							unlock(t, l)
						}
					}
					cancel()
				}
				t.nothingLeft()
			})
		}
	}
}

// When the first lease has ended by the clock, the joint context has ended, even if no timer has
// fired.
func TestJointContextReadsTheClockOfEachLease(t *testing.T) {
	onBench(t, func(t *bench) {
		ls := await.Value(t.lockAll([]string{"a", "b"}))
		want(t, "Extend", ls.All()[1].Extend(t.Context(), time.Hour), nil)
		hasp.Skip(t.Client, hasp.DefaultTTL)
		want(t, "the joint context", ls.Context().Err(), context.Canceled)
		want(t, "its cause", context.Cause(ls.Context()), hasp.ErrLost)
		want(t, "b", ls.All()[1].Err(), nil)
		ls.Unlock(t.Context())
	})
}

// children counts the children of a context that have not ended.
type children struct {
	context.Context
	n atomic.Int32
}

func (c *children) Value(key any) any { return nil } // so that the children register by AfterFunc

func (c *children) AfterFunc(f func()) (stop func() bool) {
	c.n.Add(1)
	stopped := context.AfterFunc(c.Context, f)
	return func() bool { c.n.Add(-1); return stopped() }
}

// After an Unlock, and after a LockAll that has failed, the caller's context has no child left.
func TestLockAllLeavesNoContext(t *testing.T) {
	withTwo(t, nil, func(t *bench, rival *hasp.Client) {
		ctx := &children{Context: t.Context()}
		ls := await.Value(hasp.LockAll(ctx, t.Client, several(3)))
		if ctx.n.Load() == 0 {
			t.Error("the context has no children")
		}
		unlock(t, ls)
		l := lockNow(t, rival, "000")
		want(t, "LockAll", errOf(hasp.LockAll(ctx, t.Client, several(3), hasp.WithMaxWait(time.Second))), hasp.ErrHeld)
		equal(t, "children that are left", ctx.n.Load(), 0)
		unlock(t, l)
	})
}

// rivals runs n calls at the same time, each with its own Client, whose round trips take up to 2
// ms. It returns the errors of the calls.
func rivals(t testing.TB, n int, run func(i int, c *hasp.Client) error) []error {
	store, errs := new(memlock.Store), make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		f := faultyOver(store)
		f.acquire = func(q *call) error { return trip(rand.N(2 * time.Millisecond))(q) }
		f.release = f.acquire
		c := await.Value(hasp.New(f, nil))
		defer c.Close()
		wg.Go(func() { errs[i] = run(i, c) })
	}
	wg.Wait()
	return errs
}

// Several LockAlls with a max wait of 0 or little more contend for some keys. One of them gets its
// keys.
func TestOneOfSeveralLockAllsWithoutWaitWins(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, wait := range []time.Duration{0, time.Microsecond, 50 * time.Millisecond} {
			for range 100 {
				won := 0
				for _, err := range rivals(t, 3, func(i int, c *hasp.Client) error {
					_, err := hasp.LockAll(t.Context(), c, several(4)[i%2:][:3], hasp.WithMaxWait(wait))
					return err
				}) {
					if err == nil {
						won++
					}
				}
				if won != 1 {
					t.Fatalf("max wait %v: %d of 3 got all keys", wait, won)
				}
			}
		}
	})
}

// A Client that takes the same keys again and again leaves gaps, as it does with Lock.
func TestLockAllLeavesGaps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		rivals(t, 2, func(i int, c *hasp.Client) error {
			if i == 1 {
				time.Sleep(time.Second)
				began := time.Now()
				for range 100 {
					unlock(t, lockNow(t, c, "001"))
				}
				within(t, "100 turns", began, 8*time.Second) // time for four holds of the other Client in each turn
				cancel()
			}
			for ctx.Err() == nil {
				if ls, err := hasp.LockAll(ctx, c, several(2)); err == nil {
					time.Sleep(20 * time.Millisecond)
					unlock(t, ls)
				}
			}
			return nil
		})
	})
}

// If the answer for a key is lost, or attempts at it fail for a while, LockAll still gets the key.
func TestLockAllAfterALostReply(t *testing.T) {
	for name, hook := range map[string]hook{"lost": lostReply, "failed": failing(errNet)} {
		runClient(t, name, nil, func(t *bench) {
			until := time.Now().Add(time.Second)
			t.acquire = func(q *call) error {
				time.Sleep(5 * time.Millisecond)
				if q.Key == "002" && time.Now().Before(until) {
					return hook(q)
				}
				return q.send()
			}
			ls := await.Value(t.lockAll(several(5)))
			unlock(t, ls)
			time.Sleep(3 * hasp.DefaultTimeout) // until the lost tokens are released twice
			t.nothingLeft()
		})
	}
}

// If its context ends or the store hangs, LockAll returns as soon as Lock would, and leaves nothing
// behind.
func TestLockAllThatIsNotAnswered(t *testing.T) {
	for _, ends := range []backend.Cancellation{backend.CancelNone, backend.CancelPrompt} {
		for _, hangs := range []string{"000", "003"} {
			withEnds(t, ends, nil, func(t *bench) {
				t.acquire = func(q *call) error {
					if q.Key >= hangs {
						time.Sleep(hasp.DefaultTimeout + time.Second/2) // so that the late answer comes before the second release
					}
					return q.send()
				}
				left := errors.New("left")
				for bound, target := range map[time.Duration]error{time.Second: left, time.Hour: hasp.ErrUnavailable} {
					ctx, cancel := context.WithCancelCause(t.Context())
					began := time.Now()
					time.AfterFunc(bound, func() { cancel(left) })
					want(t, "LockAll", errOf(hasp.LockAll(ctx, t.Client, several(5))), target)
					within(t, "LockAll", began, min(bound, hasp.DefaultTimeout)+10*time.Millisecond)
					time.Sleep(4 * hasp.DefaultTimeout) // until the late answers have come, and their tokens are released
					t.freed("it is held", several(5)...)
					t.nothingLeft()
				}
			})
		}
	}
}

// If Observe or a method of the context panics or ends the goroutine at any moment, DoAll does the
// same, and no key stays locked.
func TestSeveralKeysWithACallerThatPanics(t *testing.T) {
	for name, end := range map[string]func(){"panic": func() { panic("oops") }, "Goexit": runtime.Goexit} {
		for step, returned := int32(1), false; !returned; step++ {
			var steps atomic.Int32
			spring := func() {
				if steps.Add(1) == step {
					end()
				}
			}
			o := &hasp.Options{Observe: func(context.Context, hasp.Event) { spring() }}
			withClient(t, o, func(t *bench) {
				recovered := make(chan any)
				go func() {
					defer func() { recovered <- recover() }()
					ctx := trap{t.Context(), func(string) { spring() }}
					hasp.DoAll(ctx, t.Client, several(3), func(context.Context, *hasp.Leases) error { return nil })
					returned = true
				}()
				v := <-recovered
				if returned != (steps.Load() < step) || (v == "oops") != (name == "panic" && !returned) {
					t.Errorf("%s at step %d: returned %t, recovered %v", name, step, returned, v)
				}
				time.Sleep(time.Second) // until calls of unknown outcome are released
				t.freed("it is held", several(3)...)
				t.nothingLeft()
			})
		}
	}
}
