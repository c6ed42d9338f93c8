package pubsub_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp/internal/redisstore"
	"github.com/hasplock/hasp/internal/redisstore/pubsub"

	mini "github.com/alicebob/miniredis/v2/server"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
)

// listening is a Store in virtual time, with its server.
type listening struct {
	*redisstore.Store
	t      *testing.T
	srv    *redistest.VirtualServer
	direct *redis.Client
	dials  atomic.Int64
}

// virtually runs f in virtual time. When the Store has been closed, no goroutine may be
// left.
func virtually(t *testing.T, protocol int, f func(t *testing.T, s *listening)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s := &listening{t: t, srv: redistest.Virtual(t)}
		s.direct = s.srv.Direct()
		dial := s.srv.Proxy.Dialer()
		rdb := redis.NewClient(&redis.Options{
			Addr: "virtual:6379", Protocol: protocol, ContextTimeoutEnabled: true, ReadTimeout: -1, WriteTimeout: -1,
			DialerRetries: 1, MaxRetries: -1, DisableIdentity: true,
			PoolSize:                 10_000, // no caller may wait for a connection: see redistest.VirtualServer
			MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
			Dialer: func(ctx context.Context, network, addr string) (net.Conn, error) {
				if ctx.Err() != nil {
					return nil, ctx.Err() // as a net.Dialer does
				}
				s.dials.Add(1)
				return dial(ctx, network, addr)
			},
		})
		s.Store = redisstore.New(rdb)
		f(t, s)
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		synctest.Wait()
		if left := goroutines(); left != "" {
			t.Errorf("after Close:\n%s", left)
		}
		rdb.Close()
	})
}

// goroutines returns the stacks of a Store's goroutines in virtual time, without the
// caller's.
func goroutines() string {
	buf := make([]byte, 4<<20)
	all := strings.Split(string(buf[:runtime.Stack(buf, true)]), "\n\n")
	all = slices.DeleteFunc(all[1:], func(s string) bool {
		return !strings.Contains(s, "synctest bubble") || !strings.Contains(s, "redisstore.(*") && !strings.Contains(s, "pubsub.(*")
	})
	return strings.Join(all, "\n\n")
}

// recorder keeps the messages of a Listener.
type recorder struct {
	*pubsub.Listener
	mu     sync.Mutex
	all    []string
	agains int
	also   func() // is called after each message
}

func (e *recorder) record(payload string, again bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if again {
		payload = "again"
		e.agains++
	}
	e.all = append(e.all, payload)
	if e.also != nil {
		e.also()
	}
}

// take returns the messages since the last call.
func (e *recorder) take() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	all := strings.Join(e.all, " ")
	e.all = nil
	return all
}

// count returns how often messages may have been missed.
func (e *recorder) count() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.agains
}

func (e *recorder) isEmpty() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.all) == 0
}

func (s *listening) listen(name string) *recorder {
	s.t.Helper()
	e := &recorder{}
	l, err := s.Listen(s.t.Context(), name, name, e.record)
	if err != nil {
		s.t.Fatal(err)
	}
	e.Listener = l
	return e
}

// listenTo listens in real time. On a busy machine a connection may take several
// attempts.
func listenTo(t *testing.T, s *redisstore.Store, name string) *recorder {
	t.Helper()
	e := &recorder{}
	for end := time.Now().Add(time.Minute); ; {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		l, err := s.Listen(ctx, name, name, e.record)
		cancel()
		if err == nil {
			e.Listener = l
			return e
		}
		if time.Now().After(end) {
			t.Fatal(err)
		}
	}
}

func (s *listening) publish(name, payload string) {
	s.t.Helper()
	if err := s.direct.Publish(s.t.Context(), name, payload).Err(); err != nil {
		s.t.Fatal(err)
	}
	synctest.Wait()
}

// hook makes the server call f before each command.
func (s *listening) hook(f func(c *mini.Peer, cmd string, args ...string) bool) {
	s.direct.Ping(s.t.Context()) // starts the server
	s.srv.Mini.Server().SetPreHook(f)
}

func (s *listening) wants(e *recorder, want string) {
	s.t.Helper()
	synctest.Wait()
	if got := e.take(); got != want {
		s.t.Errorf("got %q, want %q", got, want)
	}
}

