package hasp_test

import (
	"cmp"
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
)

// wantFree fails the test unless the store says that "k" is free, or held if free is false.
func (t *bench) wantFree(free bool) {
	t.Helper()
	if t.free("k") != free {
		t.Errorf("held is %v after %s, want %v", free, time.Now().Format("05.000"), !free)
	}
}

// pair locks "k" with WithLinger and unlocks it.
func (t *bench) pair(opts ...hasp.Option) {
	t.Helper()
	unlock(t, t.lock("k", append(opts, hasp.WithLinger())...))
}

func TestLinger(t *testing.T) {
	const d = 50 * time.Millisecond
	lingers := hasp.WithLinger()
	for _, tc := range []struct {
		name string
		run  func(t *bench)
		a, r int // attempts and releases
	}{
		{"one hold for many pairs", func(t *bench) {
			for range 100 {
				l := t.lock("k", lingers)
				unlock(t, l)
				want(t, "Err", l.Err(), hasp.ErrReleased)
				want(t, "a second Unlock", l.Unlock(t.Context()), hasp.ErrReleased)
				if l.Context().Err() == nil {
					t.Fatal("the lease goes on")
				}
				t.wantFree(false)
			}
		}, 1, 1},
		{"a caller without linger", func(t *bench) {
			t.pair()
			unlock(t, await.Value(t.TryLock(t.Context(), "k")))
			t.wantFree(true)
		}, 1, 1},
		{"another claim", func(t *bench) {
			for _, o := range (options{hasp.WithFence(), hasp.WithShared(), hasp.WithTTL(time.Hour), hasp.WithMaxHold(time.Hour), hasp.WithoutRenewal()}) {
				t.pair()
				unlock(t, await.Value(t.TryLock(t.Context(), "k", lingers, o)))
			}
			time.Sleep(d)
		}, 10, 10},
		{"not for these", func(t *bench) {
			for _, o := range (options{hasp.WithFence(), hasp.WithShared(), hasp.WithMaxHold(time.Hour), hasp.WithoutRenewal(), hasp.WithSlots(1)}) {
				t.pair(o)
				t.wantFree(true)
			}
			l := t.lock("k", lingers)
			want(t, "Extend", l.Extend(t.Context(), time.Hour), nil)
			unlock(t, l)
			t.wantFree(true)
			t.pair(hasp.WithMinHold(time.Millisecond))
			time.Sleep(time.Millisecond)
			t.wantFree(true)
		}, 8, 8}, // WithSlots locks k#queue and k#0
		{"until d after the grant", func(t *bench) {
			t.pair()
			time.Sleep(d - time.Millisecond)
			t.pair()
			t.wantFree(false)
			time.Sleep(2 * time.Millisecond)
			t.wantFree(true)
			t.nothingLeft()
		}, 1, 1},
		{"a distant store", func(t *bench) {
			t.onAcquire(late(40 * time.Millisecond))
			t.pair()
			time.Sleep(d - time.Millisecond)
			t.pair()
		}, 1, 1},
		{"the inner lease of a re-entry", func(t *bench) {
			outer := t.lock("k", lingers)
			unlock(t, t.lockIn(outer.Context(), "k"))
			unlock(t, outer)
			t.wantFree(false)
			time.Sleep(d)
		}, 1, 1},
		{"callers that wait come first", func(t *bench) {
			l := t.lock("k", lingers)
			got := make(chan *hasp.Lease)
			for range 2 {
				go func() { got <- t.lock("k", lingers) }()
			}
			time.Sleep(time.Millisecond)
			unlock(t, l)
			unlock(t, <-got)
			unlock(t, <-got)
			time.Sleep(d)
		}, 1, 1},
		{"Close", func(t *bench) {
			t.pair()
			began := time.Now()
			want(t, "Close", t.Client.Close(), nil)
			within(t, "Close", began, 0)
		}, 1, 1},
		{"a release that hangs", func(t *bench) {
			t.onRelease(slow(time.Second))
			for _, long := range []time.Duration{10 * time.Millisecond, time.Hour} {
				t.pair()
				ctx := timeout(t, t.Context(), long)
				began := time.Now()
				err := errOf(t.Lock(ctx, "k", hasp.WithFence(), hasp.WithMaxWait(time.Hour+10*time.Millisecond-long)))
				want(t, "Lock", err, cmp.Or(ctx.Err(), hasp.ErrHeld))
				within(t, "a wait of 10 ms", began, 10*time.Millisecond)
				time.Sleep(2 * time.Second)
			}
		}, 2, 2},
		{"a store that hangs", func(t *bench) {
			t.pair()
			t.onRelease(hung)
			began := time.Now()
			want(t, "TryLock", t.tryErr("k", hasp.WithFence()), hasp.ErrUnavailable)
			within(t, "TryLock", began, hasp.DefaultTimeout)
			t.onRelease(nil)
		}, 1, 1},
		{"callers whom the hold suits and callers whom it does not", func(t *bench) {
			t.onAcquire(slow(time.Millisecond))
			var all sync.WaitGroup
			for i := range 6 {
				all.Go(func() {
					o := options{lingers, hasp.WithFence()}[i%2]
					for range 50 {
						if l, err := t.TryLock(t.Context(), "k", o); err == nil {
							time.Sleep(time.Duration(i) * time.Millisecond)
							unlock(t, l)
						}
						time.Sleep(time.Duration(7-i) * time.Millisecond)
					}
				})
			}
			all.Wait()
			time.Sleep(time.Second)
			t.wantFree(true)
			a := t.attempts()
			t.set(func(f *faulty) { f.acquired, f.released = f.acquired[:1], f.released[:1] })
			if a < 10 { // otherwise the callers have not met
				t.Error("attempts", a)
			}
		}, 1, 1},
		{"a Break that fails", func(t *bench) {
			dead, cancel := context.WithCancel(t.Context())
			cancel()
			for range 10 {
				t.pair()
				t.Client.Break(dead, "k")
				time.Sleep(time.Millisecond) // until the key is released
			}
			time.Sleep(d)
			t.wantFree(true)
		}, 10, 10},
		{"Close with many keys", func(t *bench) {
			for i := range 2000 {
				unlock(t, t.lock(fmt.Sprint(i), lingers))
			}
			t.onRelease(slow(time.Millisecond))
			want(t, "Close", t.Client.Close(), nil)
		}, 2000, 2000},
		{"a release whose answer is lost", func(t *bench) {
			t.pair()
			lost := 0
			t.onRelease(func(q *call) error {
				if lost++; lost == 1 {
					q.send()
					return errNet
				}
				return q.send()
			})
			unlock(t, t.lock("k", hasp.WithFence()))
		}, 2, 3},
	} {
		runClient(t, tc.name, nil, func(t *bench) {
			tc.run(t)
			time.Sleep(time.Second)
			if a, _, r := t.calls(); a != tc.a || r != tc.r {
				t.Errorf("%d attempts and %d releases, want %d and %d", a, r, tc.a, tc.r)
			}
			t.nothingLeft()
		})
	}
}

