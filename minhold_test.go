package hasp_test

import (
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
)

// keptFor fails the test unless key stays held for d from now, and is free after that. RetryAfter
// of the refusal must be d.
func (t *bench) keptFor(key string, d time.Duration) {
	t.Helper()
	c := backend.Claim{Key: key, Token: "stranger", TTL: time.Minute, Timeout: time.Second}
	rest := refusal(t, errOf(t.Driver.Acquire(t.Context(), c))).RetryAfter
	between(t, "RetryAfter", rest, d, d+10*time.Millisecond) // after a suspend, two clocks differ a bit
	time.Sleep(rest - 1)
	if t.free(key) {
		t.Errorf("the key was free before %v had passed", d)
	}
	time.Sleep(time.Nanosecond)
	t.freed("the key is held after the min hold", key)
}

func TestMinHoldKeepsTheKeyAfterUnlock(t *testing.T) {
	for _, tc := range []struct {
		name  string
		min   time.Duration // the min hold
		opts  []hasp.Option
		held  time.Duration // time until Unlock, without the time that the machine slept
		slept time.Duration
		kept  time.Duration // how long the key is held after Unlock
	}{
		{name: "shorter than the term", min: 5 * time.Second, held: time.Second, kept: 4 * time.Second},
		{name: "longer than the term", min: 5 * time.Second, opts: options{hasp.WithTTL(time.Second)}, held: time.Second, kept: 4 * time.Second},
		{name: "with several renewals", min: time.Minute, held: 50 * time.Second, kept: 10 * time.Second},
		{name: "without renewal", min: time.Minute, opts: options{hasp.WithoutRenewal()}, held: 29 * time.Second, kept: 31 * time.Second},
		{name: "with a max hold", min: time.Minute, opts: options{hasp.WithMaxHold(time.Minute)}, held: time.Second, kept: 59 * time.Second},
		{name: "that is over", min: time.Minute, held: time.Minute},
		{name: "of zero"},
		{name: "across a suspend", min: 20 * time.Second, held: time.Second, slept: 15 * time.Second, kept: 4 * time.Second},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var s seen
			withClient(t, &hasp.Options{Observe: s.observe}, func(t *bench) {
				suspend := hasp.Suspendable(t.Client)
				l := t.lock("k", append(tc.opts, hasp.WithMinHold(tc.min))...)
				suspend(tc.slept)
				time.Sleep(tc.held)
				start := time.Now()
				unlock(t, l)
				within(t, "Unlock", start, 0)
				want(t, "Err", l.Err(), hasp.ErrReleased)
				want(t, "a second Unlock", l.Unlock(t.Context()), hasp.ErrReleased)
				if tc.kept == 0 {
					t.freed("the key is held after Unlock", "k")
				} else {
					want(t, "TryLock of the same Client", t.tryErr("k"), hasp.ErrHeld)
					t.keptFor("k", tc.kept)
				}
				t.nothingLeft()
				equal(t, "losses", len(s.of(hasp.EventLost)), 0)
			})
		})
	}
}

func TestMinHoldUnderReentry(t *testing.T) {
	none := hasp.WithMinHold(0)
	for _, tc := range []struct {
		name  string
		outer hasp.Option
		inner time.Duration // the min hold of the inner Lock, which comes after a second
		kept  time.Duration // how long the key is held after the last Unlock, which comes after two seconds
	}{
		{"that ends last outside", hasp.WithMinHold(20 * time.Second), 10 * time.Second, 18 * time.Second},
		{"that ends last inside", hasp.WithMinHold(10 * time.Second), 20 * time.Second, 19 * time.Second},
		{"longer than the term inside", none, 10 * time.Minute, 10*time.Minute - time.Second},
		{"longer than the max hold of the outer lease", hasp.WithMaxHold(10 * time.Second), time.Minute, 59 * time.Second},
		{"longer than an outer lease without renewal", hasp.WithoutRenewal(), time.Minute, 59 * time.Second},
	} {
		runClient(t, tc.name, nil, func(t *bench) {
			outer := t.lock("k", tc.outer)
			time.Sleep(time.Second)
			inner := t.lockIn(outer.Context(), "k", hasp.WithMinHold(tc.inner))
			unlock(t, inner)
			equal(t, "releases by the Unlock of the inner lease", t.releases(), 0)
			time.Sleep(time.Second)
			unlock(t, outer)
			t.keptFor("k", tc.kept)
		})
	}
}