// commands returns how often each command was sent since the last call.
func (s *listening) commands() string {
	n := map[string]int{}
	for _, c := range s.srv.Proxy.Commands() {
		name, _, _ := strings.Cut(c, " ")
		if name != "ping" {
			n[name]++
		}
	}
	return fmt.Sprint(n)
}

func TestListenReceivesLaterMessages(t *testing.T) {
	for _, protocol := range []int{2, 3} {
		virtually(t, protocol, func(t *testing.T, s *listening) {
			a, b := s.listen("a"), s.listen("b")
			s.publish("a", "one")
			s.publish("b", "two")
			s.publish("a", "three")
			s.wants(a, "one three")
			s.wants(b, "two")
			a.Close()
			s.publish("a", "four")
			s.wants(a, "")
			c := s.listen("c")
			last, err := s.Listen(t.Context(), "c", "c", func(string, bool) { t.Error("a closed Listener got a message") })
			if err != nil {
				t.Fatal(err)
			}
			c.also = last.Close
			s.publish("c", "x")
			s.wants(c, "x")
			if n := s.dials.Load(); n != 1 {
				t.Errorf("%d connections", n)
			}
		})
	}
}

// The Listeners of a channel share its subscription. A Listener that comes when it is
// confirmed sends nothing.
func TestSubscriptionsAreShared(t *testing.T) {
	virtually(t, 3, func(t *testing.T, s *listening) {
		s.srv.Proxy.Commands()
		first := s.listen("ch")
		s.srv.Proxy.Stall()
		var all []*recorder
		for range 100 {
			all = append(all, s.listen("ch"))
		}
		s.srv.Proxy.Flow()
		first.Close()
		s.publish("ch", "x")
		for _, e := range all {
			s.wants(e, "x")
			e.Close()
		}
		s.wants(first, "")
		if got, want := s.commands(), "map[subscribe:1]"; got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	})
}

// The channel of a contended key is subscribed to once, if there is a Listener most of the
// time. After the last Listener the subscription ends, and later the connection.
func TestSubscriptionsAreDroppedLazily(t *testing.T) {
	virtually(t, 3, func(t *testing.T, s *listening) {
		s.srv.Proxy.Commands()
		other := s.listen("other")
		for range 100 {
			s.listen("hot").Close()
			time.Sleep(pubsub.Lingering * 9 / 10)
		}
		if got, want := s.commands(), "map[subscribe:2]"; got != want {
			t.Errorf("got %s, want %s", got, want)
		}
		time.Sleep(pubsub.Lingering + pubsub.PingEvery)
		synctest.Wait()
		if got := s.srv.Mini.PubSubChannels("*"); !slices.Equal(got, []string{"other"}) {
			t.Errorf("subscribed to %q", got)
		}
		other.Close()
		other.Close() // the second call does nothing
		again := s.listen("other")
		time.Sleep(time.Minute)
		s.publish("other", "x")
		s.wants(again, "x")
		again.Close()
		time.Sleep(pubsub.Lingering + 2*pubsub.PingEvery)
		synctest.Wait()
		if got := s.srv.Mini.PubSubChannels("*"); len(got) > 0 {
			t.Errorf("subscribed to %q", got)
		}
		if s.dials.Load() != 1 {
			t.Errorf("%d connections", s.dials.Load())
		}
		for end := time.Now().Add(2 * pubsub.IdleAfter); goroutines() != "" && time.Now().Before(end); {
			time.Sleep(pubsub.PingEvery / 10)
			synctest.Wait()
		}
		if left := goroutines(); left != "" {
			t.Errorf("after a while:\n%s", left)
		}
		back := s.listen("other") // at once, so that nothing that is left may end its connection
		time.Sleep(2 * pubsub.IdleAfter)
		s.publish("other", "y")
		s.wants(back, "y")
		if s.dials.Load() != 2 {
			t.Errorf("%d connections", s.dials.Load())
		}
	})
}

