package redisstore

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/lazyctx"
	"github.com/hasplock/hasp/internal/redistest"
)

// hour is so long that only an interrupt ends the call while the test waits.
const hour = time.Hour

// leaving are the ways in which a caller leaves.
var leaving = map[string]func(ctx context.Context) (context.Context, context.CancelFunc){
	"cancelled": func(ctx context.Context) (context.Context, context.CancelFunc) {
		ctx, cancel := context.WithTimeout(ctx, hour)
		time.AfterFunc(20*time.Millisecond, cancel)
		return ctx, cancel
	},
	"deadline": func(ctx context.Context) (context.Context, context.CancelFunc) {
		return context.WithTimeout(ctx, 20*time.Millisecond)
	},
	"lazy deadline": func(ctx context.Context) (context.Context, context.CancelFunc) {
		c := lazyctx.WithTimeout(ctx, nil, 20*time.Millisecond)
		return c, c.End
	},
	"quit": func(ctx context.Context) (context.Context, context.CancelFunc) {
		quit, cancel := context.WithCancel(ctx)
		time.AfterFunc(20*time.Millisecond, cancel)
		c := lazyctx.WithTimeout(ctx, quit, hour)
		return c, c.End
	},
}

// ready returns the wire that the next lone caller uses.
func ready(t *testing.T, s *Store) (l *wire) {
	t.Helper()
	pings(t, s)
	g := &s.one.calls
	until(t, "a wire", func() bool {
		g.mu.Lock()
		defer g.mu.Unlock()
		if i := g.goodLocked(); i >= 0 {
			l = g.idle[i].wire
		}
		return l != nil
	})
	return l
}

// A lone caller, who runs the call itself, leaves while the server is silent, and while the call needs a
// new connection: until the TLS handshake ends, or until the set-up ends.
func TestALoneCallerLeaves(t *testing.T) {
	for _, tls := range []bool{false, true} {
		for name, start := range leaving {
			srv := redistest.Start(t, &redistest.Options{Own: true, TLS: tls})
			p := srv.Proxy()
			s := opened(t, strings.Replace(srv.URL(), srv.Addr, p.Addr(), 1), srv.Params())
			s.opened.timeout.Store(int64(hour)) // of a dial
			for _, dials := range []bool{false, true} {
				l := ready(t, s)
				if dials {
					l.conn.rawConn.Close() // go-redis notices this only when the call begins
				}
				p.Stall()
				returns(t, name, func() {
					ctx, cancel := start(t.Context())
					defer cancel()
					_, err := s.Do(ctx, "get", "k")
					early := time.Now().Add(time.Second) // a connection may end a moment before its context
					for err != nil && ctx.Err() == nil && time.Now().Before(early) {
						time.Sleep(time.Millisecond)
					}
					if err == nil || ctx.Err() == nil {
						t.Errorf("tls=%v, %s, dials=%v: got %v", tls, name, dials, err)
					}
				})
				p.Flow()
			}
		}
	}
}

// A context that ends when its call has just ended does not disturb the next call on the connection.
func TestALateInterruptEndsNoLaterCall(t *testing.T) {
	srv := redistest.Start(t, &redistest.Options{Own: true})
	s := opened(t, srv.URL(), nil)
	l := ready(t, s)
	use := l.begin(time.Now(), time.Time{})
	l.begin(time.Now(), time.Time{})
	l.interrupt(use)
	if over, _ := l.state(); over {
		t.Error("an interrupt ended the next use")
	}

	patience, ended, left := 100*time.Microsecond, 0, 0
	for range 10000 {
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(rand.N(2*patience), cancel)
		if _, err := s.Do(ctx, "ping"); err == nil {
			ended++
			patience = max(patience*15/16, time.Microsecond)
		} else {
			left++
			patience = min(patience*17/16, time.Second)
		}
		if v, err := s.Do(t.Context(), "ping"); v != "PONG" {
			t.Fatalf("the next call: %v, %v", v, err)
		}
		cancel()
	}
	if ended == 0 || left == 0 {
		t.Errorf("%d calls ended, and %d callers left, so the test proves nothing", ended, left)
	}
}

// Close ends calls, whether a lone caller or a flight waits for a reply, for a connection, or for a
// flight, and closes all connections.
func TestCloseEndsCalls(t *testing.T) {
	for _, callers := range []int{1, 100} { // of one flight, and of several
		for _, silent := range []string{"dial", "reply"} {
			srv := redistest.Start(t, &redistest.Options{Own: true})
			p := srv.Proxy()
			var conns atomic.Int64
			var hangs atomic.Bool // new connections are silent
			addr := redistest.Serve(t, func(c net.Conn) {
				conns.Add(1)
				defer conns.Add(-1)
				defer c.Close()
				if hangs.Load() {
					_, _ = io.Copy(io.Discard, c)
					return
				}
				to := await.Value(net.Dial("tcp", p.Addr()))
				defer to.Close()
				go func() { _, _ = io.Copy(c, to) }()
				_, _ = io.Copy(to, c)
			})
			s, _ := prepared(t, "redis://"+addr, nil, 0)
			ready(t, s)
			if silent == "dial" {
				hangs.Store(true)
				for _, l := range s.opened.wires { // on a slow machine, there is more than one connection
					l.mu.Lock()
					if l.conn != nil {
						l.conn.rawConn.Close()
					}
					l.mu.Unlock()
				}
			} else {
				p.Stall()
			}
			ctx, cancel := context.WithTimeout(t.Context(), hour)
			var calls sync.WaitGroup
			for range callers {
				calls.Go(func() {
					if _, err := s.Do(ctx, "get", "k"); err == nil {
						t.Errorf("%d callers, %s: no error", callers, silent)
					}
				})
			}
			until(t, "calls in progress", func() bool { return len(flights(s)) >= min(callers, 2) })
			returns(t, "Close", func() { s.Close() })
			returns(t, "the calls", calls.Wait)
			until(t, "the end of all goroutines", func() bool { return !running() })
			until(t, "the end of all connections", func() bool { return conns.Load() == 0 })
			if _, err := s.Do(ctx, "get", "k"); !errors.Is(err, redis.ErrClosed) {
				t.Errorf("after it: %v", err)
			}
			cancel()
			p.Flow()
		}
	}
}
