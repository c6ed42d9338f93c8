package etcdlock_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/etcdlock"
	"github.com/hasplock/hasp/internal/await"
)

// nothingLeft waits until etcd has neither entries nor leases.
func nothingLeft(t *testing.T, at string) {
	t.Helper()
	eventually(t, "the end of all entries and leases", func() error {
		left, err := entries(context.Background(), at)
		if err == nil && len(left) > 0 {
			err = fmt.Errorf("left: %q", left)
		}
		return err
	})
}

// TestLostCalls loses a call, which may still arrive, or its reply. Or etcd answers that it has no
// space, to a call that it has refused, or carried out. The lease whose put has no known outcome is
// never used again. A hold goes on until its release, and then nothing is left.
func TestLostCalls(t *testing.T) {
	t.Parallel()
	at := startOne(t)
	type op = func(d *etcdlock.Driver, c *backend.Claim) error
	wait := func(d *etcdlock.Driver, c *backend.Claim) error {
		g, err := d.Wait(context.Background(), *c)
		c.Handle = g.Handle
		return err
	}
	lock := func(d *etcdlock.Driver, c *backend.Claim) error {
		g, err := acquire(d, *c)
		c.Handle = g.Handle
		return err
	}
	unlock := func(d *etcdlock.Driver, c *backend.Claim) error { return release(d, *c) }
	prolong := func(d *etcdlock.Driver, c *backend.Claim) error { return renew(d, *c) }
	nothing := func(*etcdlock.Driver, *backend.Claim) error { return nil }
	for _, tt := range []struct {
		what         string
		before, call op
		method       string
		lost         int32 // which call of the method
		goesOn       bool  // the hold lives after the call
		then         op
		renewed      bool // Claim.Renewed
		moves        bool // the call moves the hold to a lease of the whole term
	}{
		{"lease", nothing, lock, "LeaseGrant", 1, false, nothing, false, false},
		{"acquire", nothing, lock, "Txn", 1, false, nothing, false, false},
		{"release", lock, unlock, "Txn", 1, false, nothing, false, false},
		{"place in the queue", nothing, wait, "Txn", 1, true, nothing, true, false},         // the Wait repeats it
		{"lease at the grant", nothing, wait, "LeaseGrant", 2, true, nothing, false, false}, // the Wait repeats this as well
		{"move at the grant", nothing, wait, "Txn", 2, false, nothing, false, true},
		{"first renewal", wait, prolong, "Txn", 1, true, nothing, true, true},
		{"first renewal, and then the next", wait, prolong, "Txn", 1, true, prolong, true, true},
	} {
		for what, answer := range map[string]error{"request": lost, "reply": lost,
			"request, no space": rpctypes.ErrGRPCNoSpace, "reply, no space": rpctypes.ErrGRPCNoSpace} {
			t.Run(tt.what+", "+what, func(t *testing.T) {
				t.Parallel()
				d, m := openMeddled(t, at, nil)
				request := strings.HasPrefix(what, "request")
				known := tt.moves && answer != lost // a read shows whether etcd has moved the hold
				c := claimFor(t.Name(), long)
				c.Renewed = tt.renewed
				await.Must(t, tt.before(d, &c))
				var calls atomic.Int32
				lose := func(method string) error {
					if method == tt.method && calls.Add(1) == tt.lost {
						return answer
					}
					return nil
				}
				if request {
					m.set(lose, nil)
				} else {
					m.set(nil, lose)
				}
				if err := tt.call(d, &c); calls.Load() < tt.lost || (err == nil) != (known || tt.lost < calls.Load()) {
					t.Errorf("%d calls, of which one was lost: %v", calls.Load(), err)
				}
				if m.set(nil, nil); known && request {
					m.set(failing("LeaseGrant", answer), nil) // there is still no space
				}
				if err := tt.then(d, &c); err != nil {
					t.Errorf("the next renewal: %v", err)
				}
				if err := release(d, c); err != nil && (tt.goesOn || !errors.Is(err, backend.ErrLost)) {
					t.Errorf("release: %v", err)
				}
				fresh := request && (known || tt.goesOn && !tt.moves) || tt.lost == 2 && (known || !tt.moves) // the release leaves another lease
				if n := d.Idle(); n != 0 && !fresh {
					t.Errorf("%d leases would be used again, want 0", n)
				}
				d.Close()
				nothingLeft(t, at)
			})
		}
	}
}

// A Wait that ends after the reply to its put was lost leaves no place in the queue.
func TestWaitThatEndsAfterALostReply(t *testing.T) {
	t.Parallel()
	at := startOne(t)
	d, m := openMeddled(t, at, &etcdlock.Options{Window: long})
	ctx, cancel := brief()
	defer cancel()
	m.set(nil, func(method string) error {
		if method == "Txn" {
			cancel()
			return lost
		}
		return nil
	})
	if _, err := d.Wait(ctx, renewable("key")); err == nil {
		t.Error("wait: nil, want the end of its context")
	}
	nothingLeft(t, at)
}

