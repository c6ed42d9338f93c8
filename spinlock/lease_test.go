package spinlock_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/spinlock"
)

// Tests of leases kept in Redis, through package hasp. Where time matters it
// is virtual: the real go-redis talks to miniredis within a bubble.

// virtual runs f in a bubble, with two clients of one Redis: each of another
// process, as far as anybody can tell. The first goes through the proxy.
func virtual(t *testing.T, f func(t *testing.T, v *redistest.VirtualServer, a, b *hasp.Client)) {
	synctest.Test(t, func(t *testing.T) {
		v := redistest.Virtual(t)
		a := hasp.New(spinlock.New(v.Client(), nil), nil)
		b := hasp.New(spinlock.New(v.Direct(), nil), nil)
		f(t, v, a, b)
		a.Close()
		b.Close()
	})
}

func lock(t *testing.T, c *hasp.Client, opts ...hasp.Option) *hasp.Lease {
	t.Helper()
	lease, err := c.Lock(t.Context(), "k", opts...)
	if err != nil {
		t.Fatalf("lock: %v", err)
	}
	return lease
}

func TestRenewalHoldsPastManyTerms(t *testing.T) {
	virtual(t, func(t *testing.T, v *redistest.VirtualServer, a, b *hasp.Client) {
		lease := lock(t, a)
		for range 20 {
			time.Sleep(hasp.DefaultTTL)
			if _, err := b.TryLock(t.Context(), "k"); !errors.Is(err, hasp.ErrHeld) || lease.Err() != nil {
				t.Fatalf("trylock: %v; lease: %v", err, lease.Err())
			}
		}
		if err := lease.Unlock(t.Context()); err != nil {
			t.Error(err)
		}
		v.Proxy.Commands()
		time.Sleep(time.Hour)
		if got := v.Proxy.Commands(); len(got) > 0 {
			t.Errorf("after Unlock: %q", got)
		}
		lock(t, b).Unlock(t.Context())
	})
}

func TestWaiterTakesOverFromADeadHolder(t *testing.T) {
	virtual(t, func(t *testing.T, v *redistest.VirtualServer, a, b *hasp.Client) {
		began := time.Now()
		lease := lock(t, a)
		v.Proxy.Down()
		next := lock(t, b)
		if d := time.Since(began); d < hasp.DefaultTTL || d > hasp.DefaultTTL+time.Second {
			t.Errorf("taken over after %v, want just after %v", d, hasp.DefaultTTL)
		}
		if !errors.Is(lease.Err(), hasp.ErrLost) || !errors.Is(context.Cause(lease.Context()), hasp.ErrLost) {
			t.Errorf("the dead one: %v", lease.Err())
		}
		next.Unlock(t.Context())
		v.Proxy.Up()
	})
}

// The dead holder's deadline comes before anybody else's turn.
func TestLossIsToldBeforeAnotherHolds(t *testing.T) {
	virtual(t, func(t *testing.T, v *redistest.VirtualServer, a, b *hasp.Client) {
		lease := lock(t, a)
		var told time.Time
		stop := context.AfterFunc(lease.Context(), func() { told = time.Now() })
		defer stop()
		v.Proxy.Stall()
		next := lock(t, b)
		taken := time.Now()
		synctest.Wait()
		if told.IsZero() || !told.Before(taken) {
			t.Errorf("told at %v, taken at %v", told, taken)
		}
		next.Unlock(t.Context())
		v.Proxy.Flow()
	})
}

