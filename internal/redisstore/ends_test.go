package redisstore

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redistest"
)

func TestEnds(t *testing.T) {
	srv := redistest.Start(t, nil)
	s, err := open(t, srv.URL(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if got := s.Ends(); got != backend.EndsPromptly {
		t.Errorf("by URL: got %v", got)
	}
	for name, c := range map[string]struct {
		set  func(o *redis.Options)
		want backend.Ends
	}{
		"by default":            {func(o *redis.Options) {}, backend.EndsSometime},
		"with contexts":         {func(o *redis.Options) { o.ContextTimeoutEnabled = true }, backend.EndsByDeadline},
		"without time-outs":     {func(o *redis.Options) { o.ContextTimeoutEnabled, o.ReadTimeout, o.WriteTimeout = true, -1, -1 }, backend.EndsByDeadline},
		"reads without an end":  {func(o *redis.Options) { o.ContextTimeoutEnabled, o.ReadTimeout = true, -2 }, backend.EndsSometime},
		"writes without an end": {func(o *redis.Options) { o.ContextTimeoutEnabled, o.WriteTimeout = true, -2 }, backend.EndsSometime},
		"asks for a password": {func(o *redis.Options) {
			o.ContextTimeoutEnabled, o.CredentialsProvider = true, func() (string, string) { return "", "" }
		}, backend.EndsSometime},
	} {
		o := srv.ClientOptions()
		c.set(o)
		rdb := redis.NewClient(o)
		defer rdb.Close()
		if got := New(rdb).Ends(); got != c.want {
			t.Errorf("%s: got %v, want %v", name, got, c.want)
		}
	}
	cluster := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{srv.Addr}, ContextTimeoutEnabled: true})
	defer cluster.Close()
	if got := New(cluster).Ends(); got != backend.EndsSometime {
		t.Errorf("cluster: got %v", got)
	}
}

// What Ends promises of a client that was handed in.
func TestHandedInClientEndsByDeadline(t *testing.T) {
	srv := redistest.Start(t, &redistest.Options{Own: true})
	o := srv.ClientOptions()
	o.ContextTimeoutEnabled, o.ReadTimeout, o.WriteTimeout, o.PoolSize = true, time.Minute, time.Minute, 1
	rdb := redis.NewClient(o)
	defer rdb.Close()
	s := New(rdb)
	if _, err := s.Do(t.Context(), "ping"); err != nil {
		t.Fatal(err)
	}
	srv.Pause()
	defer srv.Resume()
	for _, what := range []string{"a read", "a new connection"} {
		ended(t, what, func() {
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			defer cancel()
			if _, err := s.Do(ctx, "ping"); err == nil {
				t.Errorf("%s: no error", what)
			}
		})
	}
}

// plainDeadlines is a connection to which a later go-redis might be one: it is
// given the same instants, and not the same values.
type plainDeadlines struct{ net.Conn }

func (c plainDeadlines) SetDeadline(t time.Time) error      { return c.Conn.SetDeadline(t.UTC()) }
func (c plainDeadlines) SetReadDeadline(t time.Time) error  { return c.Conn.SetReadDeadline(t.UTC()) }
func (c plainDeadlines) SetWriteDeadline(t time.Time) error { return c.Conn.SetWriteDeadline(t.UTC()) }

type plainHook struct{ hook }

func (plainHook) DialHook(next redis.DialHook) redis.DialHook {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := next(ctx, network, addr)
		return plainDeadlines{conn}, err
	}
}

func (plainHook) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

// A go-redis that passes deadlines on as other values is found out when a Store
// is opened. Calls then end by their deadlines.
func TestStoreWhoseDeadlinesAreAlteredEndsByDeadline(t *testing.T) {
	srv := redistest.Start(t, &redistest.Options{Own: true})
	s, probe, err := Prepare(srv.URL(), nil, 1)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	s.rdb.AddHook(plainHook{})
	if err := probe(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := s.Ends(); got != backend.EndsByDeadline {
		t.Errorf("got %v", got)
	}

	srv.Pause()
	defer srv.Resume()
	for _, others := range []int32{0, 1} { // alone, and where a wire would be made
		s.servers.(single).callers.Add(others)
		for _, what := range []string{"a read", "a new connection"} {
			ended(t, what, func() {
				ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
				defer cancel()
				if _, err := s.Do(ctx, "ping"); err == nil {
					t.Errorf("%s: no error", what)
				}
			})
		}
	}
}
