package pubsub_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redisstore"
	"github.com/hasplock/hasp/internal/redisstore/pubsub"

	mini "github.com/alicebob/miniredis/v2/server"
	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
)

const (
	// unused is how long a subscription without Listeners lasts, at most.
	unused = pubsub.Lingering + 2*pubsub.TickEvery

	// soon is how long it takes to get another connection, at most.
	soon = pubsub.TickEvery + 100*time.Millisecond
)

// listening is a Store in virtual time, with its server.
type listening struct {
	*redisstore.Store
	t      *testing.T
	srv    *redistest.VirtualServer
	direct *redis.Client
}

// virtually runs f in virtual time. When the Store has been closed, no goroutine may be left.
func virtually(t *testing.T, f func(t *testing.T, s *listening)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		srv := redistest.Virtual(t)
		s := &listening{redisstore.New(srv.Client()), t, srv, srv.Direct()}
		f(t, s)
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		synctest.Wait()
		if left := goroutines(); left != "" {
			t.Errorf("after Close:\n%s", left)
		}
	})
}

// goroutines returns the stacks of a Store's goroutines in virtual time, without the caller's.
func goroutines() string {
	buf := make([]byte, 4<<20)
	all := strings.Split(string(buf[:runtime.Stack(buf, true)]), "\n\n")
	all = slices.DeleteFunc(all[1:], func(s string) bool {
		ours := strings.Contains(s, "redisstore.(*") || strings.Contains(s, "pubsub.(*")
		return !ours || !strings.Contains(s, "synctest bubble")
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

// listen listens in virtual time, until the test ends.
func listen(t *testing.T, b *pubsub.Subscriber, name string) *recorder {
	t.Helper()
	e := &recorder{}
	e.Listener = await.Value(b.Listen(t.Context(), name, name, e.record))
	return e
}

func (s *listening) listen(name string) *recorder {
	s.t.Helper()
	return listen(s.t, s.Subscriber, name)
}

// listenTo listens in real time. On a busy machine a connection may take several attempts.
func listenTo(t *testing.T, s *redisstore.Store, name string) *recorder {
	t.Helper()
	e := &recorder{}
	await.Success(t, "listen to "+name, func() (err error) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		e.Listener, err = s.Listen(ctx, name, name, e.record)
		return err
	})
	return e
}

func (s *listening) publish(name, payload string) {
	s.t.Helper()
	await.Must(s.t, s.direct.Publish(s.t.Context(), name, payload).Err())
	synctest.Wait()
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
	virtually(t, func(t *testing.T, s *listening) {
		a, b, beside := s.listen("a"), s.listen("b"), s.listen("b")
		s.publish("a", "one")
		s.publish("b", "two")
		s.publish("a", "three")
		s.wants(a, "one three")
		s.wants(b, "two")
		s.wants(beside, "two")
		a.Close()
		s.publish("a", "four")
		s.wants(a, "")
		c := s.listen("c")
		last := await.Value(s.Listen(t.Context(), "c", "c", func(string, bool) {
			t.Error("a closed Listener got a message")
		}))
		c.also = last.Close
		s.publish("c", "x")
		s.wants(c, "x")
		s.connected(1, 1)
	})
}

// subscribed tests which channels a server has.
func subscribed(t *testing.T, srv *redistest.VirtualServer, want ...string) {
	t.Helper()
	synctest.Wait()
	if got := srv.Mini.PubSubChannels("*"); !slices.Equal(got, want) {
		t.Errorf("subscribed to %q, want %q", got, want)
	}
}

// connected tests how often the Store has connected since the last call.
func (s *listening) connected(least, most int64) {
	s.t.Helper()
	if n := s.srv.Dials.Swap(0); n < least || n > most {
		s.t.Errorf("%d connections, want %d to %d", n, least, most)
	}
}

// The channel of a contended key is subscribed to once, if there is a Listener most of the time. A
// Listener that comes when the subscription is confirmed sends nothing. After the last Listener the
// subscription ends, and so does the connection.
func TestSubscriptionsAreDroppedLazily(t *testing.T) {
	virtually(t, func(t *testing.T, s *listening) {
		s.srv.Proxy.Commands()
		other := s.listen("other")
		for range 100 {
			s.listen("hot").Close()
			time.Sleep(pubsub.Lingering * 9 / 10)
		}
		if got, want := s.commands(), "map[subscribe:2]"; got != want {
			t.Errorf("got %s, want %s", got, want)
		}
		time.Sleep(unused)
		subscribed(t, s.srv, "other")
		other.Close()
		other.Close() // the second call does nothing
		again := s.listen("other")
		time.Sleep(time.Minute)
		s.publish("other", "x")
		s.wants(again, "x")
		s.connected(1, 1)
		again.Close()
		time.Sleep(unused)
		subscribed(t, s.srv)
		if left := goroutines(); left != "" {
			t.Errorf("after a while:\n%s", left)
		}
		back := s.listen("other") // at once, so that nothing that is left may end its connection
		time.Sleep(time.Minute)
		s.publish("other", "y")
		s.wants(back, "y")
		s.connected(1, 1)
	})
}

// While a server cannot be used, there are few attempts to connect, however many calls of
// Listen there are. They return the error.
func TestAttemptsToConnectAreRare(t *testing.T) {
	endsEach := func(command string) func(p *faultproxy.Proxy) {
		return func(p *faultproxy.Proxy) {
			for range 1000 {
				p.Fail(command, faultproxy.LoseReply)
			}
			p.Cut()
		}
	}
	for name, fault := range map[string]func(p *faultproxy.Proxy){
		"down":                       (*faultproxy.Proxy).Down,
		"ends each connection":       endsEach("ping"),
		"ends each connection later": endsEach("subscribe"),
	} {
		for _, listens := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, others %t", name, listens), func(t *testing.T) {
				virtually(t, func(t *testing.T, s *listening) {
					if listens {
						s.listen("a")
					}
					s.srv.Dials.Store(0)
					fault(s.srv.Proxy)
					for end := time.Now().Add(time.Minute); time.Now().Before(end); {
						ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
						_, err := s.Listen(ctx, "c", "c", ignore)
						cancel()
						const prefix = `redis virtual:6379: channel "c": `
						if err == nil || !strings.HasPrefix(err.Error(), prefix) {
							t.Fatalf("got %v", err)
						}
						if name == "down" && errors.Is(err, context.DeadlineExceeded) {
							t.Fatalf("without the cause: %v", err)
						}
					}
					s.connected(30, 180) // one or two each second, because the rests are random
				})
			})
		}
	}
}

