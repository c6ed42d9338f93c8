//go:build unix

package pglock_test

import (
	"bytes"
	"fmt"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/pgtest"
)

// relay returns a proxy to a server. If wrap is not nil, the proxy uses what it returns in place of
// a connection to the server.
func relay(t *testing.T, server string, wrap func(net.Conn) net.Conn) *faultproxy.Proxy {
	t.Helper()
	p, err := faultproxy.Listen(func() (net.Conn, error) {
		c, err := net.Dial("tcp", server)
		if err == nil && wrap != nil {
			c = wrap(c)
		}
		return c, err
	})
	must(t, err)
	t.Cleanup(p.Close)
	return p
}

// afterLogin is a connection that goes silent after its login, if silent is true then.
type afterLogin struct {
	net.Conn
	silent *atomic.Bool
	lost   *atomic.Bool
}

var readyForQuery = []byte("Z\x00\x00\x00\x05I") // ends the login

func (c afterLogin) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if c.silent.Load() && bytes.Contains(b[:n], readyForQuery) {
		c.lost.Store(true)
	}
	return n, err
}

func (c afterLogin) Write(b []byte) (int, error) {
	if c.lost.Load() {
		return len(b), nil
	}
	return c.Conn.Write(b)
}

// The network goes silent when new connections have logged in, and before their first statement
// is answered. They do not keep their places in the pool.
func TestSilenceAfterLogin(t *testing.T) {
	t.Parallel()
	s := pgtest.Start(t)
	var silent atomic.Bool
	p := relay(t, s.Addr, func(c net.Conn) net.Conn { return afterLogin{c, &silent, new(atomic.Bool)} })
	ctx := t.Context()
	c := client(t, p.Addr(), "&pool_size=2", &hasp.Options{Timeout: time.Second})

	must(t, s.Kick(ctx))
	silent.Store(true)
	for i := range 4 {
		_, _ = c.TryLock(ctx, fmt.Sprint("other-", i))
	}
	silent.Store(false)
	until(t, "a key after the silence", func() bool {
		_, err := c.TryLock(ctx, "key")
		return err == nil
	})
}

// A round trip takes more than half of Timeout. A new connection works nevertheless: its first
// statement takes one.
func TestFirstStatementOverASlowLink(t *testing.T) {
	t.Parallel()
	s := pgtest.Start(t)
	p := relay(t, s.Addr, nil)
	ctx := t.Context()
	c := client(t, p.Addr(), "&connect_timeout=20", &hasp.Options{Timeout: 2 * time.Second})
	p.Delay(1200 * time.Millisecond)
	must(t, s.Kick(ctx))
	until(t, "a key over new connections", func() bool {
		_, err := c.TryLock(ctx, "key")
		return err == nil
	})
}

// The old primary lives on, and refuses writes. A Client whose callers wait listens at the new one.
func TestListensAtTheNewPrimary(t *testing.T) {
	t.Parallel()
	s := pgtest.Start(t)
	r := s.Replica(t)
	ctx := t.Context()
	both := s.Addr + "," + r.Addr
	a, b := client(t, both, "", nil), client(t, both, "", nil)
	lease, err := a.Lock(ctx, "key")
	must(t, err)
	got := locks(ctx, b, "key")
	listens := func(at *pgtest.Server) func() bool {
		return func() bool {
			rows, err := at.Rows(ctx, "SELECT 1 FROM pg_stat_activity WHERE query LIKE 'LISTEN %' AND application_name <> 'psql'")
			return err == nil && len(rows) > 0
		}
	}
	until(t, "a listener at the primary", listens(s))

	s.Must(t, "ALTER SYSTEM SET default_transaction_read_only = on")
	s.Must(t, "SELECT pg_reload_conf()")
	promote(t, r)
	until(t, "a listener at the new primary", listens(r))
	_ = lease.Unlock(ctx)
	must(t, <-got)
}