// One command subscribes to all channels whose Listeners come at about the same time.
func TestManyChannelsTravelTogether(t *testing.T) {
	virtually(t, 3, func(t *testing.T, s *listening) {
		s.listen("first")
		s.srv.Proxy.Commands()
		s.srv.Proxy.Stall()
		recorders := make([]*recorder, 1000)
		var wg sync.WaitGroup
		for i := range recorders {
			wg.Go(func() { recorders[i] = s.listen(fmt.Sprint("ch", i)) })
		}
		synctest.Wait() // a write to a stalled proxy blocks, and the others wait for it
		s.srv.Proxy.Flow()
		wg.Wait()
		if n := s.srv.Proxy.Count(); n > 5 {
			t.Errorf("%d commands: %s", n, s.commands())
		}
		s.srv.Proxy.Cut()
		time.Sleep(time.Second)
		for i := range recorders {
			if err := s.direct.Publish(t.Context(), fmt.Sprint("ch", i), "x").Err(); err != nil {
				t.Fatal(err)
			}
		}
		synctest.Wait()
		for i, e := range recorders {
			if got, want := e.take(), "again x"; got != want {
				t.Errorf("channel %d: got %q, want %q", i, got, want)
			}
		}
		if got, want := s.dials.Load(), int64(2); got != want {
			t.Errorf("%d connections, want %d", got, want)
		}
	})
}

// A connection on which nothing arrives is replaced, even if writes to it succeed.
func TestPongIsDemanded(t *testing.T) {
	virtually(t, 3, func(t *testing.T, s *listening) {
		a, b := s.listen("a"), s.listen("b")
		time.Sleep(time.Minute)
		s.wants(a, "") // a connection that works is not replaced
		s.srv.Proxy.Fail("ping", faultproxy.HangReply)
		began := time.Now()
		for b.isEmpty() && time.Since(began) < time.Minute {
			time.Sleep(time.Millisecond)
			synctest.Wait()
		}
		if d := time.Since(began); d > pubsub.PingEvery+pubsub.DeadAfter+time.Second {
			t.Errorf("took %v", d)
		}
		s.wants(a, "again")
		s.wants(b, "again")
		s.publish("a", "x")
		s.wants(a, "x")
	})
}

// After a connection was lost, a channel is confirmed again before its Listeners learn of
// the gap. While a server is down there are few attempts to connect, and Listen returns
// the error.
func TestReconnect(t *testing.T) {
	virtually(t, 3, func(t *testing.T, s *listening) {
		a, b := s.listen("a"), s.listen("b")
		b.record("", false)
		b.take()
		for range 3 {
			s.srv.Proxy.Cut()
			time.Sleep(100 * time.Millisecond)
			s.wants(a, "again")
			s.wants(b, "again")
			s.publish("b", "x")
			s.wants(b, "x")
		}
		for range 20 { // connections that lasted for a while are no failures
			time.Sleep(time.Minute)
			s.srv.Proxy.Cut()
			time.Sleep(20 * time.Millisecond)
			s.wants(a, "again")
			s.wants(b, "again")
		}
		s.srv.Proxy.Down()
		s.dials.Store(0)
		for end := time.Now().Add(time.Minute); time.Now().Before(end); {
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			_, err := s.Listen(ctx, "c", "c", a.record)
			cancel()
			if err == nil || !strings.HasPrefix(err.Error(), `redis virtual:6379: channel "c": `) || ctx.Err() == context.DeadlineExceeded {
				t.Fatalf("server down: %v", err)
			}
		}
		if n := s.dials.Load(); n < 30 || n > 150 {
			t.Errorf("%d attempts in a minute", n)
		}
		s.wants(a, "")
		s.srv.Proxy.Up()
		time.Sleep(2 * time.Second)
		s.wants(a, "again")
		s.publish("a", "x")
		s.wants(a, "x")
	})
}

// While a server is down, many short calls of Listen make few attempts to connect.
func TestListenConnectsRarelyToAServerThatIsDown(t *testing.T) {
	virtually(t, 3, func(t *testing.T, s *listening) {
		s.srv.Proxy.Down()
		for end := time.Now().Add(time.Minute); time.Now().Before(end); {
			if _, err := s.Listen(t.Context(), "c", "c", nil); err == nil {
				t.Fatal("no error")
			}
		}
		if n := s.dials.Load(); n < 30 || n > 150 {
			t.Errorf("%d attempts in a minute", n)
		}
	})
}

// If a server closes each connection at once, there are few attempts to connect.
func TestShortConnectionsCountAsFailures(t *testing.T) {
	virtually(t, 3, func(t *testing.T, s *listening) {
		s.listen("a")
		s.dials.Store(0)
		for range 1000 {
			s.srv.Proxy.Fail("subscribe", faultproxy.LoseReply)
		}
		s.srv.Proxy.Cut()
		time.Sleep(time.Minute)
		if n := s.dials.Load(); n < 30 || n > 150 {
			t.Errorf("%d connections in a minute", n)
		}
	})
}

