package redisstore

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
)

// eventually repeats f until it returns nil, because a failover takes a while.
func eventually(t *testing.T, what string, f func(ctx context.Context) error) {
	t.Helper()
	await.Success(t, what, func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		return f(ctx)
	})
}

// expect waits until a command gets a reply.
func expect(t *testing.T, s *Store, what string, want any, args ...string) {
	t.Helper()
	eventually(t, what, func(ctx context.Context) error {
		v, err := s.Do(ctx, args...)
		if err == nil && v != want {
			err = fmt.Errorf("got %v, want %v", v, want)
		}
		return err
	})
}

// counted tests that a script runs once, on whichever server.
func counted(t *testing.T, s *Store, what, key string, want int64) {
	t.Helper()
	if v, err := s.Run(t.Context(), counting, Call{[]string{key}, []string{"1"}}); v != want || err != nil {
		t.Errorf("%s: run: got %v, %v; want %d", what, v, err, want)
	}
	s.RunEach(t.Context(), counting, []Call{{[]string{key}, []string{"1"}}}, func(_ int, v any, err error) {
		if v != want+1 || err != nil {
			t.Errorf("%s: runeach: got %v, %v; want %d", what, v, err, want+1)
		}
	})
}

// confirmed waits until the replicas have all writes.
func confirmed(t *testing.T, srv *redistest.Server, replicas int64) {
	t.Helper()
	rdb := srv.Client()
	eventually(t, "replicas", func(ctx context.Context) error {
		if err := rdb.Incr(ctx, "written").Err(); err != nil && !redis.HasErrorPrefix(err, "MOVED") {
			return err
		}
		n, err := rdb.Wait(ctx, int(replicas), time.Second).Result()
		if err == nil && n < replicas {
			err = fmt.Errorf("%d", n)
		}
		return err
	})
}

func TestSentinel(t *testing.T) {
	t.Parallel()
	set := redistest.StartSentinel(t, nil)
	s := opened(t, set.URL(), nil)
	first := set.Master()
	callsEnd(t, s, first)

	set.Failover()
	old := first.Client()
	await.Until(t, "the end of the old master", func() bool { // until then it takes writes, which are lost
		return strings.Contains(old.Info(t.Context(), "replication").Val(), "role:slave")
	})
	expect(t, s, "after the switch", "OK", "set", "k", "v")
	second := set.Master()
	confirmed(t, second, 2) // either replica may be the next master
	second.Kill()
	set.Failover()
	expect(t, s, "after a kill", "v", "get", "k")

	third := set.Master()
	third.Pause()
	set.Failover()
	expect(t, s, "after a pause", int64(1), "exists", "k")
	third.Resume()
}

func rdbOf(srv *redistest.Server) *redis.Client { return srv.Client() }

// A master that was demoted may be cut off from the sentinels, and still take writes. So no
// call fails. Subscriptions leave it as well. Miniredis has no ROLE.
func TestSwitchThatNoCallNotices(t *testing.T) {
	t.Parallel()
	one := redistest.Start(t, &redistest.Options{Real: true})
	other := redistest.Start(t, &redistest.Options{Real: true})
	sentinel := one.Proxy()
	name := func(srv *redistest.Server, epoch int) {
		host, port, _ := strings.Cut(srv.Addr, ":")
		sentinel.Forgive()
		sentinel.Answer("sentinel master", fmt.Sprintf("*2\r\n+config-epoch\r\n+%d\r\n", epoch))
		sentinel.Answer("sentinel get-master-addr", fmt.Sprintf("*2\r\n+%s\r\n+%s\r\n", host, port))
	}
	name(one, 1)
	s := opened(t, "redis-sentinel://"+sentinel.Addr()+"/m", nil)
	await.Value(s.Listen(t.Context(), "news", "news", func(string, bool) {}))
	for i, srv := range []*redistest.Server{other, one} {
		name(srv, i+2)
		await.Until(t, "the new master", func() bool {
			// A call that is under way at the moment of the switch has an unknown outcome.
			if _, err := s.Do(t.Context(), "set", "k", fmt.Sprint("v", i)); err != nil && !errors.Is(err, net.ErrClosed) && !errors.Is(err, errReplaced) {
				t.Error(err)
			}
			return rdbOf(srv).Get(t.Context(), "k").Val() == fmt.Sprint("v", i)
		})
		rdb := srv.Client()
		await.Until(t, "the subscription", func() bool { return rdb.PubSubNumSub(t.Context(), "news").Val()["news"] == 1 })
	}
}

func TestCluster(t *testing.T) {
	t.Parallel()
	set := redistest.StartCluster(t, nil)
	s := opened(t, set.URL(), nil)
	replicasConfirm(t, set)
	callsEnd(t, s, set.Master("k"))
	one := opened(t, strings.Split(set.URL(), ",")[0], nil) // by one of its nodes
	expect(t, one, "by one node", "v", "get", "k")
	n := await.Value(s.Do(t.Context(), "get", "{k}n")) // callsEnd has counted it, or not
	if n != nil {
		expect(t, s, "reset", int64(1), "del", "{k}n")
	}

	counted(t, s, "at home", "{k}n", 1)
	finish := set.Move("k")
	counted(t, s, "half-way", "{k}n", 3)
	counted(t, s, "half-way, a new key", "{k}m", 1)
	counted(t, one, "half-way, over a wire", "{k}n", 5)
	counted(t, one, "half-way, over a wire, a new key", "{k}o", 1)
	finish()
	counted(t, s, "moved", "{k}n", 7)
	counted(t, one, "moved", "{k}n", 9)
	set.Failover("k")
	counted(t, s, "failed over", "{k}n", 11)

	hung := set.Master("k")
	spread(t, s, hung, func(key string) bool { return set.Master(key) == hung })

	confirmed(t, hung, 1)
	hung.Kill()
	set.Failover("k")
	expect(t, s, "after a kill", "v", "get", "k")
	expect(t, one, "after a kill", "v", "get", "k")
	back := set.Master("k")
	hung.Restart()
	confirmed(t, back, 1)
	back.Pause()
	set.Failover("k")
	expect(t, s, "after a pause", int64(1), "exists", "{k}n")
	back.Resume()
}

