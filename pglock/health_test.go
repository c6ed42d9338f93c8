//go:build unix

package pglock_test

import (
	"context"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/pgtest"
	"github.com/hasplock/hasp/pglock"
)

// Connections that went silent cost the calls under way their time, and no later call. Silent
// connections do not keep their places in the pool.
func TestSilence(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		size   string // of the pool
		calls  int
		outage func(p *faultproxy.Proxy)
	}{
		"a firewall forgets all connections": {"8", 1, (*faultproxy.Proxy).Forget},
		"connections are begun in an outage": {"8", 16, func(p *faultproxy.Proxy) { p.Stall(); p.Forget() }},
		"a new connection is silent after its login": {"1", 4, func(p *faultproxy.Proxy) {
			p.Cut()
			p.SetAfter(1, faultproxy.State{Stalled: true})
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := relay(t, pgtest.Shared(t).Addr)
			ctx := t.Context()
			d := newDriver(t, p.Addr()+"/postgres", "&pool_size="+tt.size)
			must(t, d.Fill(ctx))

			tt.outage(p)
			outage, cancel := context.WithTimeout(ctx, time.Second)
			defer cancel()
			var wg sync.WaitGroup
			for range tt.calls {
				wg.Go(func() {
					for outage.Err() == nil {
						if _, err := d.Inspect(outage, "key"); err == nil {
							t.Error("an answer in the outage")
						}
					}
				})
			}
			wg.Wait()

			p.Forget()                // those that were begun in the outage stay silent
			p.Set(faultproxy.State{}) // also ends a SetAfter that has seen no reply
			later, cancel := context.WithTimeout(ctx, await.Patience)
			defer cancel()
			await.Value(d.Inspect(later, "key"))
		})
	}
}

// While the server does not answer, a Client makes two connections at a time, however many callers
// it has. A server that begins sessions slowly would otherwise serve none of many.
func TestFewConnectionsAreBegunInAnOutage(t *testing.T) {
	t.Parallel()
	s := pgtest.Shared(t)
	var made atomic.Int64
	p := await.Value(faultproxy.Listen(func() (net.Conn, error) {
		made.Add(1)
		return net.Dial("tcp", s.Addr)
	}))
	t.Cleanup(p.Close)
	d := newDriver(t, p.Addr()+"/postgres", "&connect_timeout=1")

	p.Stall()
	before, began := made.Load(), time.Now()
	outage, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for outage.Err() == nil {
				within, cancel := context.WithTimeout(outage, 100*time.Millisecond)
				_, _ = d.Inspect(within, "key")
				cancel()
			}
		})
	}
	wg.Wait()
	const cancels = 1 // for the statement on the connection that Open has made
	if n, most := made.Load()-before, 2*int64(1+time.Since(began).Seconds())+cancels; n < 2 || n > most {
		t.Errorf("%d connections in %v, want 2 to %d", n, time.Since(began), most)
	}

	p.Flow()
	await.Success(t, "an answer after the outage", func() error {
		_, err := d.Inspect(t.Context(), "key")
		return err
	})
}

// A round trip takes more than half of a call's time. A new connection works nevertheless: its
// first statement takes one.
func TestFirstStatementOverASlowLink(t *testing.T) {
	t.Parallel()
	p := relay(t, pgtest.Shared(t).Addr)
	d := newDriver(t, p.Addr()+"/postgres", "&connect_timeout=60")
	p.Delay(1200 * time.Millisecond)
	p.Cut()
	until(t, "an answer over a new connection", func() bool {
		ctx := await.Timeout(t, 2*time.Second)
		_, err := d.Inspect(ctx, "key")
		return err == nil
	})
}

// A message shows that connections live which are younger than its session, or were used since.
func TestAMessageVouchesForConnections(t *testing.T) {
	t.Parallel()
	const long = time.Hour
	for _, tt := range []struct {
		session, message, idle time.Duration // 0 if there is no session
		want                   bool
	}{
		{session: long, message: 0, idle: time.Second, want: true},
		{session: long, message: 0, idle: time.Minute, want: false}, // idle_session_timeout may have ended it
		{session: time.Second, message: 0, idle: 2 * time.Second, want: false},
		{session: long, message: time.Second, idle: time.Second, want: false},
		{session: 0, message: 0, idle: time.Second, want: false},
	} {
		if got := pglock.Vouches(tt.session, tt.message, tt.idle); got != tt.want {
			t.Errorf("session %v, message %v, idle %v: %v", tt.session, tt.message, tt.idle, got)
		}
	}
}