func TestListenEndsWithItsContext(t *testing.T) {
	virtually(t, 3, func(t *testing.T, s *listening) {
		s.listen("a")
		s.srv.Proxy.Fail("subscribe", faultproxy.HoldRequest)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second/2)
		defer cancel()
		began := time.Now()
		_, err := s.Listen(ctx, "b", "b", func(string, bool) { t.Error("got a message") })
		if !errors.Is(err, context.DeadlineExceeded) || time.Since(began) != time.Second/2 {
			t.Errorf("got %v after %v", err, time.Since(began))
		}
		s.srv.Proxy.Release()
		s.publish("b", "x")
		time.Sleep(pubsub.Lingering + 2*pubsub.PingEvery)
		synctest.Wait()
		if got := s.srv.Mini.PubSubChannels("*"); !slices.Equal(got, []string{"a"}) {
			t.Errorf("subscribed to %q", got)
		}
	})
}

// Many calls of Relisten make one new connection.
func TestRelisten(t *testing.T) {
	virtually(t, 3, func(t *testing.T, s *listening) {
		a, b := s.listen("a"), s.listen("b")
		time.Sleep(time.Minute)
		for range 3 {
			for range 10 {
				a.Relisten()
				b.Relisten()
			}
			time.Sleep(100 * time.Millisecond)
			s.wants(a, "again")
			s.wants(b, "again")
			s.publish("b", "x")
			s.wants(b, "x")
			a.Relisten() // does nothing, because the connection is new
			time.Sleep(2 * time.Second)
			s.wants(a, "")
		}
		if n := s.dials.Load(); n != 4 {
			t.Errorf("%d connections", n)
		}
		a.Close()
		a.Relisten()
	})
}

// The connection to a server that has become a replica is replaced once, however many
// commands the server refuses, and however young the connection is.
func TestSubscriptionsLeaveAReplica(t *testing.T) {
	for _, text := range []string{
		"READONLY You can't write against a read only replica.",
		"ERR Error running script (call to f_0): @user_script:1: @user_script: 1: -READONLY You can't write against a read only replica.",
	} {
		virtually(t, 3, func(t *testing.T, s *listening) {
			a := s.listen("a")
			s.hook(func(c *mini.Peer, cmd string, _ ...string) bool {
				if cmd == "SET" {
					c.Block(func(w *mini.Writer) { w.WriteError(text) })
				}
				return cmd == "SET"
			})
			for range 10 {
				if _, err := s.Do(t.Context(), "set", "k", "v"); err == nil {
					t.Error("no error")
				}
			}
			s.wants(a, "")
			time.Sleep(time.Minute)
			s.wants(a, "again")
			s.publish("a", "x")
			s.wants(a, "x")
		})
	}
}

// A Listener of Subscribe is confirmed when the fault has ended.
func TestSubscribeGoesOn(t *testing.T) {
	for name, fault := range map[string]func(p *faultproxy.Proxy) (mend func()){
		"down":    func(p *faultproxy.Proxy) func() { p.Down(); return p.Up },
		"stalled": func(p *faultproxy.Proxy) func() { p.Stall(); return p.Flow },
		"refused": func(p *faultproxy.Proxy) func() {
			p.Answer("subscribe", "-NOPERM this user has no permissions\r\n")
			return p.Forgive
		},
	} {
		t.Run(name, func(t *testing.T) {
			virtually(t, 3, func(t *testing.T, s *listening) {
				mend := fault(s.srv.Proxy)
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				e := &recorder{}
				l, err := s.Subscribe(ctx, "a", "a", e.record)
				if err == nil || l.Command() != "" {
					t.Errorf("got %v, %q", err, l.Command())
				}
				time.Sleep(20 * time.Second)
				s.wants(e, "")
				mend()
				time.Sleep(10 * time.Second)
				s.wants(e, "again")
				s.publish("a", "x")
				s.wants(e, "x")
				if got := l.Command(); got != "PUBLISH" {
					t.Errorf("publishes with %q", got)
				}
				l.Close()
				time.Sleep(pubsub.Lingering + 2*pubsub.PingEvery)
				synctest.Wait()
				if got := s.srv.Mini.PubSubChannels("*"); len(got) > 0 {
					t.Errorf("subscribed to %q", got)
				}
			})
		})
	}
}

