package etcdlock_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/conformance"
)

// TestWaitThatBeginsInAnOutage checks that the outage lasts for the timeout, and not for
// twice that.
func TestWaitThatBeginsInAnOutage(t *testing.T) {
	t.Parallel()
	s := startServers(t, 1)[0]
	link := linkTo(t, s.Client)
	d := openDriver(t, link.Store)
	link.Set(conformance.Hung)

	c := claimFor("outage", time.Minute)
	c.Timeout = 4 * time.Second
	began := time.Now()
	_, err := d.Wait(context.Background(), c)
	took := time.Since(began)
	var outage *backend.UnavailableError
	if !errors.As(err, &outage) {
		t.Fatalf("wait in an outage: %v, want an outage", err)
	}
	if took > c.Timeout*3/2 {
		t.Errorf("a Wait with a timeout of %v that began in an outage took %v", c.Timeout, took)
	}
	if late := outage.Since.Sub(began); late > c.Timeout/2 {
		t.Errorf("the outage is said to have begun %v after the Wait", late)
	}
}

// TestLostReplyToTheMove loses the reply when a Wait moves its place to a lease of the whole
// term. A Release must free the key.
func TestLostReplyToTheMove(t *testing.T) {
	t.Parallel()
	s := startServers(t, 1)[0]
	d, meddler := openMeddled(t, s.Client, nil)
	txns := 0
	meddler.set(nil, func(method string) error {
		if method == "Txn" {
			if txns++; txns == 2 { // after the one that queues
				return lost
			}
		}
		return nil
	})
	c := claimFor("moved", 5*time.Minute)
	g, err := d.Wait(context.Background(), c)
	if err == nil {
		t.Fatalf("wait whose last reply was lost: %+v", g)
	}
	meddler.set(nil, nil)
	if err := release(d, c); err != nil && !errors.Is(err, backend.ErrLost) {
		t.Errorf("release after a wait of unknown outcome: %v", err)
	}
	nothingLeft(t, s.Client)
}

// TestLatePut loses the first put of a Wait, which may still arrive. The lease must not serve
// another hold after the Release: then the put would take the key for nobody.
func TestLatePut(t *testing.T) {
	t.Parallel()
	s := startServers(t, 1)[0]
	d, meddler := openMeddled(t, s.Client, nil)
	var puts atomic.Int32
	meddler.set(func(method string) error {
		if method == "Txn" && puts.Add(1) == 1 {
			return lost
		}
		return nil
	}, nil)
	client, ctx := plainClient(t, s.Client), context.Background()
	leaseOf := func(key string) int64 {
		r, err := client.Get(ctx, "hasp/"+key+"/", clientv3.WithPrefix())
		if err != nil || len(r.Kvs) != 1 {
			t.Fatalf("entries of %s: %v, %v", key, r, err)
		}
		return r.Kvs[0].Lease
	}

	first := waitFor(t, d, "late", 5*time.Second)
	used := leaseOf("late")
	free(t, d, first)
	take(t, d, "next", 5*time.Second)
	if leaseOf("next") == used {
		t.Error("the lease of the lost put serves another hold")
	}
}