// A key that lingers is renewed, and it can be lost. No event reports that loss.
func TestLingerIsRenewedAndLost(t *testing.T) {
	var s seen
	withClient(t, &hasp.Options{TTL: 100 * time.Millisecond, Observe: s.observe}, func(t *bench) {
		t.pair()
		time.Sleep(20 * time.Millisecond)
		want(t, "Break", t.faulty.Break(t.Context(), "k"), nil)
		time.Sleep(20 * time.Millisecond) // the renewal, a third of the term after the grant, finds that the hold is lost
		if _, renewals, releases := t.calls(); renewals != 1 || releases != 1 {
			t.Errorf("%d renewals and %d releases, want one of each", renewals, releases)
		}

		// The grant comes late, and no reply to a renewal comes. So the term ends before the linger.
		t.set(func(f *faulty) {
			f.acquire = late(80 * time.Millisecond)
			f.renew = lostReply
		})
		t.pair()
		t.wantFree(false)
		time.Sleep(20 * time.Millisecond)
		t.wantFree(true)
		// The renewal of the second hold is due at its grant, so it may fail before the Unlock.
		if len(s.of(hasp.EventLost)) > 0 || len(s.of(hasp.EventReleased)) != 2 {
			t.Errorf("events %+v, want two releases and no loss", s.all)
		}
	})
}

// A caller that cannot use a key that lingers gets the key before the callers that come later. Also
// with an Ordered driver a busy Client leaves a gap, for programs that do not use its queue.
func TestLingerKeepsNobodyOut(t *testing.T) {
	for name, traits := range map[string]backend.Traits{"in no order": inNoOrder, "ordered": inOrderOfArrival} {
		t.Run(name, func(t *testing.T) {
			release := func(q *call) error {
				if q.Key == "slow" {
					time.Sleep(10 * time.Millisecond)
				}
				return q.send()
			}
			withRival(t, hooked{traits: traits, release: release}, func(t *bench, rival *hasp.Lease) {
				unlock(t, t.lock("slow", hasp.WithLinger()))
				var order []int
				var all sync.WaitGroup
				for i := range 5 {
					o := hasp.WithTTL(time.Hour + time.Duration(i)) // no caller can use the hold of another one
					all.Go(func() {
						l := t.lock("slow", o)
						order = append(order, i)
						unlock(t, l)
					})
					time.Sleep(time.Millisecond)
				}
				all.Wait()
				inOrder(t, order, 5)

				unlock(t, rival)
				t.pair()
				time.Sleep(50 * time.Millisecond)
				began := time.Now()
				l := t.lock("k")
				if gap := time.Since(began); gap < 9*time.Millisecond || gap > 10*time.Millisecond {
					t.Errorf("the key was taken again after %v", gap)
				}
				unlock(t, l)
			})
		})
	}
}