func TestCloseEndsListening(t *testing.T) {
	virtually(t, 3, func(t *testing.T, s *listening) {
		a := s.listen("a")
		s.srv.Proxy.Stall()
		ended := make(chan error)
		go func() {
			_, err := s.Listen(t.Context(), "b", "b", a.record)
			ended <- err
		}()
		synctest.Wait()
		s.Close()
		if err := <-ended; !errors.Is(err, redis.ErrClosed) {
			t.Errorf("got %v", err)
		}
		if _, err := s.Listen(t.Context(), "a", "a", a.record); !errors.Is(err, redis.ErrClosed) {
			t.Errorf("got %v", err)
		}
		a.Relisten()
		a.Close()
		s.srv.Proxy.Flow()
		s.wants(a, "")
	})
	virtually(t, 3, func(t *testing.T, s *listening) { // a Store that was never used
		s.Close()
		if _, err := s.Listen(t.Context(), "a", "a", nil); !errors.Is(err, redis.ErrClosed) {
			t.Errorf("got %v", err)
		}
	})
}

// A user without the right to PING or UNSUBSCRIBE receives messages: a refusal is an
// answer as well.
func TestListenNeedsOnlySubscribe(t *testing.T) {
	virtually(t, 3, func(t *testing.T, s *listening) {
		s.hook(func(c *mini.Peer, cmd string, _ ...string) bool {
			refuse := cmd == "PING" || cmd == "UNSUBSCRIBE"
			if refuse {
				c.Block(func(w *mini.Writer) {
					w.WriteError("NOPERM this user has no permissions to run the '" + cmd + "' command")
				})
			}
			return refuse
		})
		a := s.listen("a")
		for range 10 {
			s.listen("b").Close()
			time.Sleep(pubsub.Lingering + 2*pubsub.PingEvery)
		}
		b := s.listen("b")
		s.publish("a", "x")
		s.publish("b", "y")
		s.wants(a, "x")
		s.wants(b, "y")
		if n := s.dials.Load(); n != 1 {
			t.Errorf("%d connections", n)
		}
	})
}

// If the server refuses a command because of one channel, the other channels are
// subscribed to.
func TestOneRefusedChannelOfMany(t *testing.T) {
	for _, protocol := range []int{2, 3} {
		virtually(t, protocol, func(t *testing.T, s *listening) {
			var allowed atomic.Bool
			s.hook(func(c *mini.Peer, cmd string, args ...string) bool {
				refuse := cmd == "SUBSCRIBE" && slices.Contains(args, "bad") && !allowed.Load()
				if refuse {
					c.Block(func(w *mini.Writer) {
						w.WriteError("NOPERM this user has no permissions to access one of the channels")
					})
				}
				return refuse
			})
			first := s.listen("first")
			s.srv.Proxy.Stall()
			var wg sync.WaitGroup
			bad := func() {
				_, err := s.Listen(t.Context(), "bad", "bad", nil)
				if !redis.HasErrorPrefix(err, "NOPERM") || !strings.HasPrefix(err.Error(), `redis virtual:6379: channel "bad": NOPERM`) {
					t.Errorf("got %v", err)
				}
			}
			recorders := make([]*recorder, 50)
			for i := range recorders {
				wg.Go(func() { recorders[i] = s.listen(fmt.Sprint("good", i)) })
				if i%10 == 0 {
					wg.Go(bad)
				}
			}
			synctest.Wait()
			s.srv.Proxy.Flow()
			wg.Wait()
			bad()
			s.wants(first, "")
			allowed.Store(true)
			recorders = append(recorders, s.listen("bad"))
			for range 2 {
				for i, e := range recorders[:50] {
					s.publish(fmt.Sprint("good", i), "x")
					s.wants(e, "x")
				}
				s.wants(first, "")
				s.publish("bad", "x")
				s.wants(recorders[50], "x")

				allowed.Store(false) // the Listener that exists learns it at the next connection
				s.srv.Proxy.Cut()
				time.Sleep(time.Second)
				for _, e := range append(recorders[:50:50], first) {
					s.wants(e, "again")
				}
				s.wants(recorders[50], "")
				bad()
				allowed.Store(true)
				time.Sleep(2 * pubsub.PingEvery)
				s.wants(recorders[50], "again")
			}
		})
	}
}