func TestRenewalRidesOutAnOutage(t *testing.T) {
	for name, fault := range map[string]func(p *faultproxy.Proxy) (mend func()){
		"down":    func(p *faultproxy.Proxy) func() { p.Down(); return p.Up },
		"stalled": func(p *faultproxy.Proxy) func() { p.Stall(); return p.Flow },
	} {
		t.Run(name, func(t *testing.T) {
			virtual(t, func(t *testing.T, v *redistest.VirtualServer, a, b *hasp.Client) {
				lease := lock(t, a)
				time.Sleep(hasp.DefaultTTL / 4)
				mend := fault(v.Proxy)
				time.Sleep(hasp.DefaultTTL / 2)
				mend()
				time.Sleep(hasp.DefaultTTL)
				if err := lease.Err(); err != nil {
					t.Fatalf("lost: %v", err)
				}
				if _, err := b.TryLock(t.Context(), "k"); !errors.Is(err, hasp.ErrHeld) {
					t.Errorf("trylock: %v", err)
				}
				if err := lease.Unlock(t.Context()); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

func TestLostRepliesLeaveNothingBehind(t *testing.T) {
	for _, fault := range []faultproxy.Fault{faultproxy.LoseReply, faultproxy.HangReply, faultproxy.LoseRequest, faultproxy.HoldRequest} {
		virtual(t, func(t *testing.T, v *redistest.VirtualServer, a, b *hasp.Client) {
			lock(t, a).Unlock(t.Context())
			free := func(what string) {
				t.Helper()
				if fault == faultproxy.HoldRequest {
					time.Sleep(hasp.DefaultTimeout / 2)
					v.Proxy.Release() // the command comes late
				}
				time.Sleep(2*hasp.DefaultTimeout + time.Second)
				if n := len(v.Mini.Keys()); n != 0 {
					t.Errorf("fault %d: %s: left %q", fault, what, v.Mini.Keys())
				}
			}
			v.Proxy.Fail("set k ", fault)
			if _, err := a.TryLock(t.Context(), "k"); err == nil || errors.Is(err, hasp.ErrHeld) {
				t.Errorf("fault %d: trylock: %v", fault, err)
			}
			free("acquire")

			lease := lock(t, a)
			v.Proxy.Fail("evalsha", fault)
			time.Sleep(2 * hasp.DefaultTTL)
			if err := lease.Err(); err != nil {
				t.Errorf("fault %d: renew: %v", fault, err)
			}
			if fault == faultproxy.HoldRequest {
				v.Proxy.Release() // a renewal that comes late shortens nothing
			}
			if err := lease.Unlock(t.Context()); err != nil {
				t.Errorf("fault %d: unlock after a lost renewal: %v", fault, err)
			}

			lease = lock(t, a)
			v.Proxy.Fail("evalsha", fault)
			if err := lease.Unlock(t.Context()); err == nil || errors.Is(err, hasp.ErrLost) {
				t.Errorf("fault %d: unlock: %v", fault, err)
			}
			if fault == faultproxy.HoldRequest {
				v.Proxy.Release()
			}
			if err := lease.Unlock(t.Context()); err != nil && !errors.Is(err, hasp.ErrReleased) {
				t.Errorf("fault %d: unlock again: %v", fault, err)
			}
			free("release")
			if n := v.Proxy.Pending(); n != 0 {
				t.Errorf("fault %d: %d did not happen", fault, n)
			}
		})
	}
}

// A release that comes when the key is another's must not free it.
func TestLateReleaseDoesNotFreeTheSuccessor(t *testing.T) {
	virtual(t, func(t *testing.T, v *redistest.VirtualServer, a, b *hasp.Client) {
		lock(t, a).Unlock(t.Context())
		lease := lock(t, a)
		v.Proxy.Fail("evalsha", faultproxy.HoldRequest)
		if err := lease.Unlock(t.Context()); err == nil {
			t.Fatal("unlock: no error")
		}
		next := lock(t, b) // by the repeat of the Unlock, or at the term's end
		v.Proxy.Release()
		time.Sleep(hasp.DefaultTTL)
		if err := next.Err(); err != nil {
			t.Errorf("the successor: %v", err)
		}
		if err := next.Unlock(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// What lives in real time: a real Redis where there is one.

func TestRedisThatLosesItsDataTellsTheLoss(t *testing.T) {
	t.Parallel()
	srv := redistest.Start(t, &redistest.Options{Own: true})
	c, err := hasp.Open(t.Context(), "spinlock+"+srv.URL()+"?ttl=6s", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	lease := lock(t, c)
	srv.Kill()
	srv.Restart()
	select {
	case <-lease.Context().Done():
	case <-time.After(30 * time.Second):
		t.Fatal("the loss is not told")
	}
	if err := lease.Unlock(t.Context()); !errors.Is(err, hasp.ErrLost) {
		t.Errorf("unlock: %v", err)
	}
	next := lock(t, c)
	before := next.Expires()
	for deadline := time.Now().Add(30 * time.Second); !next.Expires().After(before); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the next lease is not renewed")
		}
	}
	if err := next.Unlock(t.Context()); err != nil {
		t.Error(err)
	}
}

// A client that was handed in may wait for its own five seconds, whatever the
// context: hasp's calls end when they must all the same.
func TestRedisThatHangsHoldsNobodyUp(t *testing.T) {
	t.Parallel()
	srv := redistest.Start(t, &redistest.Options{Own: true})
	o := srv.ClientOptions() // without ContextTimeoutEnabled
	o.ReadTimeout = time.Hour
	rdb := redis.NewClient(o)
	// Time enough for the one to hear of the loss of its call, and for the
	// other to show that it did not wait for that.
	const timeout, soon = 300 * time.Millisecond, 20 * time.Second
	c := hasp.New(spinlock.New(rdb, nil), &hasp.Options{Timeout: timeout})
	patient := hasp.New(spinlock.New(rdb, nil), &hasp.Options{Timeout: 10 * time.Minute})
	var leases []*hasp.Lease
	for _, c := range []*hasp.Client{c, patient} {
		l, err := c.Lock(t.Context(), fmt.Sprint("held", len(leases)), hasp.WithTTL(time.Hour))
		for i := 0; err != nil && i < 10; i++ { // Timeout is short
			l, err = c.Lock(t.Context(), fmt.Sprint("held", len(leases)), hasp.WithTTL(time.Hour))
		}
		if err != nil {
			t.Fatal(err)
		}
		leases = append(leases, l)
	}
	srv.Pause()
	type call func(ctx context.Context, c *hasp.Client, lease *hasp.Lease) error
	calls := map[string]call{
		"lock": func(ctx context.Context, c *hasp.Client, _ *hasp.Lease) error {
			_, err := c.Lock(ctx, "other")
			return err
		},
		"trylock": func(ctx context.Context, c *hasp.Client, _ *hasp.Lease) error {
			_, err := c.TryLock(ctx, "another")
			return err
		},
		"inspect": func(ctx context.Context, c *hasp.Client, _ *hasp.Lease) error {
			_, err := c.Inspect(ctx, "k")
			return err
		},
		"break": func(ctx context.Context, c *hasp.Client, _ *hasp.Lease) error { return c.Break(ctx, "x") },
		"extend": func(ctx context.Context, _ *hasp.Client, lease *hasp.Lease) error {
			return lease.Extend(ctx, 2*time.Hour)
		},
	}
	for name, f := range calls {
		began := time.Now()
		err := f(t.Context(), c, leases[0])
		if d := time.Since(began); err == nil || errors.Is(err, hasp.ErrHeld) || errors.Is(err, hasp.ErrLost) || d > soon {
			t.Errorf("%s: %v after %v", name, err, d)
		}
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(10*time.Millisecond, cancel)
		began = time.Now()
		err = f(ctx, patient, leases[1])
		if d := time.Since(began); !errors.Is(err, context.Canceled) || d > soon {
			t.Errorf("%s, cancelled: %v after %v", name, err, d)
		}
	}
	began := time.Now()
	if err := leases[0].Unlock(t.Context()); err == nil || errors.Is(err, hasp.ErrLost) || time.Since(began) > soon {
		t.Errorf("unlock: %v after %v", err, time.Since(began))
	}
	srv.Resume()
	if err := leases[1].Unlock(t.Context()); err != nil {
		t.Error(err)
	}
	c.Close()
	patient.Close()
	rdb.Close()
}
