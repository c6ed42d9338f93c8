package redisstore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
)

// The first call of a passed client says what to do, as Open does, even if the caller leaves while
// go-redis still tries to connect, or while another caller checks the server.
func TestFirstErrorOfAPassedClientSaysWhatToDo(t *testing.T) {
	// miniredis is always a cluster
	srv := redistest.Start(t, &redistest.Options{Real: true, Password: "secret"})
	at := []string{srv.Addr}
	for hint, o := range map[string]*redis.UniversalOptions{
		"check the user and the password": {Addrs: at, Password: "wrong"},
		"is Redis running there?":         {Addrs: []string{deadPort}},
		"Addr is host:port":               {Addrs: []string{"redis://" + srv.Addr}},
		"that Redis is in no cluster":     {Addrs: at, Password: "secret", IsClusterMode: true},
	} {
		t.Run(hint, func(t *testing.T) {
			t.Parallel()
			rdb := redis.NewUniversalClient(o)
			defer rdb.Close()
			s := New(rdb)
			says := func() bool {
				ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
				defer cancel()
				_, err := s.Do(ctx, "get", "k")
				return err != nil && strings.Contains(err.Error(), hint)
			}
			until(t, hint, says)
			if !strings.Contains(hint, "running") {
				return // a busy server may not reply in time
			}

			ctx, cancel := context.WithCancel(t.Context())
			var other sync.WaitGroup
			other.Go(func() { _, _ = s.Do(ctx, "get", "k") })
			for range 5 {
				if !says() {
					t.Error("not while another caller checks")
				}
			}
			cancel()
			other.Wait()
		})
	}
}

// If a connection does not answer the check, later callers check on another one.
func TestASilentCheckHoldsUpNobody(t *testing.T) {
	t.Parallel()
	srv := redistest.Start(t, redistest.Own)
	var conns atomic.Int64
	addr := redistest.Serve(t, func(c net.Conn) {
		to := await.Value(net.Dial("tcp", srv.Addr))
		defer to.Close()
		if conns.Add(1) > 1 {
			go func() { _, _ = io.Copy(c, to) }()
		}
		_, _ = io.Copy(to, c)
	})
	rdb := redis.NewClient(&redis.Options{
		Addr: addr, ReadTimeout: -1, Protocol: 2, DisableIdentity: true,
	})
	t.Cleanup(func() { rdb.Close() })
	s := New(rdb)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var first sync.WaitGroup
	first.Go(func() { _, _ = s.Do(ctx, "get", "k") })
	until(t, "the check", func() bool { return conns.Load() > 0 })
	returns(t, "a later call", func() {
		if _, err := s.Do(t.Context(), "get", "k"); err != nil {
			t.Error(err)
		}
	})
	cancel()
	first.Wait()
}

// Whatever a hook does after the client has sent the commands, no command is sent twice.
func TestAHookThatFailsSendsNothingTwice(t *testing.T) {
	t.Parallel()
	for name, then := range map[string]func() error{
		"returns": func() error { return &net.OpError{Op: "dial", Err: errors.New("no mirror")} },
		"panics":  func() error { panic("no mirror") },
	} {
		srv := redistest.Start(t, redistest.Own)
		rdb := srv.Client()
		// as if the hook could not connect to a second server
		rdb.AddHook(pipelineHook(func(ctx context.Context, cmds []redis.Cmder,
			next redis.ProcessPipelineHook) error {
			if err := next(ctx, cmds); err != nil {
				return err
			}
			return then()
		}))
		s := New(rdb)
		s.one.fit.Store(true) // the check would fail
		var calls sync.WaitGroup
		const callers, rounds = 64, 20
		for i := range callers {
			calls.Go(func() {
				for j := range rounds {
					_, _ = s.Do(t.Context(), "incr", fmt.Sprintf("%d-%d", i, j))
				}
			})
		}
		calls.Wait()
		for _, k := range srv.Client().Keys(t.Context(), "*").Val() {
			if n := srv.Client().Get(t.Context(), k).Val(); n != "1" {
				t.Fatalf("%s: %s was executed %s times", name, k, n)
			}
		}
	}
}

// Close leaves no connection to the nodes of a cluster, and go-redis keeps the marked addresses.
func TestACloseLeavesNoConnectionToACluster(t *testing.T) {
	redistest.NeedSets(t)
	c := redistest.StartCluster(t, nil)
	var own []*redis.Client
	for _, srv := range c.Servers {
		own = append(own, srv.Client())
	}
	connections := func() (n int) {
		for _, rdb := range own {
			n += strings.Count(rdb.ClientList(t.Context()).Val(), "cmd=")
		}
		return n
	}
	before := connections()
	for range 5 {
		s := opened(t, c.URL(), nil)
		await.Value(s.Do(t.Context(), "set", "k", "v"))
		s.Close()
	}
	until(t, "the end of all connections", func() bool { return connections() <= before })

	n := nodes{d: opened(t, c.URL(), nil).opened}
	for _, addr := range []string{
		"127.0.1.1:7000", "[::1]:7000", "10.0.0.1:7000", "localhost:7000",
	} {
		slots := func(context.Context) ([]redis.ClusterSlot, error) {
			node := redis.ClusterNode{Addr: marked(addr)}
			return []redis.ClusterSlot{{End: 16383, Nodes: []redis.ClusterNode{node}}}, nil
		}
		rdb := redis.NewClusterClient(&redis.ClusterOptions{
			Addrs: []string{addr}, ClusterSlots: slots, Dialer: n.d.dial,
		})
		defer rdb.Close()
		node := await.Value(rdb.MasterForKey(t.Context(), "k"))
		if got := whole(node.Options().Addr); got != addr {
			t.Errorf("%s became %s", addr, got)
		}
	}
}
