package redisstore

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redisstore/resp"
	"github.com/hasplock/hasp/internal/redistest"
)

// client is a client that a caller may pass.
type client struct {
	rdb    redis.UniversalClient
	proxy  *faultproxy.Proxy // in front of its server
	direct *redis.Client     // of the same server
}

// clients runs f with clients of each kind. They retry as often as go-redis can.
func clients(t *testing.T, f func(t *testing.T, c client)) {
	for name, make := range map[string]func(o *redis.Options) redis.UniversalClient{
		"plain": func(o *redis.Options) redis.UniversalClient { return redis.NewClient(o) },
		"autopipeline": func(o *redis.Options) redis.UniversalClient {
			a := await.Value(redis.NewClient(o).AutoPipeline())
			return a
		},
		"cluster": clusterOf,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			srv := redistest.Start(t, redistest.Own)
			c := client{proxy: srv.Proxy(), direct: srv.Client()}
			o := srv.ClientOptions()
			o.Addr, o.MaxRetries, o.MinRetryBackoff = c.proxy.Addr(), 5, -1
			o.ReadTimeout = 3 * time.Second
			c.rdb = make(o)
			t.Cleanup(func() { c.rdb.Close() })
			f(t, c)
		})
	}
}

// The reply to a command that was executed is lost. If the command were sent again, it
// would count twice.
func TestSentOnce(t *testing.T) {
	t.Parallel()
	for _, fault := range []faultproxy.Fault{faultproxy.LoseReply, faultproxy.HangReply} {
		clients(t, func(t *testing.T, c client) {
			s := New(c.rdb)
			ctx := await.Timeout(t, time.Minute)
			for _, way := range ways {
				wants(t, "warm", int64(1), way.add(ctx, s, "warm "+way.name))
				key := fmt.Sprint(way.name, fault)
				c.proxy.Fail(key, fault)
				if r := way.add(ctx, s, key); r.Err == nil || resp.IsUnsent(r.Err) {
					t.Errorf("%s: got %v", key, r.Err)
				}
				count := func() string { return c.direct.Get(ctx, key).Val() }
				// The server may execute it late.
				until(t, "it is executed", func() bool { return count() != "" })
				if n := count(); n != "1" {
					t.Errorf("%s: executed %s times", key, n)
				}
			}
		})
	}
}

