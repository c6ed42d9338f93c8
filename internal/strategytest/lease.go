package strategytest

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
)

// Virtual runs f in a bubble, with two Clients of one Redis. To the Redis they
// are two processes. The first goes through the proxy.
func Virtual[D backend.Driver](t *testing.T, open func(rdb redis.UniversalClient) D, f func(t *testing.T, v *redistest.VirtualServer, a, b *hasp.Client)) {
	synctest.Test(t, func(t *testing.T) {
		v := redistest.Virtual(t)
		a := hasp.New(open(v.Client()), nil)
		defer a.Close()
		b := hasp.New(open(v.Direct()), nil)
		defer b.Close()
		f(t, v, a, b)
	})
}

func (s Strategy) virtual(t *testing.T, f func(t *testing.T, v *redistest.VirtualServer, a, b *hasp.Client)) {
	Virtual(t, s.open, f)
}

// Lock locks k.
func Lock(t *testing.T, c *hasp.Client, opts ...hasp.Option) *hasp.Lease {
	t.Helper()
	lease, err := c.Lock(t.Context(), "k", opts...)
	if err != nil {
		t.Fatalf("lock: %v", err)
	}
	return lease
}

// Unlock unlocks lease.
func Unlock(t *testing.T, lease *hasp.Lease) {
	t.Helper()
	Want(t, "unlock", lease.Unlock(t.Context()), nil)
}

// Outages are faults of all connections that can be mended.
var Outages = map[string]func(p *faultproxy.Proxy) (mend func()){
	"down":    func(p *faultproxy.Proxy) func() { p.Down(); return p.Up },
	"stalled": func(p *faultproxy.Proxy) func() { p.Stall(); return p.Flow },
}

// WaiterTakesOverAfterTheLoss proves that a waiter gets the key of a holder that
// is cut off when its term ends, and that the holder is notified before that.
func (s Strategy) WaiterTakesOverAfterTheLoss(t *testing.T) {
	for name, fault := range Outages {
		s.virtual(t, func(t *testing.T, v *redistest.VirtualServer, a, b *hasp.Client) {
			began := time.Now()
			lease := Lock(t, a)
			var lost time.Time
			defer context.AfterFunc(lease.Context(), func() { lost = time.Now() })()
			mend := fault(v.Proxy)
			next := Lock(t, b)
			taken := time.Now()
			if d := taken.Sub(began); d < hasp.DefaultTTL || d > hasp.DefaultTTL+s.Late {
				t.Errorf("%s: taken over after %v, want %v and at most %v more", name, d, hasp.DefaultTTL, s.Late)
			}
			synctest.Wait()
			if lost.IsZero() || !lost.Before(taken) {
				t.Errorf("%s: lost at %v, taken over at %v", name, lost, taken)
			}
			if !errors.Is(lease.Err(), hasp.ErrLost) || !errors.Is(context.Cause(lease.Context()), hasp.ErrLost) {
				t.Errorf("%s: the lost lease: %v", name, lease.Err())
			}
			Unlock(t, next)
			mend()
		})
	}
}

// LostRepliesLeaveNothing proves that calls of unknown outcome leave no key in
// the Redis.
func (s Strategy) LostRepliesLeaveNothing(t *testing.T) {
	for _, fault := range []faultproxy.Fault{faultproxy.LoseReply, faultproxy.HangReply, faultproxy.LoseRequest, faultproxy.HoldRequest} {
		t.Run(fmt.Sprint("fault ", fault), func(t *testing.T) {
			s.virtual(t, func(t *testing.T, v *redistest.VirtualServer, a, _ *hasp.Client) {
				lostReplies(t, v, a, fault, s.Acquire)
			})
		})
	}
}

