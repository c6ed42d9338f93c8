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

// listening is a Store in virtual time, and what it does to its server.
type listening struct {
	*redisstore.Store
	t      *testing.T
	srv    *redistest.VirtualServer
	direct *redis.Client
	dials  atomic.Int64
}

// virtually runs f in virtual time. Nothing may be left when the Store has
// been closed.
func virtually(t *testing.T, protocol int, f func(t *testing.T, s *listening)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s := &listening{t: t, srv: redistest.Virtual(t)}
		s.direct = s.srv.Direct()
		dial := s.srv.Proxy.Dialer()
		rdb := redis.NewClient(&redis.Options{
			Addr: "virtual:6379", Protocol: protocol, ContextTimeoutEnabled: true, ReadTimeout: -1, WriteTimeout: -1,
			DialerRetries: 1, MaxRetries: -1, DisableIdentity: true,
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

// goroutines returns the stacks of those of a Store, in virtual time, but
// for the caller's.
func goroutines() string {
	buf := make([]byte, 4<<20)
	all := strings.Split(string(buf[:runtime.Stack(buf, true)]), "\n\n")
	all = slices.DeleteFunc(all[1:], func(s string) bool {
		return !strings.Contains(s, "synctest bubble") || !strings.Contains(s, "redisstore.(*") && !strings.Contains(s, "pubsub.(*")
	})
	return strings.Join(all, "\n\n")
}

// ear collects what a Listener hears.
type ear struct {
	*pubsub.Listener
	mu     sync.Mutex
	all    []string
	agains int
	also   func() // is called after each
}

func (e *ear) heard(payload string, again bool) {
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

// take returns what was heard since the last call.
func (e *ear) take() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	all := strings.Join(e.all, " ")
	e.all = nil
	return all
}

// count is how often e has heard "again".
func (e *ear) count() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.agains
}

func (e *ear) silent() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.all) == 0
}

func (s *listening) listen(name string) *ear {
	s.t.Helper()
	e := &ear{}
	l, err := s.Listen(s.t.Context(), name, name, e.heard)
	if err != nil {
		s.t.Fatal(err)
	}
	e.Listener = l
	return e
}

// listenTo listens in real time, in which a connection may take several
// attempts on a busy machine.
func listenTo(t *testing.T, s *redisstore.Store, name string) *ear {
	t.Helper()
	e := &ear{}
	for end := time.Now().Add(time.Minute); ; {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		l, err := s.Listen(ctx, name, name, e.heard)
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

// hook has the server ask f before each command.
func (s *listening) hook(f func(c *mini.Peer, cmd string, args ...string) bool) {
	s.direct.Ping(s.t.Context()) // which starts it
	s.srv.Mini.Server().SetPreHook(f)
}

func (s *listening) hears(e *ear, want string) {
	s.t.Helper()
	synctest.Wait()
	if got := e.take(); got != want {
		s.t.Errorf("heard %q, want %q", got, want)
	}
}

// commands returns how often each was sent since the last call.
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

func TestListenHearsWhatIsPublishedAfterIt(t *testing.T) {
	for _, protocol := range []int{2, 3} {
		virtually(t, protocol, func(t *testing.T, s *listening) {
			a, b := s.listen("a"), s.listen("b")
			s.publish("a", "one")
			s.publish("b", "two")
			s.publish("a", "three")
			s.hears(a, "one three")
			s.hears(b, "two")
			a.Close()
			s.publish("a", "four")
			s.hears(a, "")
			c := s.listen("c")
			last, err := s.Listen(t.Context(), "c", "c", func(string, bool) { t.Error("heard though closed") })
			if err != nil {
				t.Fatal(err)
			}
			c.also = last.Close
			s.publish("c", "x")
			s.hears(c, "x")
			if n := s.dials.Load(); n != 1 {
				t.Errorf("%d connections", n)
			}
		})
	}
}

// Many Listeners of a channel share its subscription; who comes to one that is
// confirmed needs nothing of the server.
func TestSubscriptionsAreShared(t *testing.T) {
	virtually(t, 3, func(t *testing.T, s *listening) {
		s.srv.Proxy.Commands()
		first := s.listen("ch")
		s.srv.Proxy.Stall()
		var all []*ear
		for range 100 {
			all = append(all, s.listen("ch"))
		}
		s.srv.Proxy.Flow()
		first.Close()
		s.publish("ch", "x")
		for _, e := range all {
			s.hears(e, "x")
			e.Close()
		}
		s.hears(first, "")
		if got, want := s.commands(), "map[subscribe:1]"; got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	})
}

// A hot key, which somebody waits for most of the time, is subscribed to once.
// When nobody waits any more, nothing is left on the server, and some time
// later there is no connection.
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
		other.Close() // counts once
		again := s.listen("other")
		time.Sleep(time.Minute)
		s.publish("other", "x")
		s.hears(again, "x")
		again.Close()
		time.Sleep(pubsub.Lingering + 2*pubsub.PingEvery)
		synctest.Wait()
		if got := s.srv.Mini.PubSubChannels("*"); len(got) > 0 {
			t.Errorf("subscribed to %q", got)
		}
		if s.dials.Load() != 1 {
			t.Errorf("%d connections", s.dials.Load())
		}
		time.Sleep(2 * pubsub.IdleAfter)
		synctest.Wait()
		if left := goroutines(); left != "" {
			t.Errorf("after a while:\n%s", left)
		}
		back := s.listen("other")
		s.publish("other", "y")
		s.hears(back, "y")
		if s.dials.Load() != 2 {
			t.Errorf("%d connections", s.dials.Load())
		}
	})
}

