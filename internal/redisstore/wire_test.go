package redisstore

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redisstore/resp"
	"github.com/hasplock/hasp/internal/redistest"
)

// wired has the callers of a store use a wire, even one alone, which is there
// until somebody closes it. It returns the server and the wire.
func wired(t *testing.T, s *Store) (*server, *resp.Wire) {
	t.Helper()
	s.always = true
	at := s.servers.(single).server
	if _, err := s.Do(t.Context(), "ping"); err != nil {
		t.Fatal(err)
	}
	w := at.wire.Load()
	if w == nil {
		t.Fatal("nobody has made a wire")
	}
	return at, w
}

// until waits for a condition.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(soon); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within %v", what, soon)
		}
	}
}

// connections is how many there are to the server, and how many are idle.
func connections(s *Store) (all, idle uint32) {
	stats := s.rdb.(*redis.Client).PoolStats()
	return stats.TotalConns, stats.IdleConns
}

func TestManyShareOneConnection(t *testing.T) {
	stores(t, func(t *testing.T, s *Store, srv *redistest.Server) {
		wired(t, s)
		var wg sync.WaitGroup
		for i := range 50 {
			wg.Go(func() {
				key := fmt.Sprint("key", i)
				for round := range 20 {
					value := fmt.Sprint(i, "/", round)
					if v, err := s.Do(t.Context(), "set", key, value); v != "OK" || err != nil {
						t.Errorf("set: got %v, %v", v, err)
					}
					if v, err := s.Run(t.Context(), reading, Call{Keys: []string{key}}); v != value || err != nil {
						t.Errorf("get: got %v, %v; want %v", v, err, value)
					}
				}
			})
		}
		wg.Wait()
		if all, _ := connections(s); all != 1 {
			t.Errorf("%d connections", all)
		}
	})
}

func TestWhoIsAloneMakesNoWire(t *testing.T) {
	s, err := open(t, redistest.Start(t, nil).URL(), nil)
	if err != nil {
		t.Fatal(err)
	}
	for range 100 {
		if _, err := s.Do(t.Context(), "ping"); err != nil {
			t.Fatal(err)
		}
	}
	if s.servers.(single).wire.Load() != nil {
		t.Error("there is a wire")
	}
}

// Two at once: the one waits for the server, the other has the wire made.
func TestWhoIsNotAloneMakesAWire(t *testing.T) {
	srv := redistest.Start(t, &redistest.Options{Own: true})
	p := srv.Proxy()
	s, err := open(t, "redis://"+p.Addr(), nil)
	if err != nil {
		t.Fatal(err)
	}
	at := s.servers.(single).server
	first, cancel := context.WithCancel(t.Context())
	p.Fail("first", faultproxy.HangReply)
	var wg sync.WaitGroup
	wg.Go(func() { s.Do(first, "get", "first") })
	until(t, "the first", func() bool { return at.callers.Load() == 1 })
	until(t, "a wire", func() bool { // which is not kept
		if _, err := s.Do(t.Context(), "get", "second"); err != nil {
			t.Error(err)
		}
		return at.wire.Load() != nil
	})
	cancel()
	wg.Wait()
}

// Who makes a wire, and hears nothing, holds up nobody.
func TestWhoMakesAWireHoldsUpNobody(t *testing.T) {
	srv := redistest.Start(t, &redistest.Options{Own: true})
	p := srv.Proxy()
	s, err := open(t, "redis://"+p.Addr(), nil)
	if err != nil {
		t.Fatal(err)
	}
	s.always = true
	at := s.servers.(single).server
	first, cancel := context.WithCancel(t.Context())
	p.Fail("first", faultproxy.HangReply)
	var wg sync.WaitGroup
	wg.Go(func() { s.Do(first, "get", "first") })
	until(t, "the first", func() bool { return at.making.Load() != nil && p.Pending() == 0 })
	ended(t, "the second", func() {
		if _, err := s.Do(t.Context(), "get", "second"); err != nil {
			t.Error(err)
		}
	})
	cancel()
	wg.Wait()
	if at.wire.Load() != nil {
		t.Error("a connection that hangs has become a wire")
	}
}

// What callsEnd says of calls, on wires.
func TestCallsOnAWireEndWithTheirContext(t *testing.T) {
	stores(t, func(t *testing.T, s *Store, srv *redistest.Server) {
		wired(t, s)
		callsEnd(t, s, srv)
	})
}

