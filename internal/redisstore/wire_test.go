package redisstore

import (
	"context"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redisstore/resp"
	"github.com/hasplock/hasp/internal/redistest"
)

// wired makes all callers of a Store use a wire, even one alone. The wire stays until its
// connection is closed. wired returns the server and the wire.
func wired(t *testing.T, s *Store) (*server, *resp.Wire) {
	t.Helper()
	s.always = true
	at := s.servers.(single).server
	pings(t, s)
	w := at.wire.Load()
	if w == nil {
		t.Fatal("there is no wire")
	}
	return at, w
}

// connections returns how many connections to the server there are, and how many are idle.
func connections(s *Store) (all, idle int) { return s.servers.(single).pool.Count() }

// stuck returns a Store by a proxy, and its server. A caller of it gets no reply until the test
// ends.
func stuck(t *testing.T, always bool) (*Store, *server) {
	p := redistest.Start(t, &redistest.Options{Own: true}).Proxy()
	s := opened(t, "redis://"+p.Addr(), nil)
	s.always = always
	at := s.servers.(single).server
	first, cancel := context.WithCancel(t.Context())
	p.Fail("first", faultproxy.HangReply)
	var wg sync.WaitGroup
	wg.Go(func() { s.Do(first, "get", "first") })
	t.Cleanup(func() { cancel(); wg.Wait() })
	until(t, "the first", func() bool { return at.callers.Load() == 1 && p.Pending() == 0 })
	return s, at
}

// While one caller waits for the server, another makes a wire.
func TestTwoCallersMakeAWire(t *testing.T) {
	s, at := stuck(t, false)
	until(t, "a wire", func() bool { // the wire is not kept
		if _, err := s.Do(t.Context(), "get", "second"); err != nil {
			t.Error(err)
		}
		return at.wire.Load() != nil
	})
}

// A caller that makes a wire and gets no reply does not delay the others, and makes none.
func TestACallerThatMakesAWireDelaysNoOther(t *testing.T) {
	s, at := stuck(t, true)
	returns(t, "the second", func() {
		if _, err := s.Do(t.Context(), "get", "second"); err != nil {
			t.Error(err)
		}
	})
	if at.making.Load() == nil || at.wire.Load() != nil {
		t.Error("a connection that hangs has become a wire")
	}
}

// Calls on a wire end as all calls do.
func TestCallsOnAWireEndWithTheirContext(t *testing.T) {
	stores(t, func(t *testing.T, s *Store, srv *redistest.Server) {
		wired(t, s)
		callsEnd(t, s, srv)
	})
}

// A wire without callers becomes a connection of the pool, and its goroutine ends.
func TestIdleWireGoesBackToThePool(t *testing.T) {
	stores(t, func(t *testing.T, s *Store, srv *redistest.Server) {
		at := s.servers.(single).server
		for range 2 {
			at.callers.Add(1)
			pings(t, s)
			at.callers.Add(-1)
			until(t, "idle", func() bool { return at.wire.Load() == nil })
			until(t, "one idle connection", func() bool { all, idle := connections(s); return all == 1 && idle == 1 })
			pings(t, s)
			if all, _ := connections(s); all != 1 || at.wire.Load() != nil {
				t.Errorf("alone again: %d connections, and the wire %p", all, at.wire.Load())
			}
		}
	})
}

// If a server has become a replica, a new connection to its address may lead to another server.
func TestWireToAReplicaIsLeft(t *testing.T) {
	srv := redistest.Start(t, &redistest.Options{Own: true, Real: true})
	s := opened(t, srv.URL(), nil)
	at := s.servers.(single).server
	at.callers.Add(1)
	set := func() error { _, err := s.Do(t.Context(), "set", "k", "v"); return err }
	var w *resp.Wire
	until(t, "a wire", func() bool {
		await.Must(t, set())
		w = at.wire.Load()
		return w != nil
	})
	direct := srv.Client()
	await.Must(t, direct.ReplicaOf(t.Context(), "127.0.0.1", "1").Err())
	for range 3 { // over the wire, and twice over the pool
		if err := set(); !redis.HasErrorPrefix(err, "READONLY") {
			t.Errorf("got %v", err)
		}
	}
	if w.Do(t.Context(), make([]Reply, 1), [][]string{{"ping"}}) {
		t.Error("sent over the wire")
	}
	until(t, "the wire's end", func() bool { return at.wire.Load() == nil })
	until(t, "no connection", func() bool { all, _ := connections(s); return all == 0 })
	if err := set(); !redis.HasErrorPrefix(err, "READONLY") || at.wire.Load() != nil {
		t.Errorf("got %v, and the wire %p", err, at.wire.Load())
	}
	await.Must(t, direct.ReplicaOf(t.Context(), "no", "one").Err())
	if err := set(); err != nil || at.wire.Load() == nil {
		t.Errorf("got %v, and the wire %p", err, at.wire.Load())
	}
}

// A server closes the connection if it finds an argument too long. That must not be the
// connection that other callers share.
func TestOversizedValueEndsItsOwnConnectionOnly(t *testing.T) {
	srv := redistest.Start(t, &redistest.Options{Own: true, Real: true, Args: []string{"--proto-max-bulk-len", "1mb"}})
	s := opened(t, srv.URL(), nil)
	at, w := wired(t, s)
	for _, args := range [][]string{{"set", "k", strings.Repeat("v", 2<<20)}, {"get", strings.Repeat("k", 2<<20)}} {
		if v, err := s.Do(t.Context(), args...); err == nil {
			t.Errorf("%v: got %.20v", args[0], v)
		}
		if v, err := s.Do(t.Context(), "ping"); v != "PONG" || at.wire.Load() != w {
			t.Errorf("%v: the wire has ended (%v, %v)", args[0], v, err)
		}
	}
	// A long value below the limit is stored.
	long := strings.Repeat("v", maxShared+1)
	if v, err := s.Do(t.Context(), "set", "k", long); v != "OK" {
		t.Errorf("got %v, %v", v, err)
	}
}

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