func TestSourceIsSentOnlyToServersThatLackAScript(t *testing.T) {
	clients(t, func(t *testing.T, c client) {
		s := New(c.rdb)
		await.Value(s.Do(t.Context(), "get", "checked"))
		keys := numbered("each", 5)
		sends := func(want string, count int, keys ...string) {
			t.Helper()
			c.proxy.Commands()
			for _, r := range each(t.Context(), s, counting, keys...) {
				wants(t, "a call", int64(count), r)
			}
			if got := tally(c.proxy.Commands()); got != want {
				t.Errorf("got %s, want %s", got, want)
			}
		}
		sends("5 evalsha, 5 eval", 1, keys...)
		sends("5 evalsha, 0 eval", 2, keys...)

		c.direct.ScriptFlush(t.Context())
		for i, want := range []string{"1 evalsha, 1 eval", "1 evalsha, 0 eval"} {
			c.proxy.Commands()
			wants(t, "one call", int64(i+1), reply(s.Run(t.Context(), counting, on("one"))))
			if got := tally(c.proxy.Commands()); got != want {
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
	return fmt.Sprintf("%d evalsha, %d eval", n["evalsha"], n["eval"])
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
	await.ErrorIs(t, "after Close", await.ErrorOf(s.Do(t.Context(), "ping")), redis.ErrClosed)
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
	if err := rdb.Ping(t.Context()).Err(); !errors.Is(err, redis.ErrPoolTimeout) {
		t.Fatalf("a command: %v, want %v", err, redis.ErrPoolTimeout)
	}

	s := New(rdb)
	pings(t, s)
	for i := range 2 {
		for _, r := range each(t.Context(), s, counting, numbered("lone", 1+i)...) {
			if r.Err != nil {
				t.Errorf("a renewal: %v", r.Err)
			}
		}
	}
}

// A password may be a word of the reply that a script is not known.
func TestPasswordThatIsAWordOfAReply(t *testing.T) {
	srv := redistest.Start(t, &redistest.Options{Password: "script"})
	s := opened(t, srv.URL(), nil)
	for range 2 {
		await.Value(s.Run(t.Context(), counting, on("k")))
		srv.Client().ScriptFlush(t.Context())
	}
}

// A server repeats the arguments of a command that it does not know. No error has the
// password of a client that was passed.
func TestErrorsOfAPassedClientHaveNoPassword(t *testing.T) {
	srv := redistest.Start(t, &redistest.Options{Real: true, Password: secret})
	cluster := clusterOf(srv.ClientOptions())
	defer cluster.Close()
	for _, rdb := range []redis.UniversalClient{srv.Client(), cluster} {
		_, err := New(rdb).Do(t.Context(), "no-command", "k", secret)
		wantsText(t, err, "unknown command")
	}
}

// A time to live can be longer than a Duration.
func TestTermsBeyondADuration(t *testing.T) {
	for pttl, want := range map[int64]time.Duration{
		-1: -time.Millisecond, 0: 0, 5: 5 * time.Millisecond, 1<<63 - 1: 100 * 365 * 24 * hour,
	} {
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
		time.Second: "1000", time.Second + 1: "1001", time.Second - 1: "1000", time.Nanosecond: "1",
	} {
		if got := Millis(d); got != want {
			t.Errorf("%v: got %s ms, want %s", d, got, want)
		}
	}
}

func TestDoAllAnswersEachCommandByItself(t *testing.T) {
	t.Parallel()
	srv := redistest.Start(t, nil)
	s, _ := prepared(t, srv.URL())
	run := InfoField(srv.Client().Info(t.Context(), "server").Val(), "run_id")
	for _, key := range []string{t.Name(), strings.Repeat("large", maxShared/5)} {
		replies := s.DoAll(t.Context(),
			[]string{"set", key, "one", "px", "60000", "nx"},
			[]string{"set", key, "two", "px", "60000", "nx"},
			[]string{"get", key},
			[]string{"get", key + ":none"},
			[]string{"exists", key},
			[]string{"lpush", key, "x"},
			[]string{"time"})
		for i, want := range []any{"OK", nil, "one", nil, int64(1)} {
			wants(t, fmt.Sprint("reply ", i), want, replies[i])
		}
		err := replies[5].Err
		if wantsText(t, err, s.Name()+": WRONGTYPE"); !redis.HasErrorPrefix(err, "WRONGTYPE") {
			t.Errorf("%v does not keep its cause", err)
		}
		if parts, ok := replies[6].Value.([]any); !ok || len(parts) != 2 {
			t.Errorf("time: %v, %v", replies[6].Value, replies[6].Err)
		}
		for i, r := range replies {
			if r.Run != run {
				t.Errorf("reply %d is of the run %q, not %q", i, r.Run, run)
			}
		}
	}
}

// unnoticed is a context that has ended, although nothing has noticed that yet: its Done channel is
// still open.
type unnoticed struct{ context.Context }

func (unnoticed) Err() error { return context.Canceled }

func TestAListEndsWithItsContextThoughTheServerReplied(t *testing.T) {
	t.Parallel()
	srv := redistest.Start(t, nil)
	s, _ := prepared(t, srv.URL())
	script := NewScript(`return 1`)
	for _, err := range s.List(unnoticed{t.Context()}, "", soon, ByToken, script) {
		if !errors.Is(err, context.Canceled) {
			t.Fatalf("an entry, or another error: %v", err)
		}
		return
	}
	t.Fatal("the list ended without an error")
}