// Those who listen at about the same time are subscribed by one command.
func TestManyChannelsTravelTogether(t *testing.T) {
	virtually(t, 3, func(t *testing.T, s *listening) {
		s.listen("first")
		s.srv.Proxy.Commands()
		s.srv.Proxy.Stall()
		ears := make([]*ear, 1000)
		var wg sync.WaitGroup
		for i := range ears {
			wg.Go(func() { ears[i] = s.listen(fmt.Sprint("ch", i)) })
		}
		synctest.Wait() // a write to a stalled proxy blocks: then the rest waits for it
		s.srv.Proxy.Flow()
		wg.Wait()
		if n := s.srv.Proxy.Count(); n > 5 {
			t.Errorf("%d commands: %s", n, s.commands())
		}
		s.srv.Proxy.Cut()
		time.Sleep(time.Second)
		for i := range ears {
			if err := s.direct.Publish(t.Context(), fmt.Sprint("ch", i), "x").Err(); err != nil {
				t.Fatal(err)
			}
		}
		synctest.Wait()
		for i, e := range ears {
			if got, want := e.take(), "again x"; got != want {
				t.Errorf("channel %d: heard %q, want %q", i, got, want)
			}
		}
		if got, want := s.dials.Load(), int64(2); got != want {
			t.Errorf("%d connections, want %d", got, want)
		}
	})
}

// A connection on which nothing comes any more is found out, though what is
// written to it goes through.
func TestPongIsDemanded(t *testing.T) {
	virtually(t, 3, func(t *testing.T, s *listening) {
		a, b := s.listen("a"), s.listen("b")
		time.Sleep(time.Minute)
		s.hears(a, "") // a connection that lives is left alone
		s.srv.Proxy.Fail("ping", faultproxy.HangReply)
		began := time.Now()
		for b.silent() && time.Since(began) < time.Minute {
			time.Sleep(time.Millisecond)
			synctest.Wait()
		}
		if d := time.Since(began); d > pubsub.PingEvery+pubsub.DeadAfter+time.Second {
			t.Errorf("took %v", d)
		}
		s.hears(a, "again")
		s.hears(b, "again")
		s.publish("a", "x")
		s.hears(a, "x")
	})
}

// All channels of a connection that was lost are confirmed again before their
// Listeners hear of it. A server that is down is not hammered, and Listen says
// so.
func TestReconnect(t *testing.T) {
	virtually(t, 3, func(t *testing.T, s *listening) {
		a, b := s.listen("a"), s.listen("b")
		b.heard("", false)
		b.take()
		for range 3 {
			s.srv.Proxy.Cut()
			time.Sleep(100 * time.Millisecond)
			s.hears(a, "again")
			s.hears(b, "again")
			s.publish("b", "x")
			s.hears(b, "x")
		}
		for range 20 { // that each lived for long count for nothing
			time.Sleep(time.Minute)
			s.srv.Proxy.Cut()
			time.Sleep(20 * time.Millisecond)
			s.hears(a, "again")
			s.hears(b, "again")
		}
		s.srv.Proxy.Down()
		s.dials.Store(0)
		for end := time.Now().Add(time.Minute); time.Now().Before(end); {
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			_, err := s.Listen(ctx, "c", "c", a.heard)
			cancel()
			if err == nil || !strings.HasPrefix(err.Error(), `redis virtual:6379: channel "c": `) || ctx.Err() == context.DeadlineExceeded {
				t.Fatalf("server down: %v", err)
			}
		}
		if n := s.dials.Load(); n < 30 || n > 150 {
			t.Errorf("%d attempts in a minute", n)
		}
		s.hears(a, "")
		s.srv.Proxy.Up()
		time.Sleep(2 * time.Second)
		s.hears(a, "again")
		s.publish("a", "x")
		s.hears(a, "x")
	})
}

