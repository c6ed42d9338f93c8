package hasp_test

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

func onlyOnce(f *faulty, hook hook) {
	f.acquire = func(q *call) error {
		f.set(func(f *faulty) { f.acquire = nil })
		return hook(q)
	}
}

func TestReplyLostOnTryLock(t *testing.T) {
	onBench(t, func(t *bench) {
		t.release = func(q *call) error {
			if q.Handle != nil { // there was no answer, and so no handle
				t.Errorf("released with the handle %v", q.Handle)
			}
			return q.send()
		}
		for times := 1; times <= 2; times++ { // twice, because the goroutine that cleans up ends in between
			onlyOnce(t.faulty, lostReply)
			wantOutage(t, "TryLock", t.tryErr("k"), errNet)
			synctest.Wait()
			t.freed("what the lost attempt took was not released", "k")
			time.Sleep(hasp.DefaultTimeout + time.Millisecond)
			synctest.Wait()
			equal(t, "releases, at once and after Timeout", t.releases(), 2*times)
		}

		// If the driver cleans up after its calls, the Client does not.
		t.cleans = true
		cleans := opened(t, t.faulty, nil)
		before := t.releases()
		onlyOnce(t.faulty, lostReply)
		wantOutage(t, "TryLock", errOf(cleans.TryLock(t.Context(), "k")), errNet)
		time.Sleep(time.Minute)
		equal(t, "releases, of which none beside the driver's own", t.releases(), before)
	})
}

func TestReplyLostOnRelease(t *testing.T) {
	onBench(t, func(t *bench) {
		l := t.lock("k")
		t.release = func(q *call) error { q.send(); return errNet }
		err := l.Unlock(t.Context())
		want(t, "Unlock", err, errNet)
		want(t, "Err", l.Err(), hasp.ErrReleased)
		want(t, "Unlock that fails again", l.Unlock(t.Context()), errNet)
		t.set(up)
		time.Sleep(time.Second) // the repeat in the background gets ErrLost, which counts as success
		want(t, "Unlock called again", l.Unlock(t.Context()), nil)
		want(t, "and again", l.Unlock(t.Context()), hasp.ErrReleased)
		equal(t, "releases: three by Unlock, and a repeat", t.releases(), 4)
		start := time.Now()
		want(t, "Close", t.Client.Close(), nil)
		within(t, "Close, when no call is in flight,", start, 0)
	})
}

// A second Unlock waits for the first, and reports its outcome.
func TestTwoUnlocksAtOnce(t *testing.T) {
	for outcome, second := range map[error]error{nil: hasp.ErrReleased, errNet: errNet} {
		onBench(t, func(t *bench) {
			t.release = func(q *call) error {
				time.Sleep(time.Second)
				return cmp.Or(outcome, q.send())
			}
			l := t.lock("k")
			first := soon(func() error { return l.Unlock(t.Context()) })
			want(t, "second", l.Unlock(t.Context()), second)
			want(t, "first", <-first, outcome)
		})
	}
}

// If a part of the store hangs, the rest is still cleaned up, in spite of the repeated releases for
// the part that hangs.
func TestCleanUpPassesAHungPartOfTheStore(t *testing.T) {
	for _, tc := range []struct {
		hangs time.Duration // how long a release for a key in the part that hangs takes
		tries int           // number of attempts at keys in that part
		every time.Duration
		most  time.Duration // longest time until the rest is cleaned up
	}{
		{time.Hour, 300, time.Millisecond, hasp.DefaultTimeout},
		{hasp.DefaultTimeout, 3000, 10 * time.Millisecond, 100 * time.Millisecond},
	} {
		withEnds(t, backend.CancelPrompt, nil, func(t *bench) {
			t.acquire = lostReply
			t.release = func(q *call) error {
				if q.Key != "well" {
					time.Sleep(tc.hangs)
					return errNet
				}
				return q.send()
			}
			unanswered := func(key string) {
				if _, err := t.TryLock(t.Context(), key); err == nil {
					t.Fatal("want no answer")
				}
			}
			for i := range tc.tries {
				unanswered(fmt.Sprint("hung", i))
				time.Sleep(tc.every)
			}
			unanswered("well")

			time.Sleep(tc.most)
			t.freed(fmt.Sprint("the key is still held after ", tc.most), "well")
			t.Client.Close()
			time.Sleep(2 * tc.hangs) // until calls that hang have ended
		})
	}
}