// A server of another cluster may get the address of a dead server. It gets no commands, and its
// map of slots is not adopted. A user without the right to CLUSTER MYID is as safe.
func TestClusterIsNotMistakenForAnother(t *testing.T) {
	t.Parallel()
	user := strings.Fields("--user few on >secret ~* &* +@all -cluster|myid")
	ours := redistest.StartCluster(t, &redistest.Options{Bare: true, Args: user})
	theirs := redistest.StartCluster(t, &redistest.Options{Bare: true, Args: user})
	stores := []*Store{
		opened(t, ours.URL(), nil),
		opened(t, strings.Replace(ours.URL(), "://", "://few:secret@", 1), nil),
	}
	taken := ours.Master("k")

	// A server that is new in the cluster is used, although its ID is not known yet.
	id := taken.Client().ClusterMyID(t.Context()).Val()
	taken.Kill()
	for _, s := range stores {
		n := s.opened.nodes
		n.mu.Lock()
		delete(n.ids, id)
		n.mu.Unlock()
	}
	taken.Restart()
	for _, s := range stores {
		expect(t, s, "a new server", "OK", "set", "k", "v")
	}

	taken.Kill()
	stranger := theirs.Master("k")
	ln := await.Value(net.Listen("tcp", taken.Addr))
	proxy := faultproxy.New(func() (net.Conn, error) { return net.Dial("tcp", stranger.Addr) })
	go proxy.Serve(ln)
	t.Cleanup(proxy.Close)
	for _, s := range stores {
		_, err := s.Do(t.Context(), "set", "k", "v")
		wantsOutage(t, err, "hunter2", taken.Addr, "another cluster")
		for range 20 { // the order of the servers is random
			slots := await.Value(s.opened.nodes.search(t.Context()))
			if addr := whole(slots[0].Nodes[0].Addr); addr != ours.Servers[0].Addr {
				t.Fatalf("%s has the first slots", addr)
			}
		}
	}
	if n := stranger.Client().Exists(t.Context(), "k").Val(); n != 0 {
		t.Error("the other cluster has the key")
	}

	for _, srv := range ours.Servers {
		srv.Kill()
	}
	for _, s := range stores {
		_, err := s.opened.nodes.search(t.Context())
		wantsOutage(t, err, "hunter2", taken.Addr, "another cluster")
	}
}

// All servers of a cluster may be replaced, if each map of slots has a server of the last one.
func TestClusterWhoseServersAreReplaced(t *testing.T) {
	n := &nodes{}
	for _, c := range []struct {
		master, replica string
		want            bool
	}{
		{"a", "b", true}, {"b", "c", true}, {"d", "c", true}, {"a", "b", false}, {"d", "e", true},
	} {
		slots := []redis.ClusterSlot{{Nodes: []redis.ClusterNode{{ID: c.master}, {ID: c.replica}}}}
		if got := n.adopt(slots); got != c.want {
			t.Errorf("%v: got %v", c, got)
		}
	}
	if n.adopt(nil) {
		t.Error("adopted a map without servers")
	}
}

// spread runs a script for keys of all masters while one hangs, which has some of them. The
// others answer.
func spread(t *testing.T, s *Store, hung *redistest.Server, has func(key string) bool) {
	t.Helper()
	var calls []Call
	want := 0
	for i := range 12 {
		call := Call{[]string{fmt.Sprint("spread", i)}, []string{"1"}}
		if has(call.Keys[0]) {
			calls = append([]Call{call}, calls...) // first, where it could delay the most calls
			continue
		}
		calls = append(calls, call)
		want++
	}
	s.RunEach(t.Context(), counting, calls, func(int, any, error) {})
	hung.Pause()
	defer hung.Resume()
	for range 6 { // the order of the servers is random
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		got := 0
		returns(t, "a batch", func() {
			s.RunEach(ctx, counting, calls, func(i int, v any, err error) {
				if ctx.Err() != nil {
					return // the calls of the other master, which cancel has ended
				}
				if err != nil {
					t.Errorf("%s: got %v, %v", calls[i].Keys[0], v, err)
				}
				if got++; got == want {
					cancel()
				}
			})
		})
		cancel()
		if got != want || want == 0 || want == len(calls) {
			t.Fatalf("%d of %d answered", got, want)
		}
	}
}

// Certificates of both sides, users, and passwords that must be encoded, together.
func TestSecureTopologies(t *testing.T) {
	o := &redistest.Options{Mutual: true, User: "ann", Password: "p@ss/w%rd?&#:,", SentinelUser: "sen", SentinelPassword: "o/th@r"}
	for name, start := range map[string]func(t *testing.T) (url string, params map[string]string){
		"sentinel": func(t *testing.T) (string, map[string]string) {
			set := redistest.StartSentinel(t, o)
			return set.URL(), set.Params()
		},
		"cluster": func(t *testing.T) (string, map[string]string) {
			o := *o
			o.SentinelUser, o.SentinelPassword = "", ""
			set := redistest.StartCluster(t, &o)
			return set.URL(), set.Params()
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url, params := start(t)
			params["replicas"] = "1"
			s := opened(t, url, params)
			for i := range 5 {
				expect(t, s, "set", "OK", "set", fmt.Sprint("k", i), "v")
			}
		})
	}
}
