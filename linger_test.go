package hasp_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
)

// recalling is a faulty driver that is a Recaller.
type recalling struct {
	*faulty
	err error // what Recalls returns

	mu sync.Mutex
	id string
	f  func(key string) // nil until the Client receives messages
}

func (d *recalling) Recalls(_ context.Context, id string, f func(key string)) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.id, d.f = id, f
	return d.err
}

// recall acts as the driver of another process whose caller was refused key.
func (d *recalling) recall(key string) {
	d.faulty.mu.Lock()
	token := d.acquired[len(d.acquired)-1]
	d.faulty.mu.Unlock()
	d.mu.Lock()
	f := d.f
	d.mu.Unlock()
	if strings.HasPrefix(token, backend.RecallMark+d.id+backend.RecallMark) {
		f(key)
	}
}

// withRecalling is withClient with a recalling driver.
func withRecalling(t *testing.T, o *hasp.Options, run func(t *testing.T, d *recalling, c *hasp.Client)) {
	t.Helper()
	withClient(t, nil, func(t *testing.T, f *faulty, _ *hasp.Client) {
		d := &recalling{faulty: f}
		c := await.Value(hasp.New(d, o))
		defer c.Close()
		unlock(t, lockNow(t, c, "k", hasp.WithLinger(time.Millisecond))) // from then on, the Client receives messages
		time.Sleep(time.Second)
		d.set(func(f *faulty) { f.acquired, f.released = nil, nil })
		run(t, d, c)
	})
}

// wantFree fails the test unless the store says that "k" is free, or held if free is false.
func wantFree(t *testing.T, d backend.Inspector, free bool) {
	t.Helper()
	if s := await.Value(d.Inspect(t.Context(), "k")); s.Held == free {
		t.Errorf("held is %v after %s, want %v", s.Held, time.Now().Format("05.000"), !free)
	}
}