// ignore is for a Listen that fails. Even so it may be called once.
func ignore(string, bool) {}

func TestListenEndsWithItsContext(t *testing.T) {
	virtually(t, func(t *testing.T, s *listening) {
		s.listen("a")
		s.srv.Proxy.Fail("subscribe", faultproxy.HoldRequest)
		ctx := await.Timeout(t, time.Second/2)
		began := time.Now()
		_, err := s.Listen(ctx, "b", "b", func(string, bool) { t.Error("got a message") })
		if !errors.Is(err, context.DeadlineExceeded) || time.Since(began) != time.Second/2 {
			t.Errorf("got %v after %v", err, time.Since(began))
		}
		s.srv.Proxy.Release()
		s.publish("b", "x")
		time.Sleep(unused)
		subscribed(t, s.srv, "a")
	})
}

// A connection is replaced if it ends, if nothing arrives on it although writes succeed, at the
// wish of Listeners, and if a command shows that its server is a replica now, however young the
// connection is. Listeners learn of the gap after their channels are confirmed again. Many such
// signs make few new connections.
func TestConnectionIsReplaced(t *testing.T) {
	readOnly := "READONLY You can't write against a read only replica."
	refuses := func(text string) func(s *listening, a *recorder) {
		return func(s *listening, _ *recorder) {
			s.srv.Proxy.Answer("set k", "-"+text+"\r\n")
			for range 10 {
				if _, err := s.Do(s.t.Context(), "set", "k", "v"); err == nil {
					s.t.Error("no error")
				}
			}
		}
	}
	for name, c := range map[string]struct {
		sign   func(s *listening, a *recorder)
		within time.Duration
	}{
		"cut": {func(s *listening, _ *recorder) { s.srv.Proxy.Cut() }, soon},
		"down": {func(s *listening, a *recorder) {
			s.srv.Proxy.Down()
			time.Sleep(time.Minute)
			s.wants(a, "")
			s.srv.Proxy.Up()
		}, 2 * time.Second},
		"silence": {func(s *listening, _ *recorder) {
			s.srv.Proxy.Fail("ping", faultproxy.HangReply)
		}, pubsub.TickEvery + pubsub.DeadAfter + time.Second},
		"Relisten": {func(_ *listening, a *recorder) {
			for range 10 {
				a.Relisten()
			}
		}, soon},
		"READONLY": {refuses(readOnly), soon},
		"script": {
			refuses("ERR Error running script (call to f_0): @user_script: 1: -" + readOnly), soon,
		},
	} {
		t.Run(name, func(t *testing.T) {
			virtually(t, func(t *testing.T, s *listening) {
				a, b := s.listen("a"), s.listen("b")
				s.srv.Proxy.Commands()
				for _, pause := range []time.Duration{0, 0, time.Minute} {
					time.Sleep(pause)
					s.wants(a, "") // a connection that works is not replaced
					c.sign(s, a)
					time.Sleep(c.within)
					s.wants(a, "again")
					s.wants(b, "again")
					s.publish("b", "x")
					s.wants(b, "x")
				}
				n := 0
				for _, c := range s.srv.Proxy.Commands() {
					n += strings.Count(c, "subscribe a")
				}
				if n < 3 || n > 6 {
					t.Errorf("subscribed %d times", n)
				}
				a.Close()
				a.Relisten()
			})
		})
	}
}

