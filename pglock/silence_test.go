//go:build unix

package pglock_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/pgtest"
)

// Connections that callers begin in a short outage do not keep the pool full for long after
// it. So no lease is lost.
func TestConnectionsBegunInAnOutage(t *testing.T) {
	t.Parallel()
	s := pgtest.Start(t)
	f := relay(t, s.Addr, nil)
	ctx := t.Context()
	o := &hasp.Options{Timeout: time.Second, TTL: 9 * time.Second}
	c := client(t, f.Addr(), "", o)
	lease, err := c.Lock(ctx, "key")
	must(t, err)

	f.Stall() // of new connections; those that are there stay silent
	f.Forget()
	var wg sync.WaitGroup
	for i := range 12 {
		wg.Go(func() {
			for range 2 {
				c.TryLock(ctx, fmt.Sprint("other-", i))
			}
		})
	}
	time.Sleep(3 * o.Timeout / 2)
	f.Forget()
	f.Flow()
	wg.Wait()
	select {
	case <-lease.Context().Done():
		t.Fatalf("the lease was lost: %v", context.Cause(lease.Context()))
	case <-time.After(o.TTL):
	}
	must(t, lease.Unlock(ctx))
}

// A firewall forgets all connections of a pool. One call loses its time, and no lease is lost.
func TestForgottenConnections(t *testing.T) {
	t.Parallel()
	s := pgtest.Start(t)
	f := relay(t, s.Addr, nil)
	ctx := t.Context()
	o := &hasp.Options{Timeout: time.Second, TTL: 4 * time.Second}
	d := newDriver(t, f.Addr())
	c := hasp.New(d, o)
	defer c.Close()
	must(t, d.Fill(ctx))

	lease, err := c.Lock(ctx, "key")
	must(t, err)
	f.Forget()
	select {
	case <-lease.Context().Done():
		t.Fatalf("the lease was lost: %v", context.Cause(lease.Context()))
	case <-time.After(2 * o.TTL):
	}
	must(t, lease.Unlock(ctx))
}
