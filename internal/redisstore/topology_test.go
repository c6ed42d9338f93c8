package redisstore

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redisstore/resp"
	"github.com/hasplock/hasp/internal/redistest"
)

// counted tests that a script runs once for each call, on whichever server.
func counted(t *testing.T, s *Store, what, key string, want int64) {
	t.Helper()
	wants(t, what+": run", want, reply(s.Run(t.Context(), counting, on(key))))
	wants(t, what+": runeach", want+1, each(t.Context(), s, counting, key)[0])
}

// confirmed waits until the replicas have all writes.
func confirmed(t *testing.T, srv *redistest.Server, replicas int64) {
	t.Helper()
	rdb := srv.Client()
	until(t, "replicas", func() bool {
		rdb.Incr(t.Context(), "written") // so that there is a write to confirm
		return rdb.Wait(t.Context(), int(replicas), time.Second).Val() >= replicas
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
	// Until then the old master takes writes, which are lost.
	until(t, "the end of the old master", func() bool {
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

// claims makes a proxy in front of any server act as a sentinel that names the master host:port.
func claims(p *faultproxy.Proxy, epoch int, hostport string) {
	host, port, _ := strings.Cut(hostport, ":")
	p.Forgive()
	array := func(words string) string {
		all := strings.Fields(words)
		return fmt.Sprintf("*%d\r\n+%s\r\n", len(all), strings.Join(all, "\r\n+"))
	}
	p.Answer("sentinel master", array(fmt.Sprintf("config-epoch %d ip %s port %s runid run%d",
		epoch, host, port, epoch)))
	p.Answer("sentinel get-master-addr", array(host+" "+port))
}

// A master that was demoted may be cut off from the sentinels, and still take writes. So no
// call fails. Subscriptions leave it as well. Miniredis has no ROLE.
func TestSwitchThatNoCallNotices(t *testing.T) {
	t.Parallel()
	one := redistest.Start(t, redistest.Real)
	other := redistest.Start(t, redistest.Real)
	sentinel := one.Proxy()
	claims(sentinel, 1, one.Addr)
	s := opened(t, "redis-sentinel://"+sentinel.Addr()+"/m", nil)
	await.Value(s.Listen(t.Context(), "news", "news", func(string, bool) {}))
	for i, srv := range []*redistest.Server{other, one} {
		claims(sentinel, i+2, srv.Addr)
		rdb := srv.Client()
		until(t, "the new master", func() bool {
			// A call that is under way at the moment of the switch has an unknown outcome.
			_, err := s.Do(t.Context(), "set", "k", fmt.Sprint("v", i))
			if err != nil && !errors.Is(err, net.ErrClosed) && !errors.Is(err, errReplaced) {
				t.Error(err)
			}
			return rdb.Get(t.Context(), "k").Val() == fmt.Sprint("v", i)
		})
		until(t, "the subscription", func() bool {
			return rdb.PubSubNumSub(t.Context(), "news").Val()["news"] == 1
		})
	}
}

func TestCluster(t *testing.T) {
	t.Parallel()
	set := redistest.StartCluster(t, nil)
	s := opened(t, set.URL(), nil)
	replicasConfirm(t, set)
	callsEnd(t, s, set.Master("k"))
	one := opened(t, strings.Split(set.URL(), ",")[0], nil) // by one of its nodes
	expect(t, one, "by one node", "v", "get", "{k}s")

	counted(t, s, "at home", "{k}n", 1)
	finish := set.Move("k")
	counted(t, s, "half-way", "{k}n", 3)
	counted(t, s, "half-way, a new key", "{k}m", 1)
	finish()
	counted(t, s, "moved", "{k}n", 5)
	counted(t, one, "moved", "{k}n", 7)
	set.Failover("k")
	counted(t, s, "failed over", "{k}n", 9)

	hung := set.Master("k")
	othersAnswer(t, s, hung, func(key string) bool { return set.Master(key) == hung })

	confirmed(t, hung, 1)
	hung.Kill()
	set.Failover("k")
	for _, s := range []*Store{s, one} {
		expect(t, s, "after a kill", "v", "get", "{k}s")
	}
	back := set.Master("k")
	hung.Restart()
	confirmed(t, back, 1)
	back.Pause()
	set.Failover("k")
	expect(t, s, "after a pause", int64(1), "exists", "{k}n")
	back.Resume()
}

// othersAnswer runs a script for keys of all masters while one of them hangs. The other masters
// answer.
func othersAnswer(t *testing.T, s *Store, hung *redistest.Server, has func(key string) bool) {
	t.Helper()
	var calls []Call
	want := 0
	for _, key := range numbered("spread", 12) {
		if has(key) {
			calls = slices.Insert(calls, 0, on(key)) // first, where it could delay the most calls
			continue
		}
		calls = append(calls, on(key))
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
		wantsOutage(t, err, taken.Addr+": … another cluster")
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
		wantsOutage(t, err, taken.Addr+": … another cluster")
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

// A sentinel may have missed a failover. Its answer counts only if all sentinels have answered.
func TestAnswersWithALowerEpoch(t *testing.T) {
	m := &sentinels{d: &dialer{open: t.Context()}}
	m.era, m.endEra = context.WithCancelCause(t.Context())
	for _, c := range []struct {
		claimed
		all  bool
		want string
	}{
		{claimed{addr: "new", epoch: 2}, false, "new"},
		{claimed{addr: "old", epoch: 1}, false, "new"},
		{claimed{addr: "old", epoch: 1}, true, "old"},
	} {
		if got, _ := m.adopt(c.claimed, c.all); got != c.want {
			t.Errorf("%v: got %s", c, got)
		}
	}
}

func TestRepliesAfterWhichTheServersAreSearched(t *testing.T) {
	for word, want := range map[string]bool{
		"READONLY": true, "MASTERDOWN": true, "CLUSTERDOWN": true, "MOVED": true,
		"WRONGTYPE": false,
	} {
		if got := mayHaveMoved(resp.ReplyError(word + " text")); got != want {
			t.Errorf("%s: got %v", word, got)
		}
	}
}

// Certificates of both sides, users, and passwords that must be encoded, together.
func TestSecureTopologies(t *testing.T) {
	o := redistest.Options{Mutual: true, User: "ann", Password: "p@ss/w%rd?&#:,"}
	withSentinels := o
	withSentinels.SentinelUser, withSentinels.SentinelPassword = "sen", "o/th@r"
	test := func(t *testing.T, url string, params map[string]string) {
		params["replicas"] = "1"
		s := opened(t, url, params)
		for _, key := range numbered("k", 5) {
			expect(t, s, "set", "OK", "set", key, "v")
		}
	}
	t.Run("sentinel", func(t *testing.T) {
		t.Parallel()
		set := redistest.StartSentinel(t, &withSentinels)
		test(t, set.URL(), set.Params())
	})
	t.Run("cluster", func(t *testing.T) {
		t.Parallel()
		set := redistest.StartCluster(t, &o)
		test(t, set.URL(), set.Params())
	})
}