// If the first caller has a min hold, the next caller in line asks the store, and gets the key when
// the min hold ends. If only the next caller has a min hold, the hold is handed over.
func TestMinHoldInLine(t *testing.T) {
	for _, tc := range []struct {
		name        string
		first, next []hasp.Option
		waits       time.Duration
		asks        int // attempts of both callers
	}{
		{"of the first", options{hasp.WithMinHold(10 * time.Second)}, nil, 10 * time.Second, 2},
		{"of the first, and over", options{hasp.WithMinHold(1)}, nil, 0, 2},
		{"of the next", nil, options{hasp.WithMinHold(10 * time.Second)}, 0, 1},
	} {
		runClient(t, tc.name, nil, func(t *bench) {
			start := time.Now()
			l := t.lock("k", tc.first...)
			got := t.lockSoon(t.Context(), "k", tc.next...)
			time.Sleep(time.Millisecond)
			unlock(t, l)
			next := <-got
			between(t, "the wait of the next caller", time.Since(start), tc.waits, tc.waits+100*time.Millisecond)
			if a := t.attempts(); a < tc.asks || tc.asks == 1 && a > 1 {
				t.Errorf("%d attempts, want %d", a, tc.asks)
			}
			unlock(t, next)
			if tc.next != nil {
				t.keptFor("k", 10*time.Second)
			}
		})
	}
}

// If the outcome of a release is unknown, it is repeated with the same KeepUntil, so the key is not
// free too early.
func TestMinHoldOfUnknownOutcome(t *testing.T) {
	for _, carried := range []bool{false, true} {
		for _, again := range []bool{false, true} {
			onBench(t, func(t *bench) {
				l := t.lock("k", hasp.WithMinHold(10*time.Second))
				end := time.Now().Add(10 * time.Second)
				var ends []time.Time
				t.onRelease(func(q *call) error {
					ends = append(ends, q.KeepUntil)
					if carried {
						q.send()
					}
					return errNet
				})
				want(t, "Unlock", l.Unlock(t.Context()), errNet)
				time.Sleep(time.Second)
				t.set(up)
				if again {
					want(t, "Unlock called again", l.Unlock(t.Context()), nil)
				}
				time.Sleep(time.Until(end.Add(-time.Second)))
				t.keptFor("k", time.Second)
				want(t, "Unlock in the end", l.Unlock(t.Context()), map[bool]error{true: hasp.ErrReleased}[again])
				for _, at := range ends {
					if !at.Equal(end) {
						t.Errorf("a release until %v, want %v", at, end)
					}
				}
			})
		}
	}
}

// The lease is lost by the Client's clock while the store cannot be reached. The store still has
// the hold, so Unlock releases it with the min hold.
func TestMinHoldOfALeaseThatLapsed(t *testing.T) {
	onBench(t, func(t *bench) {
		outer := t.lock("k")
		t.set(down)
		t.lockIn(outer.Context(), "k", hasp.WithMinHold(40*time.Second))
		time.Sleep(30*time.Second - time.Millisecond) // the deadline has passed, but the term in the store has not ended
		want(t, "Err", outer.Err(), hasp.ErrLost)
		t.set(up)
		want(t, "Unlock", outer.Unlock(t.Context()), hasp.ErrLost)
		synctest.Wait()
		t.keptFor("k", 10*time.Second+time.Millisecond)
	})
}

// If a renewal finds that the hold is lost, the engine releases the token, in case a part of the
// store still has it. That release does not keep the key.
func TestMinHoldOfALostLeaseKeepsNothing(t *testing.T) {
	onBench(t, func(t *bench) {
		l := t.lock("k", hasp.WithMinHold(time.Minute))
		var kept atomic.Bool
		t.set(func(f *faulty) {
			f.renew = failing(hasp.ErrLost)
			f.release = func(q *call) error {
				if !q.KeepUntil.IsZero() {
					kept.Store(true)
				}
				return q.send()
			}
		})
		<-l.Context().Done()
		time.Sleep(time.Second)
		if kept.Load() {
			t.Error("a release after a loss keeps the key")
		}
		t.freed("the key is held after its loss", "k")
	})
}

func TestLockAllKeepsEachKey(t *testing.T) {
	onBench(t, func(t *bench) {
		unlock(t, await.Value(t.lockAll([]string{"a", "b"}, hasp.WithMinHold(time.Hour))))
		time.Sleep(time.Hour - 1)
		equal(t, "a key is free before the min hold has passed", t.free("a") || t.free("b"), false)
	})
}
