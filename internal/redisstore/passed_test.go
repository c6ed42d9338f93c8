package redisstore

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
)

// The first call of a passed client says what to do, as Open does, even if the caller leaves while
// go-redis still tries to connect.
func TestFirstErrorOfAPassedClientSaysWhatToDo(t *testing.T) {
	for name, c := range map[string]struct {
		hint   string
		real   bool // miniredis is always a cluster
		client func(o *redis.Options) redis.UniversalClient
	}{
		"wrong password": {"check the user and the password of the client", false,
			func(o *redis.Options) redis.UniversalClient { o.Password = "wrong"; return redis.NewClient(o) }},
		"nobody there": {"is Redis running there? check host and port", false,
			func(o *redis.Options) redis.UniversalClient { o.Addr = deadPort; return redis.NewClient(o) }},
		"no cluster": {"that Redis is in no cluster", true,
			func(o *redis.Options) redis.UniversalClient {
				return redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{o.Addr}, Password: o.Password})
			}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			srv := redistest.Start(t, &redistest.Options{Own: true, Password: "secret", Real: c.real})
			rdb := c.client(srv.ClientOptions())
			defer rdb.Close()
			s := New(rdb)
			says := func() bool {
				ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
				defer cancel()
				_, err := s.Do(ctx, "get", "k")
				return err != nil && strings.Contains(err.Error(), c.hint)
			}
			until(t, c.hint, says)
		})
	}
}

// mirror is a hook that fails after the client has sent the commands, as if it could not connect to a
// second server.
type mirror struct{ then func() error }

func (mirror) DialHook(next redis.DialHook) redis.DialHook          { return next }
func (mirror) ProcessHook(next redis.ProcessHook) redis.ProcessHook { return next }
func (m mirror) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		if err := next(ctx, cmds); err != nil {
			return err
		}
		return m.then()
	}
}

// Whatever a hook does after the client has sent the commands, no command is sent twice.
func TestAHookThatFailsSendsNothingTwice(t *testing.T) {
	t.Parallel()
	for name, then := range map[string]func() error{
		"returns": func() error { return &net.OpError{Op: "dial", Err: errors.New("no mirror")} },
		"panics":  func() error { panic("no mirror") },
	} {
		srv := redistest.Start(t, &redistest.Options{Own: true})
		rdb := srv.Client()
		rdb.AddHook(mirror{then})
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

// A type of the program that wraps a ClusterClient would have one queue for all nodes.
func TestAWrappedClusterClientIsRefused(t *testing.T) {
	redistest.NeedSets(t)
	c := redistest.StartCluster(t, nil)
	rdb := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{c.Servers[0].Addr}})
	defer rdb.Close()
	_, err := New(struct{ redis.UniversalClient }{rdb}).Do(t.Context(), "get", "k")
	wantsOutage(t, err, "it is one server of a cluster")
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
	for _, addr := range []string{"127.0.1.1:7000", "[::1]:7000", "10.0.0.1:7000", "localhost:7000"} {
		slots := func(context.Context) ([]redis.ClusterSlot, error) {
			node := redis.ClusterNode{Addr: marked(addr)}
			return []redis.ClusterSlot{{Start: 0, End: 16383, Nodes: []redis.ClusterNode{node}}}, nil
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