// Half of those who wait leave, the others are answered, over the same wire.
func TestWhoLeavesAWireTakesNobodyAlong(t *testing.T) {
	stores(t, func(t *testing.T, s *Store, srv *redistest.Server) {
		_, w := wired(t, s)
		const callers = 20
		for i := range callers {
			if _, err := s.Do(t.Context(), "set", fmt.Sprint("key", i), i); err != nil {
				t.Fatal(err)
			}
		}
		srv.Pause()
		leave, cancel := context.WithCancel(t.Context())
		var leaving, staying sync.WaitGroup
		answers := make([]any, callers)
		errs := make([]error, callers)
		for i := range callers {
			ctx, wg := t.Context(), &staying
			if i%2 == 0 {
				ctx, wg = leave, &leaving
			}
			wg.Go(func() { answers[i], errs[i] = s.Do(ctx, "get", fmt.Sprint("key", i)) })
		}
		until(t, "all are sent", func() bool { _, sent := w.Pending(); return sent == callers })
		cancel()
		ended(t, "those who leave", leaving.Wait)
		srv.Resume()
		ended(t, "those who stay", staying.Wait)
		for i := range callers {
			switch {
			case i%2 == 0 && !errors.Is(errs[i], context.Canceled):
				t.Errorf("caller %d, who left: %v, %v", i, answers[i], errs[i])
			case i%2 == 1 && answers[i] != fmt.Sprint(i):
				t.Errorf("caller %d, who stayed: %v, %v", i, answers[i], errs[i])
			}
		}
	})
}

// The outcome of what was lost is unknown, and it was sent once.
func TestSentOnceOverAWire(t *testing.T) {
	for _, fault := range []faultproxy.Fault{faultproxy.LoseReply, faultproxy.HangReply} {
		srv := redistest.Start(t, &redistest.Options{Own: true})
		p, direct := srv.Proxy(), srv.Client()
		s, err := open(t, "redis://"+p.Addr(), nil)
		if err != nil {
			t.Fatal(err)
		}
		_, w := wired(t, s)
		p.Fail("lost", fault)
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() {
			if _, err := w.Do(ctx, []any{"incr", "lost"}); err == nil || err == resp.ErrUnsent {
				t.Errorf("fault %d: got %v", fault, err)
			}
		})
		until(t, "carried out", func() bool { return direct.Exists(t.Context(), "lost").Val() == 1 })
		if fault == faultproxy.HangReply {
			cancel()
		}
		ended(t, "a call", wg.Wait)
		cancel()
		if v, err := direct.Incr(t.Context(), "lost").Result(); v != 2 {
			t.Errorf("fault %d: after it: got %v, %v", fault, v, err)
		}
	}
}

// Of a batch that was not sent at all nothing is lost.
func TestWhatAWireDidNotSendIsSentOtherwise(t *testing.T) {
	s, err := open(t, redistest.Start(t, nil).URL(), nil)
	if err != nil {
		t.Fatal(err)
	}
	_, w := wired(t, s)
	w.GiveUp(errors.New("over"))
	if v, err := w.Do(t.Context(), []any{"ping"}); err != resp.ErrUnsent {
		t.Errorf("got %v, %v", v, err)
	}
	if v, err := s.Do(t.Context(), "ping"); v != "PONG" {
		t.Errorf("got %v, %v", v, err)
	}
	// What is no string and no number is go-redis' affair.
	if v, err := s.Do(t.Context(), "set", "float", 1.5); v != "OK" {
		t.Errorf("got %v, %v", v, err)
	}
	if v, err := s.Do(t.Context(), "get", "float"); v != "1.5" {
		t.Errorf("got %v, %v", v, err)
	}
}

func TestServerThatComesBackIsFoundAtOnceWithWires(t *testing.T) {
	srv := redistest.Start(t, &redistest.Options{Own: true})
	s, err := open(t, srv.URL(), nil)
	if err != nil {
		t.Fatal(err)
	}
	at, w := wired(t, s)
	srv.Kill()
	until(t, "the wire's end", func() bool { return at.wire.Load() != w })
	for range 100 {
		if _, err := s.Do(t.Context(), "ping"); err == nil {
			t.Fatal("a dead server answers")
		}
	}
	srv.Restart()
	if v, err := s.Do(t.Context(), "ping"); v != "PONG" {
		t.Errorf("got %v, %v", v, err)
	}
}