func TestLinger(t *testing.T) {
	const d = 40 * time.Millisecond
	lingers := hasp.WithLinger(d)
	for _, tc := range []struct {
		name string
		run  func(t *testing.T, f *faulty, c *hasp.Client)
		a, r int // attempts and releases
	}{
		{"one hold for many pairs", func(t *testing.T, f *faulty, c *hasp.Client) {
			for range 100 {
				l := lockNow(t, c, "k", lingers)
				unlock(t, l)
				want(t, "Err", l.Err(), hasp.ErrReleased)
				want(t, "a second Unlock", l.Unlock(t.Context()), hasp.ErrReleased)
				if l.Context().Err() == nil {
					t.Fatal("the lease goes on")
				}
				wantFree(t, f, false)
			}
		}, 1, 1},
		{"a caller without linger", func(t *testing.T, f *faulty, c *hasp.Client) {
			unlock(t, lockNow(t, c, "k", lingers))
			unlock(t, await.Value(c.TryLock(t.Context(), "k")))
			wantFree(t, f, true)
		}, 1, 1},
		{"another claim", func(t *testing.T, f *faulty, c *hasp.Client) {
			for _, o := range []hasp.Option{hasp.WithFence(), hasp.WithShared(), hasp.WithTTL(time.Hour), hasp.WithMaxHold(time.Hour), hasp.WithoutRenewal()} {
				unlock(t, lockNow(t, c, "k", lingers))
				unlock(t, await.Value(c.TryLock(t.Context(), "k", lingers, o)))
			}
			time.Sleep(d)
		}, 10, 10},
		{"not for these", func(t *testing.T, f *faulty, c *hasp.Client) {
			for _, o := range []hasp.Option{hasp.WithFence(), hasp.WithShared(), hasp.WithMaxHold(time.Hour), hasp.WithoutRenewal(), hasp.WithSlots(1)} {
				unlock(t, lockNow(t, c, "k", lingers, o))
				wantFree(t, f, true)
			}
			l := lockNow(t, c, "k", lingers)
			want(t, "Extend", l.Extend(t.Context(), time.Hour), nil)
			unlock(t, l)
			wantFree(t, f, true)
			unlock(t, lockNow(t, c, "k", lingers, hasp.WithMinHold(time.Millisecond)))
			time.Sleep(time.Millisecond)
			wantFree(t, f, true)
		}, 8, 8}, // WithSlots locks k#queue and k#0
		{"until d after the grant", func(t *testing.T, f *faulty, c *hasp.Client) {
			unlock(t, lockNow(t, c, "k", lingers))
			time.Sleep(d - time.Millisecond)
			unlock(t, lockNow(t, c, "k", lingers))
			wantFree(t, f, false)
			time.Sleep(2 * time.Millisecond)
			wantFree(t, f, true)
			nothingLeft(t, c)
		}, 1, 1},
		{"a gap follows", func(t *testing.T, f *faulty, c *hasp.Client) {
			unlock(t, lockNow(t, c, "k", lingers))
			time.Sleep(d + time.Millisecond/2) // the gap is longer than half a millisecond
			began := time.Now()
			unlock(t, lockNow(t, c, "k"))
			if time.Since(began) == 0 {
				t.Error("the key was taken again at once")
			}
		}, 2, 2},
		{"at most 50 ms where nobody can recall", func(t *testing.T, f *faulty, c *hasp.Client) {
			unlock(t, lockNow(t, c, "k", hasp.WithLinger(time.Hour)))
			time.Sleep(49 * time.Millisecond)
			wantFree(t, f, false)
			time.Sleep(2 * time.Millisecond)
			wantFree(t, f, true)
		}, 1, 1},
		{"the inner lease of a re-entry", func(t *testing.T, f *faulty, c *hasp.Client) {
			outer := lockNow(t, c, "k", lingers)
			unlock(t, lockIn(t, c, outer.Context(), "k"))
			unlock(t, outer)
			wantFree(t, f, false)
			time.Sleep(d)
		}, 1, 1},
		{"callers that wait come first", func(t *testing.T, f *faulty, c *hasp.Client) {
			l := lockNow(t, c, "k", lingers)
			got := make(chan *hasp.Lease)
			for range 2 {
				go func() { got <- lockNow(t, c, "k", lingers) }()
			}
			time.Sleep(time.Millisecond)
			unlock(t, l)
			unlock(t, <-got)
			unlock(t, <-got)
			time.Sleep(d)
		}, 1, 1},
		{"Break", func(t *testing.T, f *faulty, c *hasp.Client) {
			unlock(t, lockNow(t, c, "k", lingers))
			want(t, "Break", c.Break(t.Context(), "k"), nil)
			time.Sleep(time.Millisecond)
			unlock(t, await.Value(c.TryLock(t.Context(), "k")))
		}, 2, 2},
		{"Break during the hold", func(t *testing.T, f *faulty, c *hasp.Client) {
			l := lockNow(t, c, "k", lingers)
			want(t, "Break", c.Break(t.Context(), "k"), nil)
			want(t, "Unlock", l.Unlock(t.Context()), hasp.ErrLost)
			unlock(t, lockNow(t, c, "k"))
		}, 2, 2},
		{"Close", func(t *testing.T, f *faulty, c *hasp.Client) {
			unlock(t, lockNow(t, c, "k", lingers))
			began := time.Now()
			want(t, "Close", c.Close(), nil)
			within(t, "Close", began, 0)
		}, 1, 1},
		{"a release that hangs", func(t *testing.T, f *faulty, c *hasp.Client) {
			f.set(func(f *faulty) {
				f.release = func(_ backend.Claim, send func() error) error { time.Sleep(time.Second); return send() }
			})
			ctx := timeout(t, t.Context(), 10*time.Millisecond)
			unlock(t, lockNow(t, c, "k", lingers))
			began := time.Now()
			want(t, "Lock", errOf(c.Lock(ctx, "k", hasp.WithFence())), context.DeadlineExceeded)
			within(t, "a wait of 10 ms", began, 10*time.Millisecond)
			time.Sleep(2 * time.Second)
			unlock(t, lockNow(t, c, "k", lingers))
			began = time.Now()
			want(t, "Lock", errOf(c.Lock(t.Context(), "k", hasp.WithFence(), hasp.WithMaxWait(10*time.Millisecond))), hasp.ErrHeld)
			within(t, "a wait of 10 ms", began, 10*time.Millisecond)
			time.Sleep(2 * time.Second)
		}, 2, 2},
		{"a store that hangs", func(t *testing.T, f *faulty, c *hasp.Client) {
			unlock(t, lockNow(t, c, "k", lingers))
			f.set(func(f *faulty) { f.release = hungRelease })
			began := time.Now()
			want(t, "TryLock", errOf(c.TryLock(t.Context(), "k", hasp.WithFence())), hasp.ErrUnavailable)
			within(t, "TryLock", began, hasp.DefaultTimeout)
			f.set(func(f *faulty) { f.release = nil })
			time.Sleep(2 * time.Hour)
		}, 1, 1},
		{"callers whom the hold suits and callers whom it does not", func(t *testing.T, f *faulty, c *hasp.Client) {
			f.set(func(f *faulty) { f.acquire = slowAcquire(time.Millisecond) })
			var all sync.WaitGroup
			for i := range 6 {
				all.Go(func() {
					o := []hasp.Option{lingers, hasp.WithFence()}[i%2]
					for range 50 {
						if l, err := c.TryLock(t.Context(), "k", o); err == nil {
							time.Sleep(time.Duration(i) * time.Millisecond)
							unlock(t, l)
						}
						time.Sleep(time.Duration(7-i) * time.Millisecond)
					}
				})
			}
			all.Wait()
			time.Sleep(time.Second)
			wantFree(t, f, true)
			a := f.attempts()
			f.set(func(f *faulty) { f.acquired, f.released = f.acquired[:1], f.released[:1] })
			if a < 10 { // otherwise the callers have not met
				t.Error("attempts", a)
			}
		}, 1, 1},
		{"a Break that fails", func(t *testing.T, f *faulty, c *hasp.Client) {
			dead, cancel := context.WithCancel(t.Context())
			cancel()
			for range 10 {
				unlock(t, lockNow(t, c, "k", lingers))
				c.Break(dead, "k")
				time.Sleep(time.Millisecond) // until the key is released
			}
			time.Sleep(d)
			wantFree(t, f, true)
		}, 10, 10},
		{"Close with many keys", func(t *testing.T, f *faulty, c *hasp.Client) {
			for i := range 2000 {
				unlock(t, lockNow(t, c, fmt.Sprint(i), lingers))
			}
			f.set(func(f *faulty) {
				f.release = func(_ backend.Claim, send func() error) error { time.Sleep(time.Millisecond); return send() }
			})
			want(t, "Close", c.Close(), nil)
		}, 2000, 2000},
		{"a release whose answer is lost", func(t *testing.T, f *faulty, c *hasp.Client) {
			unlock(t, lockNow(t, c, "k", lingers))
			lost := 0
			f.set(func(f *faulty) {
				f.release = func(_ backend.Claim, send func() error) error {
					if lost++; lost == 1 {
						send()
						return errNet
					}
					return send()
				}
			})
			unlock(t, lockNow(t, c, "k", hasp.WithFence()))
		}, 2, 3},
	} {
		t.Run(tc.name, func(t *testing.T) {
			withClient(t, nil, func(t *testing.T, f *faulty, c *hasp.Client) {
				tc.run(t, f, c)
				time.Sleep(time.Second)
				if a, _, r := f.calls(); a != tc.a || r != tc.r {
					t.Errorf("%d attempts and %d releases, want %d and %d", a, r, tc.a, tc.r)
				}
				nothingLeft(t, c)
			})
		})
	}
}

