//go:build unix

package pglock_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/pgtest"
	"github.com/hasplock/hasp/pglock"
)

// firewall carries connections to a server until it forgets them: then nothing passes, and
// neither end learns of it.
type firewall struct {
	addr string

	mu      sync.Mutex
	current *atomic.Bool // of the connections made since the last forget
}

func newFirewall(t *testing.T, target string) *firewall {
	t.Helper()
	f := &firewall{current: new(atomic.Bool)}
	f.addr = relay(t, target, func() func([]byte, bool) bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		forgotten := f.current
		return func([]byte, bool) bool { return !forgotten.Load() }
	})
	return f
}

// forget forgets all connections. Those that are made from now on pass.
func (f *firewall) forget() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.current.Store(true)
	f.current = new(atomic.Bool)
}

// swallow makes the firewall forget all connections, and carry nothing of new ones, until
// the next forget.
func (f *firewall) swallow() {
	f.forget()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.current.Store(true)
}

// Connections that callers begin in a short outage do not keep the pool full for long after
// it. So no lease is lost.
func TestConnectionsBegunInAnOutage(t *testing.T) {
	t.Parallel()
	s := pgtest.Start(t)
	f := newFirewall(t, s.Addr)
	ctx := t.Context()
	o := &hasp.Options{Timeout: time.Second, TTL: 9 * time.Second}
	c, err := hasp.Open(ctx, "pglock+postgres://postgres@"+f.addr+"/postgres?sslmode=disable", o)
	must(t, err)
	defer c.Close()
	lease, err := c.Lock(ctx, "key")
	must(t, err)

	f.swallow()
	var wg sync.WaitGroup
	for i := range 12 {
		wg.Go(func() {
			for range 2 {
				c.TryLock(ctx, fmt.Sprint("other-", i))
			}
		})
	}
	time.Sleep(3 * o.Timeout / 2)
	f.forget()
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
	f := newFirewall(t, s.Addr)
	ctx := t.Context()
	o := &hasp.Options{Timeout: time.Second, TTL: 4 * time.Second}
	d, err := open(ctx, f.addr)
	must(t, err)
	c := hasp.New(d, o)
	defer c.Close()
	must(t, d.(*pglock.Driver).Fill(ctx))

	lease, err := c.Lock(ctx, "key")
	must(t, err)
	f.forget()
	select {
	case <-lease.Context().Done():
		t.Fatalf("the lease was lost: %v", context.Cause(lease.Context()))
	case <-time.After(2 * o.TTL):
	}
	must(t, lease.Unlock(ctx))
}
