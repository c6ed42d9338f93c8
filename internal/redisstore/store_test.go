package redisstore

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redisstore/slot"
	"github.com/hasplock/hasp/internal/redistest"
)

// counting adds its argument to its key, which so shows how often it ran.
var counting = NewScript(`return redis.call('INCRBY', KEYS[1], ARGV[1])`)

// clients runs f with clients that a caller may pass, behind a proxy. They retry as
// often as go-redis can.
func clients(t *testing.T, f func(t *testing.T, rdb redis.UniversalClient, p *faultproxy.Proxy, direct *redis.Client)) {
	kinds := map[string]func(o *redis.Options) redis.UniversalClient{
		"plain": func(o *redis.Options) redis.UniversalClient { return redis.NewClient(o) },
		"autopipeline": func(o *redis.Options) redis.UniversalClient {
			a := await.Value(redis.NewClient(o).AutoPipeline())
			return a
		},
		"cluster": func(o *redis.Options) redis.UniversalClient {
			return redis.NewClusterClient(&redis.ClusterOptions{
				MaxRedirects: 5, MinRetryBackoff: -1, ReadTimeout: o.ReadTimeout, ContextTimeoutEnabled: true, MaxRetries: 5,
				ClusterSlots: func(context.Context) ([]redis.ClusterSlot, error) {
					return []redis.ClusterSlot{{Start: 0, End: slot.Count - 1, Nodes: []redis.ClusterNode{{Addr: o.Addr}}}}, nil
				},
			})
		},
	}
	for name, make := range kinds {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			srv := redistest.Start(t, &redistest.Options{Own: true})
			p := srv.Proxy()
			o := srv.ClientOptions()
			o.Addr, o.MaxRetries, o.MinRetryBackoff, o.ReadTimeout = p.Addr(), 5, -1, 3*time.Second
			rdb := make(o)
			t.Cleanup(func() { rdb.Close() })
			f(t, rdb, p, srv.Client())
		})
	}
}

// The reply to a command that was executed is lost. If the command were sent again, it
// would count twice.
func TestSentOnce(t *testing.T) {
	t.Parallel()
	for _, fault := range []faultproxy.Fault{faultproxy.LoseReply, faultproxy.HangReply} {
		clients(t, func(t *testing.T, rdb redis.UniversalClient, p *faultproxy.Proxy, direct *redis.Client) {
			s := New(rdb)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			ways := map[string]func(key string) error{
				"do":  func(key string) error { _, err := s.Do(ctx, "incrby", key, "1"); return err },
				"run": func(key string) error { _, err := s.Run(ctx, counting, Call{[]string{key}, []string{"1"}}); return err },
				"runeach": func(key string) (err error) {
					s.RunEach(ctx, counting, []Call{{[]string{key}, []string{"1"}}}, func(_ int, _ any, e error) { err = e })
					return err
				},
			}
			for name, way := range ways {
				await.Must(t, way("warm"))
				key := fmt.Sprint(name, fault)
				p.Fail(key, fault)
				if err := way(key); err == nil {
					t.Errorf("%s: fault %d: no error", name, fault)
				}
				n := 0 // the server may execute it late
				for end := time.Now().Add(soon); n == 0 && time.Now().Before(end); time.Sleep(time.Millisecond) {
					n, _ = direct.Get(ctx, key).Int()
				}
				if n != 1 {
					t.Errorf("%s: fault %d: executed %d times", name, fault, n)
				}
			}
		})
	}
}

func TestSourceIsSentOnlyToServersThatLackAScript(t *testing.T) {
	clients(t, func(t *testing.T, rdb redis.UniversalClient, p *faultproxy.Proxy, direct *redis.Client) {
		s := New(rdb)
		await.Value(s.Do(t.Context(), "get", "checked"))
		calls := make([]Call, 5)
		for i := range calls {
			calls[i] = Call{[]string{fmt.Sprintf("each%d", i)}, []string{"1"}}
		}
		for round, want := range []string{"5 evalsha, 5 eval", "5 evalsha"} {
			p.Commands()
			answered := 0
			s.RunEach(t.Context(), counting, calls, func(i int, v any, err error) {
				answered++
				if v != int64(round+1) {
					t.Errorf("round %d, call %d: got %v, %v", round, i, v, err)
				}
			})
			if got := tally(p.Commands()); got != want || answered != len(calls) {
				t.Errorf("round %d: %d answers by %s, want %s", round, answered, got, want)
			}
		}
		direct.ScriptFlush(t.Context())
		for _, want := range []string{"1 evalsha, 1 eval", "1 evalsha"} {
			p.Commands()
			if _, err := s.Run(t.Context(), counting, Call{[]string{"one"}, []string{"1"}}); err != nil {
				t.Error(err)
			}
			if got := tally(p.Commands()); got != want {
				t.Errorf("got %s, want %s", got, want)
			}
		}
	})
}