// The machine sleeps past the term. Then two callers of Unlock repeat the release at the same time.
func TestUnlockAgainAfterASuspend(t *testing.T) {
	onBench(t, func(t *bench) {
		suspend := hasp.Suspendable(t.Client)
		l := t.lock("k")
		t.onRelease(failing(errNet))
		want(t, "Unlock", l.Unlock(t.Context()), errNet)
		suspend(time.Hour)
		t.faulty.Break(t.Context(), "k") // the term has ended meanwhile
		time.Sleep(2 * time.Millisecond)
		t.set(up)
		var wg sync.WaitGroup
		for range 2 {
			wg.Go(func() {
				want(t, "Unlock after the term", l.Unlock(t.Context()), hasp.ErrLost)
				want(t, "Err", l.Err(), hasp.ErrLost)
			})
		}
		wg.Wait()
	})
}

// A renewal and a release get the handle of the last grant. If a renewal gives nil, the last handle
// stays.
func TestHandleIsPassedBack(t *testing.T) {
	onBench(t, func(t *bench) {
		var seen []any
		gives := []any{"first", "second", nil, "third", nil} // what each call gives
		t.set(func(f *faulty) {
			f.acquire = func(q *call) error {
				err := q.send()
				seen = append(seen, q.Handle)
				q.got.Handle = gives[0]
				gives = gives[1:]
				return err
			}
			f.renew = f.acquire
			f.release = f.acquire
		})
		l := t.lock("k")
		for range 3 {
			want(t, "Extend", l.Extend(t.Context(), time.Minute), nil)
		}
		want(t, "Unlock", l.Unlock(t.Context()), nil)
		if !slices.Equal(seen, []any{nil, "first", "second", "second", "third"}) {
			t.Errorf("calls with the handles %v", seen)
		}
	})
}

// If a grant arrives after its caller has left, or after its own term, it is released with its
// handle. If the driver's calls end with their contexts, the engine does not receive a late grant.
// The releases of the unknown outcome have no handle.
func TestLateGrantIsReleasedWithItsHandle(t *testing.T) {
	for name, tc := range map[string]struct {
		ends   backend.Cancellation
		leaves time.Duration // when the caller leaves
		late   time.Duration
		is     error
		handle any
	}{
		"left":            {leaves: time.Second, late: 2 * time.Second, is: context.DeadlineExceeded, handle: "late"},
		"left, and ended": {ends: backend.CancelPrompt, leaves: time.Second, late: 2 * time.Second, is: context.DeadlineExceeded},
		"too late":        {leaves: time.Minute, late: 25 * time.Second, is: hasp.ErrUnavailable, handle: "late"},
	} {
		runEnds(t, name, tc.ends, &hasp.Options{TTL: 20 * time.Second, Timeout: time.Minute}, func(t *bench) {
			var seen []any
			t.acquire = func(q *call) error {
				time.Sleep(tc.late)
				err := q.send()
				q.got.Handle, q.got.Until = "late", time.Time{}
				return err
			}
			t.release = func(q *call) error {
				seen = append(seen, q.Handle)
				return q.send()
			}
			start := time.Now()
			ctx := timeout(t, t.Context(), tc.leaves)
			wantOnly(t, "TryLock", errOf(t.TryLock(ctx, "k")), tc.is)
			within(t, "TryLock", start, tc.leaves)
			time.Sleep(2 * time.Minute)
			synctest.Wait()
			if len(seen) == 0 || seen[0] != tc.handle {
				t.Errorf("releases with the handles %v, want %v", seen, tc.handle)
			}
			t.freed("the late grant was not released", "k")
		})
	}
}
