package etcdlock_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/hasplock/hasp/conformance"
	"github.com/hasplock/hasp/etcdlock"
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

// TestDoubtfulLease loses the reply to a put and to a release. The lease must be revoked, and never
// used again.
func TestDoubtfulLease(t *testing.T) {
	t.Parallel()
	s := startServers(t, 1)[0]
	for _, what := range []string{"release", "acquire"} {
		t.Run(what, func(t *testing.T) {
			link := linkTo(t, s.Client)
			d := openDriver(t, link.Store)
			c := take(t, d, "doubtful", 5*time.Minute)
			if what == "acquire" {
				free(t, d, c)
				c = claimFor("doubtful", 5*time.Minute)
			}

			link.Set(conformance.Deaf)
			ctx, cancel := context.WithTimeout(context.Background(), 500*time.Millisecond)
			defer cancel()
			var err error
			if what == "release" {
				err = d.Release(ctx, c)
			} else {
				_, err = d.Acquire(ctx, c)
			}
			if err == nil {
				t.Fatalf("%s without a reply: no error", what)
			}
			link.Set(conformance.Up)
			if n := d.Idle(); n != 0 {
				t.Errorf("%d idle leases after a %s of unknown outcome, want 0", n, what)
			}
			nothingLeft(t, s.Client)
		})
	}
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
	c := claimFor("suspend", time.Minute)
	c.Renewed = true
	g, err := acquire(d, c)
	if err != nil {
		t.Fatal(err)
	}
	c.Handle = g.Handle
	free(t, d, c)
	suspend(12 * time.Second)
	before := beats()
	c.Token += "x"
	if _, err := acquire(d, c); err != nil {
		t.Fatal(err)
	}
	if after := beats(); after == before {
		t.Error("the driver trusts a lease of the pool as it was before the suspend")
	}

	// The lease of a place has lost more than a third of its term.
	c = claimFor("suspend place", time.Minute)
	c.Renewed = true
	held := take(t, other, c.Key, 5*time.Minute)
	w := wantsAs(t, d, c)
	queued(t, other, c.Key, 1)
	before = beats()
	suspend(2 * time.Second)
	free(t, other, held)
	w.granted(t)
	if after := beats(); after == before {
		t.Error("the driver trusts the lease of a place as it was before the suspend")
	}
}
