//go:build unix

package pglock_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/pgtest"
)

// relay carries connections to a server. It calls accepted for each. The function that accepted
// returns sees what is sent on that connection, by the server or to it, and may wait. If it returns
// false, nothing passes in that direction any more, and neither end learns of it.
func relay(t *testing.T, server string, accepted func() (pass func(b []byte, byServer bool) bool)) (addr string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	var wg sync.WaitGroup
	ctx, stop := context.WithCancel(context.Background())
	t.Cleanup(func() { stop(); l.Close(); wg.Wait() })
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			s, err := net.Dial("tcp", server)
			if err != nil {
				c.Close()
				continue
			}
			closeBoth := func() { c.Close(); s.Close() }
			context.AfterFunc(ctx, closeBoth)

			pass := accepted()
			carry := func(to, from net.Conn, byServer bool) {
				for b := make([]byte, 8192); ; {
					n, err := from.Read(b)
					if !pass(b[:n], byServer) {
						io.Copy(io.Discard, from)
						return
					}
					if _, writeErr := to.Write(b[:n]); err != nil || writeErr != nil {
						closeBoth()
						return
					}
				}
			}
			wg.Go(func() { carry(s, c, false) })
			wg.Go(func() { carry(c, s, true) })
		}
	})
	return l.Addr().String()
}

// kickAll ends all sessions but its own.
const kickAll = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"

// The network goes silent when new connections have logged in, and before their first statement
// is answered. They do not keep their places in the pool.
func TestSilenceAfterLogin(t *testing.T) {
	t.Parallel()
	s := pgtest.Start(t)
	var silent atomic.Bool
	ready := []byte("Z\x00\x00\x00\x05I") // ReadyForQuery, which ends the login
	addr := relay(t, s.Addr, func() func([]byte, bool) bool {
		var lost atomic.Bool
		return func(b []byte, byServer bool) bool {
			if lost.Load() {
				return false
			}
			if byServer && silent.Load() && bytes.Contains(b, ready) {
				lost.Store(true) // what comes after b
			}
			return true
		}
	})
	ctx := t.Context()
	c, err := hasp.Open(ctx, "pglock+postgres://postgres@"+addr+"/postgres?sslmode=disable&pool_size=2", &hasp.Options{Timeout: time.Second})
	must(t, err)
	defer c.Close()

	s.Must(t, kickAll)
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
	var slow atomic.Bool
	addr := relay(t, s.Addr, func() func([]byte, bool) bool {
		return func(_ []byte, byServer bool) bool {
			if byServer && slow.Load() {
				time.Sleep(1200 * time.Millisecond)
			}
			return true
		}
	})
	ctx := t.Context()
	c, err := hasp.Open(ctx, "pglock+postgres://postgres@"+addr+"/postgres?sslmode=disable&connect_timeout=20", &hasp.Options{Timeout: 2 * time.Second})
	must(t, err)
	defer c.Close()
	slow.Store(true)
	s.Must(t, kickAll)
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
	until(t, "the replica is promoted", func() bool {
		return r.Exec(ctx, "SELECT pg_promote()") == nil || r.Exec(ctx, "CREATE TEMP TABLE t ()") == nil
	})
	until(t, "a listener at the new primary", listens(r))
	_ = lease.Unlock(ctx)
	must(t, <-got)
}