// tally counts the runs of scripts, by the hash and with the source.
func tally(commands []string) string {
	n := map[string]int{}
	for _, c := range commands {
		name, _, _ := strings.Cut(c, " ")
		n[name]++
	}
	text := fmt.Sprintf("%d evalsha", n["evalsha"])
	if n["eval"] > 0 {
		text += fmt.Sprintf(", %d eval", n["eval"])
	}
	return text
}

// A client without ContextTimeoutEnabled reads for as long as its ReadTimeout,
// whatever the context says.
func TestRunEachEndsWithItsContext(t *testing.T) {
	srv := redistest.Start(t, &redistest.Options{Own: true})
	p := srv.Proxy()
	o := srv.ClientOptions()
	o.Addr, o.ReadTimeout, o.MaxRetries = p.Addr(), time.Hour, 3
	rdb := redis.NewClient(o)
	s := New(rdb)
	calls := []Call{{[]string{"a"}, []string{"1"}}, {[]string{"b"}, []string{"1"}}}
	s.RunEach(t.Context(), counting, calls, func(int, any, error) {})

	for name, end := range map[string]func() (context.Context, context.CancelFunc){
		"deadline": func() (context.Context, context.CancelFunc) {
			return context.WithTimeout(t.Context(), 50*time.Millisecond)
		},
		"cancel": func() (context.Context, context.CancelFunc) {
			ctx, cancel := context.WithCancel(t.Context())
			time.AfterFunc(50*time.Millisecond, cancel)
			return ctx, cancel
		},
	} {
		p.Fail("evalsha", faultproxy.HangReply)
		ctx, cancel := end()
		var over atomic.Bool
		returns(t, name, func() {
			s.RunEach(ctx, counting, calls, func(i int, _ any, err error) {
				if over.Load() {
					t.Errorf("%s: done was called after the end", name)
				}
				if err == nil {
					t.Errorf("%s: call %d answered", name, i)
				}
			})
		})
		over.Store(true)
		cancel()
	}
	rdb.Close() // ends the reads that are still in flight
}

// A master that hangs does not delay the calls for the keys of another.
func TestRunEachOnAClusterWaitsForEachMasterAlone(t *testing.T) {
	good := redistest.Start(t, &redistest.Options{Own: true})
	bad := redistest.Start(t, &redistest.Options{Own: true})
	rdb := redis.NewClusterClient(&redis.ClusterOptions{
		ReadTimeout: time.Hour,
		ClusterSlots: func(context.Context) ([]redis.ClusterSlot, error) {
			return []redis.ClusterSlot{
				{Start: 0, End: slot.Count/2 - 1, Nodes: []redis.ClusterNode{{Addr: good.Addr}}},
				{Start: slot.Count / 2, End: slot.Count - 1, Nodes: []redis.ClusterNode{{Addr: bad.Addr}}},
			}, nil
		},
	})
	spread(t, New(rdb), bad, func(key string) bool { return slot.Of(key) >= slot.Count/2 })
	rdb.Close()
}

func TestErrorsNameTheServerAndKeepTheCause(t *testing.T) {
	srv := redistest.Start(t, nil)
	s := New(srv.Client())
	_, err := s.Do(t.Context(), "nonsense")
	var reply redis.Error
	if !errors.As(err, &reply) || !strings.HasPrefix(err.Error(), "redis "+srv.Addr+": ERR") {
		t.Errorf("got %v", err)
	}
	if v, err := s.Do(t.Context(), "get", "no such key"); v != nil || err != nil {
		t.Errorf("nil: got %v, %v", v, err)
	}
}

func TestCloseClosesOnlyConnectionsOfOpen(t *testing.T) {
	srv := redistest.Start(t, nil)
	rdb := srv.Client()
	if err := New(rdb).Close(); err != nil || rdb.Ping(t.Context()).Err() != nil {
		t.Errorf("a client that the caller passed is closed (%v)", err)
	}
	s := opened(t, srv.URL(), nil)
	for range 2 {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
	if _, err := s.Do(t.Context(), "ping"); !errors.Is(err, redis.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}

// The program may use all connections of a client that it passed. hasp does not wait for them.
func TestRenewalThroughAClientWhosePoolIsInUse(t *testing.T) {
	srv := redistest.Start(t, nil)
	o := srv.ClientOptions()
	o.PoolSize, o.PoolTimeout = 1, time.Nanosecond
	rdb := redis.NewClient(o)
	defer rdb.Close()
	conn := rdb.Conn() // the only connection of the pool
	defer conn.Close()
	await.Must(t, conn.Ping(t.Context()).Err())
	s := New(rdb)
	if err := rdb.Ping(t.Context()).Err(); !errors.Is(err, redis.ErrPoolTimeout) {
		t.Fatalf("a command: %v, want %v", err, redis.ErrPoolTimeout)
	}
	await.Value(s.Do(t.Context(), "ping"))

	for n := 1; n <= 2; n++ {
		calls := make([]Call, n)
		for i := range calls {
			calls[i] = Call{[]string{fmt.Sprint("lone", i)}, []string{"1"}}
		}
		s.RunEach(t.Context(), counting, calls, func(i int, _ any, err error) {
			if err != nil {
				t.Errorf("renewal %d of %d: %v", i, n, err)
			}
		})
	}
}

// A password may be a word of the reply that a script is not known.
func TestPasswordThatIsAWordOfAReply(t *testing.T) {
	srv := redistest.Start(t, &redistest.Options{Password: "script"})
	s := opened(t, srv.URL(), nil)
	for range 2 {
		await.Value(s.Run(t.Context(), counting, Call{[]string{"k"}, []string{"1"}}))
		srv.Client().ScriptFlush(t.Context())
	}
}

// A server repeats the arguments of a command that it does not know. No error has the
// password of a client that was passed.
func TestErrorsOfAPassedClientHaveNoPassword(t *testing.T) {
	const password = "k7fw2px9"
	srv := redistest.Start(t, &redistest.Options{Own: true, Real: true, Password: password})
	cluster := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{srv.Addr}, Password: password,
		ClusterSlots: func(context.Context) ([]redis.ClusterSlot, error) {
			return []redis.ClusterSlot{{End: 16383, Nodes: []redis.ClusterNode{{Addr: srv.Addr}}}}, nil
		}})
	defer cluster.Close()
	for _, rdb := range []redis.UniversalClient{srv.Client(), cluster} {
		_, err := New(rdb).Do(t.Context(), "no-command", "k", password)
		if err == nil || !strings.Contains(err.Error(), "***") || strings.Contains(err.Error(), password) {
			t.Errorf("%T: got %v", rdb, err)
		}
	}
}