// TestSuspend takes keys after the machine was suspended. The driver must not trust its
// leases as if no time had passed: it begins their terms anew.
func TestSuspend(t *testing.T) {
	t.Parallel()
	s := startServers(t, 1)[0]
	d, other := openDriver(t, s.Client), openDriver(t, s.Client)
	suspend := etcdlock.Suspendable(d)
	beats := func() float64 { return metric(t, s, `grpc_server_msg_received_total\{grpc_method="LeaseKeepAlive".*`) }

	// A lease of the pool has lost a fifth of its term.
	free(t, d, take(t, d, "suspend", time.Minute))
	suspend(12 * time.Second)
	before := beats()
	c := claimFor("suspend", time.Minute)
	c.Renewed = true
	await.Value(acquire(d, c))
	if after := beats(); after == before {
		t.Error("the driver trusts a lease of the pool as it was before the suspend")
	}

	// The lease of a place has lost more than a third of its term.
	c = claimFor("suspend place", time.Minute)
	c.Renewed = true
	held, w := lineUp(t, other, d, c)
	before = beats()
	suspend(2 * time.Second)
	free(t, other, held)
	w.granted(t)
	if after := beats(); after == before {
		t.Error("the driver trusts the lease of a place as it was before the suspend")
	}
}

// TestEvictionCutOff lets a process die between the removal of an entry and the end of its
// lease. The holder must learn of it at its next renewal.
func TestEvictionCutOff(t *testing.T) {
	t.Parallel()
	at := startOne(t)
	for what, evict := range map[string]func(d backend.Inspector, c backend.Claim) error{
		"Break":   func(d backend.Inspector, c backend.Claim) error { return d.Break(context.Background(), c.Key) },
		"Release": func(d backend.Inspector, c backend.Claim) error { c.Handle = nil; return release(d, c) },
	} {
		t.Run(what, func(t *testing.T) {
			holder := openDriver(t, at)
			other, meddler := openMeddled(t, at, nil)
			c, kept := take(t, holder, "cut off", long), take(t, holder, "kept", long)
			meddler.set(failing("LeaseRevoke", lost), nil)
			if err := evict(other, c); err == nil {
				t.Errorf("%s returned no error, although the lease was not revoked", what)
			}
			other.Close()

			errs := renewAll(t.Context(), holder, []backend.Claim{c, kept})
			if !errors.Is(errs[0], backend.ErrLost) {
				t.Errorf("renewal after a %s that was cut off: %v, want ErrLost", what, errs[0])
			}
			if errs[1] != nil {
				t.Errorf("renewal of another hold: %v", errs[1])
			}
			if err := release(holder, c); !errors.Is(err, backend.ErrLost) {
				t.Errorf("release after a %s that was cut off: %v, want ErrLost", what, err)
			}
			free(t, holder, kept)
			holder.Close()
			nothingLeft(t, at)
		})
	}
}

// TestKeepUntilIsNotExceeded keeps a key for little longer than a second. A lease of etcd
// lasts for 2 s at least, so the driver must end it.
func TestKeepUntilIsNotExceeded(t *testing.T) {
	t.Parallel()
	d, other := twoDrivers(t)
	var late time.Duration
	for range 5 { // a slow machine may be late now and then
		c := take(t, d, "kept", time.Minute)
		c.KeepUntil = time.Now().Add(1050 * time.Millisecond)
		free(t, d, c)
		next := wants(t, other, "kept").granted(t)
		if late = time.Since(c.KeepUntil); late < 0 {
			t.Fatalf("the key was free %v before KeepUntil", -late)
		}
		free(t, other, next)
		if late < 900*time.Millisecond {
			return
		}
	}
	t.Errorf("the key was free %v after KeepUntil", late)
}

// A release that fails does not free a key that must be kept.
func TestFailedReleaseDoesNotFreeAKeptKey(t *testing.T) {
	t.Parallel()
	d, m := openMeddled(t, startOne(t), nil)
	c := take(t, d, "key", long)
	c.KeepUntil = time.Now().Add(long)
	m.set(failing("LeaseGrant", lost), nil)
	if err := release(d, c); err == nil {
		t.Error("release: nil, want an outage")
	}
	if st := await.Value(inspect(d, "key")); !st.Held {
		t.Error("the key is free")
	}
}