// Subscribe returns the error of a server that cannot be used, although its context lasts longer.
// The Listener is confirmed when the fault has ended.
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
			virtually(t, func(t *testing.T, s *listening) {
				mend := fault(s.srv.Proxy)
				ctx := await.Timeout(t, time.Hour)
				e := &recorder{}
				l, err := s.Subscribe(ctx, "a", "a", e.record)
				if err == nil || ctx.Err() != nil || l.Command() != "" {
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
				time.Sleep(unused)
				subscribed(t, s.srv)
			})
		})
	}
}

func TestCloseEndsListening(t *testing.T) {
	virtually(t, func(t *testing.T, s *listening) {
		a := s.listen("a")
		s.srv.Proxy.Stall()
		ended := make(chan error)
		go func() { _, err := s.Listen(t.Context(), "b", "b", a.record); ended <- err }()
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
	virtually(t, func(t *testing.T, s *listening) { // a Store that was never used
		s.Close()
		if _, err := s.Listen(t.Context(), "a", "a", ignore); !errors.Is(err, redis.ErrClosed) {
			t.Errorf("got %v", err)
		}
	})
}

// A user without the right to PING or UNSUBSCRIBE receives messages: a refusal is an
// answer as well.
func TestListenNeedsOnlySubscribe(t *testing.T) {
	virtually(t, func(t *testing.T, s *listening) {
		for _, command := range []string{"ping", "unsubscribe"} {
			s.srv.Proxy.Answer(command, "-NOPERM this user has no right to '"+command+"'\r\n")
		}
		a := s.listen("a")
		for range 10 {
			s.listen("b").Close()
			time.Sleep(unused)
		}
		b := s.listen("b")
		s.publish("a", "x")
		s.publish("b", "y")
		s.wants(a, "x")
		s.wants(b, "y")
		s.connected(1, 1)
	})
}

// If the server refuses one channel of many, the others are subscribed to. The refused one
// is tried again, because the user's rights may change.
func TestOneRefusedChannelOfMany(t *testing.T) {
	virtually(t, func(t *testing.T, s *listening) {
		var allowed atomic.Bool
		s.srv.Mini.Server().SetPreHook(func(c *mini.Peer, cmd string, args ...string) bool {
			refuse := cmd == "SUBSCRIBE" && slices.Contains(args, "bad") && !allowed.Load()
			if refuse {
				c.Block(func(w *mini.Writer) {
					w.WriteError("NOPERM this user has no right to one of the channels")
				})
			}
			return refuse
		})
		bad := func() {
			_, err := s.Listen(t.Context(), "bad", "bad", ignore)
			const prefix = `redis virtual:6379: channel "bad": NOPERM`
			if !redis.HasErrorPrefix(err, "NOPERM") || !strings.HasPrefix(err.Error(), prefix) {
				t.Errorf("got %v", err)
			}
		}
		var wg sync.WaitGroup
		recorders := make([]*recorder, 50)
		for i := range recorders {
			wg.Go(func() { recorders[i] = s.listen(fmt.Sprint("good", i)) })
			if i%10 == 0 {
				wg.Go(bad)
			}
		}
		wg.Wait()
		bad() // again, and not only at the first time
		allowed.Store(true)
		last := s.listen("bad")
		for range 2 {
			for i, e := range append(recorders, last) {
				s.publish([]string{fmt.Sprint("good", i), "bad"}[i/50], "x")
				s.wants(e, "x")
			}

			allowed.Store(false) // the Listener that exists learns it at the next connection
			s.srv.Proxy.Cut()
			time.Sleep(soon)
			for _, e := range recorders {
				s.wants(e, "again")
			}
			s.wants(last, "")
			bad()
			allowed.Store(true)
			time.Sleep(2 * pubsub.TickEvery)
			s.wants(last, "again")
		}
		s.connected(5, 5) // three, and after each Cut one of go-redis, whose context has ended
	})
}

// moving is a Subscriber over two servers of a cluster in virtual time. Each channel is at the
// first server, unless the test puts it elsewhere.
type moving struct {
	*pubsub.Subscriber
	from, to *redistest.VirtualServer
	mu       sync.Mutex     // guards at
	at       map[string]int // the place of each slot key
	reloads  atomic.Int64
}

// The places of a channel: one of the servers, or none.
const (
	first = iota
	second
	nowhere
)

// movingBetween runs f with a Subscriber over two servers in virtual time.
func movingBetween(t *testing.T, f func(t *testing.T, s *moving)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		servers := redistest.VirtualNodes(t, 2)
		s := &moving{from: servers[0], to: servers[1], at: map[string]int{}}
		clients := servers.Clients()
		s.Subscriber = pubsub.New(pubsub.Config{
			Server: func(_ context.Context, slotKey string) (redis.UniversalClient, error) {
				s.mu.Lock()
				defer s.mu.Unlock()
				if s.at[slotKey] == nowhere {
					return nil, errors.New("no server has the slot")
				}
				return clients[s.at[slotKey]], nil
			},
			Cluster: true,
			Reload:  func() { s.reloads.Add(1) },
			Wrap:    func(err error) error { return err },
		})
		defer s.Close()
		f(t, s)
	})
}