// A key that lingers is renewed, and it can be lost. No event reports that loss.
func TestLingerIsRenewedAndLost(t *testing.T) {
	var kinds []hasp.EventKind
	o := &hasp.Options{Observe: func(_ context.Context, e hasp.Event) { kinds = append(kinds, e.Kind) }}
	withRecalling(t, o, func(t *testing.T, d *recalling, c *hasp.Client) {
		kinds = nil
		unlock(t, lockNow(t, c, "k", hasp.WithLinger(time.Hour)))
		time.Sleep(10 * time.Minute)
		wantFree(t, d, false)
		want(t, "Break", d.Break(t.Context(), "k"), nil)
		time.Sleep(time.Minute) // the next renewal finds that the hold is lost
		unlock(t, lockNow(t, c, "k", hasp.WithLinger(time.Hour)))
		d.set(down)
		time.Sleep(2 * time.Minute) // no renewal is answered for a whole term, and no release after it
		nothingLeft(t, c)
		d.set(func(f *faulty) { f.acquire, f.renew, f.release = nil, nil, nil })
		unlock(t, lockNow(t, c, "k"))
		if len(kinds) != 9 {
			t.Errorf("events %v, want three for each of three leases", kinds)
		}

		// The replies to renewals are lost, so the hold ends here before it ends in the store.
		time.Sleep(time.Minute)
		unlock(t, lockNow(t, c, "k", hasp.WithLinger(time.Hour)))
		d.set(func(f *faulty) { f.renew = renewal(lostReply) })
		time.Sleep(hasp.DefaultTTL)
		wantFree(t, d, true)
	})
}

