package redisstore

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redisstore/resp"
	"github.com/hasplock/hasp/internal/redistest"
)

// The callers wait only once for a wire that is being made.
func TestCallersWaitOnceForAWire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s Store
		var at server
		made, cancel := context.WithTimeout(t.Context(), hesitation)
		defer cancel()
		at.making.Store(&made)
		for _, took := range []time.Duration{hesitation, 0, 0} {
			began := time.Now()
			if v, err := s.share(t.Context(), &at, []any{"ping"}); err != resp.ErrUnsent {
				t.Errorf("got %v, %v", v, err)
			}
			between(t, "sent otherwise", began, took, took)
		}
	})
}

// tick is the tick of a wire.
const tick = 25 * time.Millisecond

// bubble runs f in virtual time, with a Store of one server behind a proxy.
func bubble(t *testing.T, f func(t *testing.T, s *Store, at *server, p *faultproxy.Proxy)) {
	synctest.Test(t, func(t *testing.T) {
		v := redistest.Virtual(t)
		d, err := newDialer(address{}, nil)
		if err != nil {
			t.Fatal(err)
		}
		o := options(address{}, d, "virtual:6379")
		dial := v.Proxy.Dialer()
		o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
			conn, err := dial(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			return d.calls.Wrap(conn), nil
		}
		at := newServer(o)
		s := &Store{calls: &d.calls, servers: single{at}, close: at.rdb.Close}
		s.subscribe(nil)
		defer s.Close()
		f(t, s, at, v.Proxy)
	})
}

// In a bubble of testing/synctest, wires use virtual time and leave no goroutine.
func TestWiresInABubble(t *testing.T) {
	bubble(t, func(t *testing.T, s *Store, at *server, p *faultproxy.Proxy) {
		var shared sync.WaitGroup
		for i := range 20 {
			shared.Go(func() {
				for n := range 20 {
					time.Sleep(time.Millisecond)
					if v, err := s.Run(t.Context(), counting, Call{[]string{fmt.Sprint("n", i)}, []any{1}}); v != int64(n+1) {
						t.Errorf("got %v, %v; want %d", v, err, n+1)
					}
				}
			})
		}
		shared.Wait()
		w := at.wire.Load()
		if w == nil {
			t.Fatal("there is no wire")
		}
		p.Stall()
		began := time.Now()
		at.callers.Add(1)
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		if _, err := s.Do(ctx, "get", "n0"); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("stalled: got %v", err)
		}
		between(t, "stalled", began, 2*time.Second, 2*time.Second)
		p.Flow()
		if v, err := s.Do(t.Context(), "get", "n0"); v != "20" {
			t.Errorf("after it: got %v, %v", v, err)
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		if _, err := s.Do(t.Context(), "ping"); !errors.Is(err, redis.ErrClosed) {
			t.Errorf("closed: got %v", err)
		}
	})
}

// If a connection dies silently, only the calls fail whose commands were written to it.
func TestDeadConnectionFailsFewCalls(t *testing.T) {
	bubble(t, func(t *testing.T, s *Store, at *server, p *faultproxy.Proxy) {
		for i := range 2 {
			at.callers.Add(1)
			if _, err := s.Do(t.Context(), "get", fmt.Sprint("made", i)); err != nil {
				t.Fatal(err)
			}
		}
		w := at.wire.Load()
		if w == nil {
			t.Fatal("there is no wire")
		}
		p.Fail("dead", faultproxy.HangReply)

		var wg sync.WaitGroup
		var failed atomic.Int32
		began := time.Now()
		ask := func(key string) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			wg.Go(func() {
				defer cancel()
				asked := time.Since(began)
				if _, err := s.Do(ctx, "get", key); err != nil {
					failed.Add(1)
					if asked > 3*tick {
						t.Errorf("sent %v after the connection went dead: %v", asked, err)
					}
				}
			})
			time.Sleep(time.Millisecond)
		}
		ask("dead")
		for i := range 2000 {
			ask(fmt.Sprint("k", i))
		}
		wg.Wait()
		if n := failed.Load(); n < 1 || n > int32(3*tick/time.Millisecond)+1 {
			t.Errorf("%d calls failed", n)
		}
		if now := at.wire.Load(); now == nil || now == w {
			t.Error("there is no other wire")
		}
	})
}