// One that is refused, or has a script that nobody knows, or wants half the
// memory, is nobody else's trouble.
func TestRepliesOverAWireAreTheirOwnCallers(t *testing.T) {
	stores(t, func(t *testing.T, s *Store, srv *redistest.Server) {
		wired(t, s)
		huge := strings.Repeat("0123456789", 50_000)
		long := NewScript(`local t = {} for i = 1, 5000 do t[i] = {i, ARGV[1]} end return t`)
		var wg sync.WaitGroup
		for i := range 12 {
			wg.Go(func() {
				key := fmt.Sprint("{own}", i)
				for range 5 {
					switch i % 4 {
					case 0:
						_, err := s.Do(t.Context(), "nonsense", key)
						if !redis.HasErrorPrefix(err, "unknown command") {
							t.Errorf("refused: got %v", err)
						}
					case 1:
						if v, err := s.Do(t.Context(), "set", key, huge); v != "OK" {
							t.Errorf("huge: got %v, %v", v, err)
						}
						if v, err := s.Do(t.Context(), "get", key); v != huge {
							t.Errorf("huge: got %.20v, %v", v, err)
						}
					case 2:
						srv.Client().ScriptFlush(t.Context())
						v, err := s.Run(t.Context(), long, Call{[]string{key}, []any{"x"}})
						if all, _ := v.([]any); len(all) != 5000 || fmt.Sprint(all[4999]) != "[5000 x]" {
							t.Errorf("long: got %.50v, %v", v, err)
						}
					default:
						if v, err := s.Do(t.Context(), "get", "{own}nothing"); v != nil || err != nil {
							t.Errorf("nothing: got %v, %v", v, err)
						}
					}
				}
			})
		}
		wg.Wait()
	})
}

// Those who wait hear of Close, and nothing runs on.
func TestCloseEndsWires(t *testing.T) {
	stores(t, func(t *testing.T, s *Store, srv *redistest.Server) {
		_, w := wired(t, s)
		srv.Pause()
		defer srv.Resume()
		var wg sync.WaitGroup
		for range 10 {
			wg.Go(func() {
				if v, err := s.Do(t.Context(), "get", "k"); err == nil {
					t.Errorf("got %v", v)
				}
			})
		}
		until(t, "all are sent", func() bool { _, sent := w.Pending(); return sent == 10 })
		ended(t, "Close", func() { s.Close() })
		ended(t, "a call", wg.Wait)
		ended(t, "a wire", s.wires.wg.Wait)
		if _, err := s.Do(t.Context(), "ping"); !errors.Is(err, redis.ErrClosed) {
			t.Errorf("after Close: %v", err)
		}
	})
}

// A wire that nobody uses is a connection like any other, and no goroutine.
func TestIdleWireGoesBackToThePool(t *testing.T) {
	stores(t, func(t *testing.T, s *Store, srv *redistest.Server) {
		at := s.servers.(single).server
		for range 2 {
			at.callers.Add(1)
			if v, err := s.Do(t.Context(), "ping"); v != "PONG" {
				t.Errorf("got %v, %v", v, err)
			}
			at.callers.Add(-1)
			until(t, "idle", func() bool { return at.wire.Load() == nil })
			ended(t, "a goroutine", s.wires.wg.Wait)
			if all, idle := connections(s); all != 1 || idle != 1 {
				t.Errorf("%d connections, %d idle", all, idle)
			}
			if v, err := s.Do(t.Context(), "ping"); v != "PONG" {
				t.Errorf("alone again: got %v, %v", v, err)
			}
			if all, _ := connections(s); all != 1 {
				t.Errorf("alone again: %d connections", all)
			}
		}
	})
}

