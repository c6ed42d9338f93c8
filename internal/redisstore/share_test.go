package redisstore

import (
	"context"
	"fmt"
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
		at := server{pool: resp.NewPool(t.Context(), "", 1, nil)}
		at.pool.Close()
		made, cancel := context.WithTimeout(t.Context(), hesitation)
		defer cancel()
		at.making.Store(&made)
		for _, took := range []time.Duration{hesitation, 0, 0} {
			began := time.Now()
			replies := make([]Reply, 1)
			if s.share(t.Context(), &at, replies, []string{"ping"}); replies[0].Err != redis.ErrClosed {
				t.Errorf("not over the pool, which is closed: %v", replies[0])
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
		d, err := newDialer(address{}, nil, 10_000)
		if err != nil {
			t.Fatal(err)
		}
		d.dial = v.Proxy.Dialer()
		at := newServer(address{}, d, "virtual:6379")
		s := &Store{servers: single{at}, dialer: d}
		s.subscribe(nil)
		defer s.Close()
		f(t, s, at, v.Proxy)
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
