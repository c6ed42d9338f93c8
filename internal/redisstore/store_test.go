package redisstore

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redisstore/slot"
	"github.com/hasplock/hasp/internal/redistest"
)

// counting adds one to its key, so that it shows how often it ran.
var counting = NewScript(`return redis.call('INCRBY', KEYS[1], ARGV[1])`)

// clients are those that somebody may hand in, as eager to retry as go-redis
// can make them, through a proxy.
func clients(t *testing.T, f func(t *testing.T, rdb redis.UniversalClient, p *faultproxy.Proxy, direct *redis.Client)) {
	kinds := map[string]func(o *redis.Options) redis.UniversalClient{
		"plain": func(o *redis.Options) redis.UniversalClient { return redis.NewClient(o) },
		"autopipeline": func(o *redis.Options) redis.UniversalClient {
			a, err := redis.NewClient(o).AutoPipeline()
			if err != nil {
				t.Fatal(err)
			}
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

// TestSentOnce loses the reply of what the server carried out. Whoever sends
// it again counts twice.
func TestSentOnce(t *testing.T) {
	t.Parallel()
	for _, fault := range []faultproxy.Fault{faultproxy.LoseReply, faultproxy.HangReply} {
		clients(t, func(t *testing.T, rdb redis.UniversalClient, p *faultproxy.Proxy, direct *redis.Client) {
			s := New(rdb)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			ways := map[string]func(key string) error{
				"do":  func(key string) error { _, err := s.Do(ctx, "incrby", key, 1); return err },
				"run": func(key string) error { _, err := s.Run(ctx, counting, Call{[]string{key}, []any{1}}); return err },
				"runeach": func(key string) (err error) {
					s.RunEach(ctx, counting, []Call{{[]string{key}, []any{1}}}, func(_ int, _ any, e error) { err = e })
					return err
				},
			}
			for name, way := range ways {
				if err := way("warm"); err != nil {
					t.Fatal(err)
				}
				key := fmt.Sprint(name, fault)
				p.Fail(key, fault)
				if err := way(key); err == nil {
					t.Errorf("%s: fault %d: no error", name, fault)
				}
				n := 0 // the server may be late
				for end := time.Now().Add(soon); n == 0 && time.Now().Before(end); time.Sleep(time.Millisecond) {
					n, _ = direct.Get(ctx, key).Int()
				}
				if n != 1 {
					t.Errorf("%s: fault %d: carried out %d times", name, fault, n)
				}
			}
		})
	}
}

// A bare command of the same clients is sent again: the test above would see
// it.
func TestOthersAreSentAgain(t *testing.T) {
	clients(t, func(t *testing.T, rdb redis.UniversalClient, p *faultproxy.Proxy, direct *redis.Client) {
		p.Fail("bare", faultproxy.LoseReply)
		rdb.Incr(t.Context(), "bare")
		if n, _ := direct.Get(t.Context(), "bare").Int(); n != 2 {
			t.Errorf("carried out %d times", n)
		}
	})
}

func TestScriptsAreSentWholeOnlyToWhomeverLacksThem(t *testing.T) {
	clients(t, func(t *testing.T, rdb redis.UniversalClient, p *faultproxy.Proxy, direct *redis.Client) {
		s := New(rdb)
		calls := make([]Call, 5)
		for i := range calls {
			calls[i] = Call{[]string{fmt.Sprintf("each%d", i)}, []any{1}}
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
			if _, err := s.Run(t.Context(), counting, Call{[]string{"one"}, []any{1}}); err != nil {
				t.Error(err)
			}
			if got := tally(p.Commands()); got != want {
				t.Errorf("got %s, want %s", got, want)
			}
		}
	})
}

// tally counts scripts run.
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
	o.Addr, o.ReadTimeout, o.MaxRetries = p.Addr(), time.Minute, 3
	rdb := redis.NewClient(o)
	s := New(rdb)
	calls := []Call{{[]string{"a"}, []any{1}}, {[]string{"b"}, []any{1}}}
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
		began, over := time.Now(), false
		s.RunEach(ctx, counting, calls, func(i int, _ any, err error) {
			if over {
				t.Errorf("%s: told after the end", name)
			}
			if ctx.Err() == nil {
				t.Errorf("%s: call %d answered: %v", name, i, err)
			}
		})
		over = true
		cancel()
		if d := time.Since(began); d > soon {
			t.Errorf("%s: took %v", name, d)
		}
	}
	rdb.Close() // ends the reads under way, whose answers nobody may hear
}

// One master that hangs costs the other's keys nothing.
func TestRunEachOnAClusterWaitsForNobodyElse(t *testing.T) {
	good := redistest.Start(t, &redistest.Options{Own: true})
	bad := redistest.Start(t, &redistest.Options{Own: true})
	rdb := redis.NewClusterClient(&redis.ClusterOptions{
		ReadTimeout: time.Minute,
		ClusterSlots: func(context.Context) ([]redis.ClusterSlot, error) {
			return []redis.ClusterSlot{
				{Start: 0, End: slot.Count/2 - 1, Nodes: []redis.ClusterNode{{Addr: good.Addr}}},
				{Start: slot.Count / 2, End: slot.Count - 1, Nodes: []redis.ClusterNode{{Addr: bad.Addr}}},
			}, nil
		},
	})
	s := New(rdb)
	var calls []Call
	want := 0
	for i := range 20 {
		key := fmt.Sprint("k", i)
		calls = append(calls, Call{[]string{key}, []any{1}})
		if slot.Of(key) < slot.Count/2 {
			want++
		}
	}
	s.RunEach(t.Context(), counting, calls, func(int, any, error) {})
	bad.Pause()
	for round := range 8 { // nobody knows which of the servers has its turn first
		ctx, cancel := context.WithTimeout(t.Context(), 2*soon)
		got := 0
		s.RunEach(ctx, counting, calls, func(i int, v any, err error) {
			if ctx.Err() != nil && err != nil {
				return // has found no connection by then
			}
			if v != int64(2+round) || slot.Of(calls[i].Keys[0]) >= slot.Count/2 {
				t.Errorf("%s: got %v, %v", calls[i].Keys[0], v, err)
			}
			if got++; got == want {
				cancel()
			}
		})
		cancel()
		if got != want || want == 0 || want == 20 {
			t.Fatalf("%d of %d answered", got, want)
		}
	}
	rdb.Close()
	bad.Resume()
}

func TestErrorsNameTheServerAndKeepTheCause(t *testing.T) {
	srv := redistest.Start(t, nil)
	s := New(srv.Client())
	_, err := s.Do(t.Context(), "nonsense")
	var reply redis.Error
	if !errors.As(err, &reply) || !strings.HasPrefix(err.Error(), "redis "+srv.Addr+": ERR") {
		t.Errorf("got %v", err)
	}
	if v, err := s.Do(t.Context(), "get", "nobody has this key"); v != nil || err != nil {
		t.Errorf("nil: got %v, %v", v, err)
	}
}

func TestCloseClosesOnlyWhatOpenOpened(t *testing.T) {
	srv := redistest.Start(t, nil)
	rdb := srv.Client()
	if err := New(rdb).Close(); err != nil || rdb.Ping(t.Context()).Err() != nil {
		t.Errorf("a client that was handed in is closed (%v)", err)
	}
	s, err := open(t, srv.URL(), nil)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
	if _, err := s.Do(t.Context(), "ping"); !errors.Is(err, redis.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}

// A hook that stops a batch before it is sent says so only once, for all.
func TestRunEachHearsOfAHook(t *testing.T) {
	rdb := redistest.Start(t, nil).Client()
	stop := errors.New("circuit open")
	rdb.AddHook(hook{stop})
	New(rdb).RunEach(t.Context(), counting, []Call{{[]string{"a"}, []any{1}}}, func(_ int, v any, err error) {
		if !errors.Is(err, stop) {
			t.Errorf("got %v, %v", v, err)
		}
	})
}

type hook struct{ err error }

func (hook) DialHook(next redis.DialHook) redis.DialHook          { return next }
func (hook) ProcessHook(next redis.ProcessHook) redis.ProcessHook { return next }
func (h hook) ProcessPipelineHook(redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(context.Context, []redis.Cmder) error { return h.err }
}