func lostReplies(t *testing.T, v *redistest.VirtualServer, c *hasp.Client, fault faultproxy.Fault, acquire string) {
	Unlock(t, Lock(t, c)) // from here on the server knows the scripts

	// A held request arrives late, after the clean-up's first release.
	late := func() {
		if fault == faultproxy.HoldRequest {
			v.Proxy.Release()
		}
	}
	v.Proxy.Fail(acquire, fault)
	if _, err := c.TryLock(t.Context(), "k"); err == nil || errors.Is(err, hasp.ErrHeld) {
		t.Errorf("trylock: %v", err)
	}
	Clean(t, v, fault, "acquire")

	lease := Lock(t, c)
	v.Proxy.Fail("evalsha", fault)
	time.Sleep(2 * hasp.DefaultTTL)
	Want(t, "renew", lease.Err(), nil)
	late() // a late renewal shortens nothing
	Want(t, "unlock after a lost renewal", lease.Unlock(t.Context()), nil)

	lease = Lock(t, c)
	v.Proxy.Fail("evalsha", fault)
	if err := lease.Unlock(t.Context()); err == nil || errors.Is(err, hasp.ErrLost) {
		t.Errorf("unlock: %v", err)
	}
	late()
	if err := lease.Unlock(t.Context()); err != nil && !errors.Is(err, hasp.ErrReleased) {
		t.Errorf("unlock again: %v", err)
	}
	Clean(t, v, fault, "release")
}

// Clean fails the test unless the Redis is empty once the clean-up after fault
// has had its time, and the fault has happened.
func Clean(t *testing.T, v *redistest.VirtualServer, fault faultproxy.Fault, what string) {
	t.Helper()
	if fault == faultproxy.HoldRequest {
		time.Sleep(hasp.DefaultTimeout / 2)
		v.Proxy.Release() // the command arrives late
	}
	time.Sleep(2*hasp.DefaultTimeout + time.Second)
	if keys := v.Mini.Keys(); len(keys) != 0 || v.Proxy.Pending() != 0 {
		t.Errorf("%s: left %q; %d faults did not happen", what, keys, v.Proxy.Pending())
	}
}

// HungServerBlocksNoCaller proves that calls end when they must, although the
// client that the caller passed reads for an hour, whatever the context.
func (s Strategy) HungServerBlocksNoCaller(t *testing.T) {
	t.Parallel()
	srv := redistest.Start(t, &redistest.Options{Own: true})
	o := srv.ClientOptions() // without ContextTimeoutEnabled
	o.ReadTimeout = time.Hour
	rdb := redis.NewClient(o)
	defer rdb.Close()

	// Calls of the hasty Client end with its Timeout. Those of the patient one
	// end long before its Timeout, because they are cancelled.
	const soon = 20 * time.Second
	hasty := hasp.New(s.open(rdb), &hasp.Options{Timeout: 300 * time.Millisecond})
	defer hasty.Close()
	patient := hasp.New(s.open(rdb), &hasp.Options{Timeout: 10 * time.Minute})
	defer patient.Close()
	lock := func(c *hasp.Client, key string) *hasp.Lease {
		lease, err := c.Lock(t.Context(), key, hasp.WithTTL(time.Hour))
		for i := 0; err != nil && i < 10; i++ { // a slow machine may take longer than Timeout
			lease, err = c.Lock(t.Context(), key, hasp.WithTTL(time.Hour))
		}
		if err != nil {
			t.Fatal(err)
		}
		return lease
	}
	hastyLease, patientLease := lock(hasty, "held0"), lock(patient, "held1")
	srv.Pause()

	for name, call := range map[string]func(ctx context.Context, c *hasp.Client, lease *hasp.Lease) error{
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
	} {
		began := time.Now()
		err := call(t.Context(), hasty, hastyLease)
		if d := time.Since(began); err == nil || errors.Is(err, hasp.ErrHeld) || errors.Is(err, hasp.ErrLost) || d > soon {
			t.Errorf("%s: %v after %v", name, err, d)
		}

		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(10*time.Millisecond, cancel)
		began = time.Now()
		err = call(ctx, patient, patientLease)
		if d := time.Since(began); !errors.Is(err, context.Canceled) || d > soon {
			t.Errorf("%s, cancelled: %v after %v", name, err, d)
		}
	}
	began := time.Now()
	if err := hastyLease.Unlock(t.Context()); err == nil || errors.Is(err, hasp.ErrLost) || time.Since(began) > soon {
		t.Errorf("unlock: %v after %v", err, time.Since(began))
	}
	srv.Resume()
	Unlock(t, patientLease)
}