// A server that is down is not hammered by those who come and go, either.
func TestListensDoNotHammer(t *testing.T) {
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

// A server that hangs up on whoever comes is not hammered.
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
		_, err := s.Listen(ctx, "b", "b", func(string, bool) { t.Error("heard") })
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

// Relisten makes one new connection, however many ask for it.
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
			s.hears(a, "again")
			s.hears(b, "again")
			s.publish("b", "x")
			s.hears(b, "x")
			a.Relisten() // has just been done
			time.Sleep(2 * time.Second)
			s.hears(a, "")
		}
		if n := s.dials.Load(); n != 4 {
			t.Errorf("%d connections", n)
		}
		a.Close()
		a.Relisten()
	})
}

// A server that has become a replica is left, once, however many commands it
// refuses and however young the connection is.
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
			s.hears(a, "")
			time.Sleep(time.Minute)
			s.hears(a, "again")
			s.publish("a", "x")
			s.hears(a, "x")
		})
	}
}

// A Listener that stays is confirmed some time, whatever the matter was.
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
				e := &ear{}
				l, err := s.Subscribe(ctx, "a", "a", e.heard)
				if err == nil || l.Command() != "" {
					t.Errorf("got %v, %q", err, l.Command())
				}
				time.Sleep(20 * time.Second)
				s.hears(e, "")
				mend()
				time.Sleep(10 * time.Second)
				s.hears(e, "again")
				s.publish("a", "x")
				s.hears(e, "x")
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
			_, err := s.Listen(t.Context(), "b", "b", a.heard)
			ended <- err
		}()
		synctest.Wait()
		s.Close()
		if err := <-ended; !errors.Is(err, redis.ErrClosed) {
			t.Errorf("got %v", err)
		}
		if _, err := s.Listen(t.Context(), "a", "a", a.heard); !errors.Is(err, redis.ErrClosed) {
			t.Errorf("got %v", err)
		}
		a.Relisten()
		a.Close()
		s.srv.Proxy.Flow()
		s.hears(a, "")
	})
	virtually(t, 3, func(t *testing.T, s *listening) { // that was never used
		s.Close()
		if _, err := s.Listen(t.Context(), "a", "a", nil); !errors.Is(err, redis.ErrClosed) {
			t.Errorf("got %v", err)
		}
	})
}

// A user who may not PING, or not UNSUBSCRIBE, still hears: being refused is
// an answer.
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
		s.hears(a, "x")
		s.hears(b, "y")
		if n := s.dials.Load(); n != 1 {
			t.Errorf("%d connections", n)
		}
	})
}

// One that is refused among others is found out, and the others are had.
func TestRefusedAmongOthers(t *testing.T) {
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
			ears := make([]*ear, 50)
			for i := range ears {
				wg.Go(func() { ears[i] = s.listen(fmt.Sprint("good", i)) })
				if i%10 == 0 {
					wg.Go(bad)
				}
			}
			synctest.Wait()
			s.srv.Proxy.Flow()
			wg.Wait()
			bad()
			s.hears(first, "")
			allowed.Store(true)
			ears = append(ears, s.listen("bad"))
			for range 2 {
				for i, e := range ears[:50] {
					s.publish(fmt.Sprint("good", i), "x")
					s.hears(e, "x")
				}
				s.hears(first, "")
				s.publish("bad", "x")
				s.hears(ears[50], "x")

				allowed.Store(false) // as who listens already finds out at the next connection
				s.srv.Proxy.Cut()
				time.Sleep(time.Second)
				for _, e := range append(ears[:50:50], first) {
					s.hears(e, "again")
				}
				s.hears(ears[50], "")
				bad()
				allowed.Store(true)
				time.Sleep(2 * pubsub.PingEvery)
				s.hears(ears[50], "again")
			}
		})
	}
}