// A server that has become a replica may have a successor at its address, to
// which a new connection leads.
func TestWireToAReplicaIsLeft(t *testing.T) {
	srv := redistest.Start(t, &redistest.Options{Own: true, Real: true})
	s, err := open(t, srv.URL(), nil)
	if err != nil {
		t.Fatal(err)
	}
	at := s.servers.(single).server
	at.callers.Add(1)
	set := func() error { _, err := s.Do(t.Context(), "set", "k", "v"); return err }
	var w *resp.Wire
	until(t, "a wire", func() bool {
		if err := set(); err != nil {
			t.Fatal(err)
		}
		w = at.wire.Load()
		return w != nil
	})
	direct := srv.Client()
	if err := direct.ReplicaOf(t.Context(), "127.0.0.1", "1").Err(); err != nil {
		t.Fatal(err)
	}
	for range 3 { // over the wire, and twice otherwise
		if err := set(); !redis.HasErrorPrefix(err, "READONLY") {
			t.Errorf("got %v", err)
		}
	}
	if v, err := w.Do(t.Context(), []any{"ping"}); err != resp.ErrUnsent {
		t.Errorf("over the wire: got %v, %v", v, err)
	}
	until(t, "the wire's end", func() bool { return at.wire.Load() == nil })
	ended(t, "a goroutine", s.wires.wg.Wait)
	if all, _ := connections(s); all != 0 {
		t.Errorf("%d connections are left", all)
	}
	if err := set(); !redis.HasErrorPrefix(err, "READONLY") || at.wire.Load() != nil {
		t.Errorf("got %v, and the wire %p", err, at.wire.Load())
	}
	if err := direct.ReplicaOf(t.Context(), "no", "one").Err(); err != nil {
		t.Fatal(err)
	}
	if err := set(); err != nil || at.wire.Load() == nil {
		t.Errorf("got %v, and the wire %p", err, at.wire.Load())
	}
}

// Who comes while the Store is closed makes no wire, and hangs on none.
func TestNobodyMakesAWireAfterClose(t *testing.T) {
	s, err := open(t, redistest.Start(t, nil).URL(), nil)
	if err != nil {
		t.Fatal(err)
	}
	s.always = true
	s.wires.close()
	for range 3 {
		if v, err := s.Do(t.Context(), "ping"); v != "PONG" {
			t.Errorf("got %v, %v", v, err)
		}
		if all, idle := connections(s); all != 1 || idle != 1 {
			t.Errorf("%d connections, %d idle", all, idle)
		}
	}
	if s.servers.(single).wire.Load() != nil {
		t.Error("there is a wire")
	}
}

// A server that finds an argument too long closes the connection. That must not
// be the one that others share.
func TestOversizedValueEndsItsOwnConnectionOnly(t *testing.T) {
	srv := redistest.Start(t, &redistest.Options{Own: true, Real: true, Args: []string{"--proto-max-bulk-len", "1mb"}})
	s, err := open(t, srv.URL(), nil)
	if err != nil {
		t.Fatal(err)
	}
	at, w := wired(t, s)
	for _, args := range [][]any{{"set", "k", strings.Repeat("v", 2<<20)}, {"get", strings.Repeat("k", 2<<20)}} {
		if v, err := s.Do(t.Context(), args...); err == nil {
			t.Errorf("%v: got %.20v", args[0], v)
		}
		if v, err := s.Do(t.Context(), "ping"); v != "PONG" || at.wire.Load() != w || w.Over() {
			t.Errorf("%v: the wire has ended (%v, %v)", args[0], v, err)
		}
	}
	// What is only long travels and is answered.
	long := strings.Repeat("v", maxShared+1)
	if v, err := s.Do(t.Context(), "set", "k", long); v != "OK" {
		t.Errorf("got %v, %v", v, err)
	}
}

// The connection of a dead wire is nobody's next one.
func TestDeadWireIsReplaced(t *testing.T) {
	stores(t, func(t *testing.T, s *Store, srv *redistest.Server) {
		// The connection of this command is the one that the wire takes.
		within, end := s.calls.Begin(t.Context())
		resp.Process(within, s.rdb, resp.NewCommand(within, []any{"ping"}))
		end()
		conn := s.calls.Conn(within)

		at, w := wired(t, s)
		conn.Close()
		until(t, "the wire's end", func() bool { return at.wire.Load() != w })
		ended(t, "a goroutine", s.wires.wg.Wait)
		if all, _ := connections(s); all != 0 {
			t.Errorf("%d connections are left", all)
		}
		if v, err := s.Do(t.Context(), "ping"); v != "PONG" {
			t.Errorf("got %v, %v", v, err)
		}
	})
}

// Who is to wait for replicas has a connection of his own, since they confirm
// what came over one.
func TestHoldsThatReplicasConfirmUseNoWire(t *testing.T) {
	s, err := open(t, redistest.Start(t, nil).URL(), nil)
	if err != nil {
		t.Fatal(err)
	}
	s.always, s.replicas = true, 1
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	_, err = s.Hold(ctx, "set", "kept", "v")
	if s.servers.(single).wire.Load() != nil {
		t.Errorf("there is a wire (%v)", err)
	}
}