// put lets the Subscriber find the server of a slot key at another place.
func (s *moving) put(slotKey string, place int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.at[slotKey] = place
}

// A channel that has moved is not left at its old server, whose connection others still use.
func TestChannelThatMovesLeavesItsOldServer(t *testing.T) {
	movingBetween(t, func(t *testing.T, s *moving) {
		a := listen(t, s.Subscriber, "a")
		listen(t, s.Subscriber, "b")
		s.put("a", second)
		time.Sleep(soon)
		subscribed(t, s.from, "b")
		subscribed(t, s.to, "a")
		if got := a.take(); got != "again" {
			t.Errorf("got %q", got)
		}
	})
}

// A server of a cluster that has given its slot away refuses the subscription with MOVED.
func TestListenGoesOnAtTheNewServer(t *testing.T) {
	movingBetween(t, func(t *testing.T, s *moving) {
		s.from.Proxy.Answer("subscribe", "-MOVED 7 node2:6379\r\n")
		time.AfterFunc(pubsub.TickEvery/2, func() { s.put("a", second) })
		listen(t, s.Subscriber, "a")
		if s.reloads.Load() == 0 {
			t.Error("the store does not look for the server")
		}
	})
}

// The first answer about a slot that has moved may be of a server that has not learned of it.
func TestStoreLooksTwiceForALostChannel(t *testing.T) {
	movingBetween(t, func(t *testing.T, s *moving) {
		a := listen(t, s.Subscriber, "a")
		s.from.Proxy.Cut()
		time.Sleep(2 * soon)
		if n := s.reloads.Load(); n != 2 || a.take() != "again" {
			t.Errorf("looked %d times", n)
		}
	})
}

// While no server can be found, Listen returns the error, also if the channel had one before.
func TestListenWhileNoServerIsFound(t *testing.T) {
	movingBetween(t, func(t *testing.T, s *moving) {
		a := listen(t, s.Subscriber, "a")
		s.put("a", nowhere)
		s.from.Proxy.Down()
		time.Sleep(soon)
		ctx := await.Timeout(t, time.Minute)
		_, err := s.Listen(ctx, "a", "a", ignore)
		if err == nil || errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v", err)
		}

		s.from.Proxy.Up()
		s.put("a", first)
		time.Sleep(2 * soon)
		if got := a.take(); got != "again" {
			t.Errorf("when the server is found again: got %q", got)
		}
	})
}

// If the server does not answer, it is not known whether channels are in slots. The next call
// asks again.
func TestKindIsAskedAgain(t *testing.T) {
	movingBetween(t, func(t *testing.T, s *moving) {
		s.from.Proxy.Fail("spublish", faultproxy.LoseReply)
		for range 2 {
			if s.Sharded(t.Context(), "a") { // miniredis has no such channels
				t.Error("sharded")
			}
		}
		s.from.Proxy.Commands()
		s.Sharded(t.Context(), "a")
		if sent := s.from.Proxy.Commands(); len(sent) > 0 {
			t.Errorf("known, and asked again: %q", sent)
		}
	})
}