// TestLastSecond inspects a hold until its term has ended. In its last second, of which etcd
// says 0 s, the key is still held.
func TestLastSecond(t *testing.T) {
	t.Parallel()
	d, other := twoDrivers(t)
	take(t, d, "last second", 2*time.Second)
	eventually(t, "the end of the term", func() error {
		st, err := inspect(d, "last second")
		if err != nil || st.Held && st.TTL > 0 && st.TTL <= 2*time.Second {
			return fmt.Errorf("%+v, %v", st, err)
		}
		if st.Held {
			t.Fatalf("inspect: %+v", st)
		}
		// It was said to be free, so it must be.
		if _, err := acquire(other, claimFor("last second", time.Minute)); err != nil {
			t.Errorf("acquire of a key that Inspect has called free: %v", err)
		}
		return nil
	})
}

// The age of a hold does not count its wait. It is not known before the first renewal.
func TestAgeOfAHoldThatWaited(t *testing.T) {
	t.Parallel()
	d, h := twoDrivers(t)
	held, w := lineUp(t, h, d, renewable("key"))
	time.Sleep(100 * time.Millisecond)
	before := time.Now()
	free(t, h, held)
	c := w.granted(t)
	after := time.Now()
	for i := range 2 {
		st, err := inspect(h, "key")
		if err != nil || !st.Held {
			t.Fatal(st, err)
		}
		if i == 0 && !st.Since.IsZero() || i == 1 && (st.Since.Before(before.Truncate(time.Millisecond)) || st.Since.After(after)) {
			t.Errorf("after %d renewals, the hold began at %v, want between %v and %v", i, st.Since, before, after)
		}
		await.Must(t, renew(d, c))
	}
}

// A hold is released while its first renewal is about to move it to another lease, and another hold
// gets the lease of the first one. The end of that renewal does not end the other hold.
func TestReleaseDuringAMove(t *testing.T) {
	t.Parallel()
	d, m := openMeddled(t, startOne(t), &etcdlock.Options{Window: time.Minute})
	c := renewable("moved")
	c = wantsAs(t, d, c).granted(t)

	began, goOn := m.stop("LeaseGrant")
	answer := make(chan error)
	go func() { answer <- renewWithin(t.Context(), d, c) }()
	<-began
	free(t, d, c)
	next := take(t, d, "next", time.Minute)
	close(goOn)
	if err := <-answer; !errors.Is(err, backend.ErrLost) {
		t.Errorf("the renewal of the hold that was released: %v, want ErrLost", err)
	}
	await.Until(t, "the end of leases", func() bool { return d.Burials() == 0 })
	await.Must(t, renew(d, next))
}

// The term of a new lease counts from the question, so a late answer does not prolong it.
func TestLateAnswerDoesNotProlongATerm(t *testing.T) {
	t.Parallel()
	d, m := openMeddled(t, startOne(t), nil)
	var answered time.Time
	m.set(nil, func(method string) error {
		if method == "LeaseGrant" {
			answered = time.Now()
			time.Sleep(time.Second) // more than the drift
		}
		return nil
	})
	c := claimFor("key", 10*time.Second)
	if g := await.Value(acquire(d, c)); g.Until.After(answered.Add(c.TTL)) {
		t.Errorf("the hold is trusted until %v, want %v at the latest", g.Until, answered.Add(c.TTL))
	}
}

// Another driver has moved a hold, and died before it ended the old lease. The next renewal does not
// take the old lease for the lease of the hold.
func TestRenewalOfAMovedHold(t *testing.T) {
	t.Parallel()
	at := startOne(t)
	d := openDriver(t, at)
	other, m := openMeddled(t, at, nil)
	client := plainClient(t, at)
	lease := func() int64 {
		return await.Value(client.Get(t.Context(), "hasp/key/", clientv3.WithPrefix())).Kvs[0].Lease
	}
	c := take(t, d, "key", long)
	m.set(failing("LeaseRevoke", lost), nil)
	await.Must(t, renew(other, c))
	moved := lease()
	await.Must(t, renew(d, c))
	if lease() == moved {
		t.Error("the hold is under the lease of the other driver")
	}
}

// A renewal for a short term does not shorten a long term, even if the driver does not know the
// lease of the hold: after a lost reply, or because another driver made the hold.
func TestRenewalByTheTokenKeepsTheTerm(t *testing.T) {
	t.Parallel()
	at := startOne(t)
	d, m := openMeddled(t, at, nil)
	c := take(t, d, "key", long)
	c.TTL *= 2
	m.set(nil, failing("Txn", lost))
	_ = renew(d, c)
	m.set(nil, nil)
	c.TTL = 10 * time.Second
	for _, d := range []*etcdlock.Driver{d, openDriver(t, at)} {
		await.Must(t, renew(d, c))
		if st := await.Value(inspect(d, c.Key)); st.TTL <= c.TTL {
			t.Errorf("the term ends in %v, want 5 m or more", st.TTL)
		}
	}
}