func TestRecall(t *testing.T) {
	const hour = time.Hour
	withRecalling(t, nil, func(t *testing.T, d *recalling, c *hasp.Client) {
		unlock(t, lockNow(t, c, "k", hasp.WithLinger(hour)))
		time.Sleep(time.Minute)
		wantFree(t, d, false)
		d.recall("k")
		time.Sleep(time.Millisecond)
		wantFree(t, d, true)

		// A hold that was granted just now lingers until 2 ms after its grant, in spite of the
		// message. Then this Client leaves the key free for 3 ms.
		time.Sleep(time.Minute)
		began := time.Now()
		unlock(t, lockNow(t, c, "k", hasp.WithLinger(hour)))
		d.recall("k")
		time.Sleep(time.Millisecond)
		unlock(t, lockNow(t, c, "k", hasp.WithLinger(hour)))
		wantFree(t, d, false)
		time.Sleep(2 * time.Millisecond)
		wantFree(t, d, true)
		unlock(t, await.Value(c.Lock(t.Context(), "k")))
		equal(t, "time until the next hold", time.Since(began), 5*time.Millisecond)

		// If the message comes while a caller has the key, the key does not linger after the
		// Unlock.
		time.Sleep(time.Minute)
		l := lockNow(t, c, "k", hasp.WithLinger(hour))
		time.Sleep(20 * time.Millisecond)
		d.recall("k")
		d.recall("unknown")
		unlock(t, l)
		wantFree(t, d, true)

		// A busy loop may keep the goroutine of the message from mu. Then the Unlock handles the
		// message.
		time.Sleep(time.Minute)
		l = lockNow(t, c, "k", hasp.WithLinger(hour))
		time.Sleep(20 * time.Millisecond)
		hasp.LeaveRecall(c, "k")
		unlock(t, l)
		wantFree(t, d, true)
		time.Sleep(time.Second)
		nothingLeft(t, c)
	})
}

// While the Client does not receive messages yet, a hold lingers for 2 ms, because its token has
// no mark.
func TestLingerBeforeRecallsArrive(t *testing.T) {
	withClient(t, nil, func(t *testing.T, f *faulty, _ *hasp.Client) {
		d := &recalling{faulty: f, err: errNet}
		c := await.Value(hasp.New(d, nil))
		defer c.Close()
		for range 3 {
			unlock(t, lockNow(t, c, "k", hasp.WithLinger(time.Hour)))
			time.Sleep(time.Millisecond)
			wantFree(t, d, false)
			time.Sleep(2 * time.Millisecond)
			wantFree(t, d, true)
			time.Sleep(time.Second)
		}
		d.err = nil
		unlock(t, lockNow(t, c, "k", hasp.WithLinger(time.Hour)))
		time.Sleep(time.Second)
		unlock(t, lockNow(t, c, "k", hasp.WithLinger(time.Hour)))
		time.Sleep(time.Second)
		wantFree(t, d, false)
	})
}