// A time to live can be longer than a Duration.
func TestTermsBeyondADuration(t *testing.T) {
	for pttl, want := range map[int64]time.Duration{-1: -time.Millisecond, 0: 0, 5: 5 * time.Millisecond, 1<<63 - 1: 100 * 365 * 24 * time.Hour} {
		if got := Term(pttl); got != want {
			t.Errorf("%d: got %v", pttl, got)
		}
	}
	f, _ := Decode([]any{int64(1 << 60), "token-of-a-holder#owner", ""})
	var held *backend.HeldError
	if errors.As(f.Held(), &held); held.RetryAfter <= 0 || f.Status().TTL <= 0 {
		t.Errorf("%v, %v", held, f.Status())
	}
}

func TestTermsAreRoundedUp(t *testing.T) {
	for d, want := range map[time.Duration]string{
		time.Second: "1000", time.Second + 1: "1001", time.Second - 1: "1000", 100 * time.Millisecond: "100", time.Nanosecond: "1",
	} {
		if got := Millis(d); got != want {
			t.Errorf("%v: got %s ms, want %s", d, got, want)
		}
	}
}

func TestDoAllAnswersEachCommandByItself(t *testing.T) {
	t.Parallel()
	srv := redistest.Start(t, nil)
	s, _ := prepared(t, srv.URL(), nil, 2)
	run := InfoField(srv.Client().Info(t.Context(), "server").Val(), "run_id")
	for _, key := range []string{t.Name(), strings.Repeat("large", maxShared/5)} {
		answersEach(t, s, key, run)
	}
}

func answersEach(t *testing.T, s *Store, key, run string) {
	replies := s.DoAll(t.Context(),
		[]string{"set", key, "one", "px", "60000", "nx"},
		[]string{"set", key, "two", "px", "60000", "nx"},
		[]string{"get", key},
		[]string{"get", key + ":none"},
		[]string{"lpush", key, "x"},
		[]string{"exists", key},
		[]string{"time"})
	want := []any{"OK", nil, "one", nil, nil, int64(1)}
	for i, w := range want {
		if failed := i == 4; replies[i].Value != w || (replies[i].Err != nil) != failed || replies[i].Run != run {
			t.Errorf("reply %d: %v; want %v by the run %s", i, replies[i], w, run)
		}
	}
	if err := replies[4].Err; !strings.HasPrefix(err.Error(), s.Name()+": WRONGTYPE") {
		t.Errorf("%v does not name the server", err)
	}
	if parts, ok := replies[6].Value.([]any); !ok || len(parts) != 2 {
		t.Errorf("time: %v, %v", replies[6].Value, replies[6].Err)
	}
}

// If a caller leaves, the connections of a Store that was opened end its call, and the
// error says that the context has ended.
func TestDoAllIsInterrupted(t *testing.T) {
	t.Parallel()
	srv := redistest.Start(t, &redistest.Options{Own: true})
	proxy := srv.Proxy()
	s := opened(t, "redis://"+proxy.Addr(), nil)
	proxy.Stall()
	defer proxy.Flow()
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(10*time.Millisecond, cancel)
	returns(t, "a call whose caller has gone", func() {
		for i, r := range s.DoAll(ctx, []string{"get", "a"}, []string{"get", "b"}) {
			if r.Err == nil || !strings.Contains(r.Err.Error(), context.Canceled.Error()) {
				t.Errorf("reply %d: %v, %v", i, r.Value, r.Err)
			}
		}
	})
}
