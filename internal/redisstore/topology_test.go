package redisstore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redisstore/slot"
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
	topology := s.servers.(*sentinels)
	if got := s.Cancellation(); got != backend.CancelPrompt {
		t.Errorf("ends %v", got)
	}
	first := set.Master()
	callsEnd(t, s, first)

	// After an error of the master there is a search, even if the master is well.
	searched := func() time.Time {
		topology.searches.mu.Lock()
		defer topology.searches.mu.Unlock()
		return topology.searches.ended
	}
	topology.timer.Stop()
	before := searched()
	topology.failed(topology.known(), io.EOF)
	await.Until(t, "a search", func() bool { return searched().After(before) })
	topology.timer.Stop()

	// The answer of a sentinel that has missed a failover does not count. A server
	// that is a replica does not become the master, whichever sentinel names it.
	epoch := topology.epoch
	replica := set.Servers[1].Addr
	for _, c := range []struct {
		what string
		claimed
		all bool
		err error
	}{
		{"an old answer", claimed{replica, epoch - 1}, false, nil},
		{"a wrong answer", claimed{replica, epoch - 1}, true, errNotMaster},
		{"the master has come back", claimed{first.Addr, epoch + 2}, false, nil},
		{"an answer that is one failover old", claimed{replica, epoch + 1}, false, nil},
		{"all sentinels begin anew", claimed{first.Addr, epoch}, true, nil},
		{"a new wrong answer", claimed{replica, epoch + 1}, false, errNotMaster},
	} {
		if err := topology.adopt(t.Context(), c.claimed, c.all); !errors.Is(err, c.err) || topology.known().addr != first.Addr {
			t.Errorf("%s: got %v, %v", c.what, topology.known().addr, err)
		}
	}

	set.Failover()
	old := first.Client()
	await.Until(t, "the end of the old master", func() bool { // until then it takes writes, which are lost
		return strings.Contains(old.Info(t.Context(), "replication").Val(), "role:slave")
	})
	expect(t, s, "after the switch", "OK", "set", "k", "v")
	second := set.Master()
	s.always = true         // from here on over wires
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
	topology := s.servers.(*sentinels)
	await.Value(s.Listen(t.Context(), "news", "news", func(string, bool) {}))
	topology.timer.Reset(0) // the first search comes now, and the second one in time
	for i, srv := range []*redistest.Server{other, one} {
		name(srv, i+2)
		await.Until(t, "the new master", func() bool {
			// A call that is under way at the moment of the switch has an unknown outcome.
			if _, err := s.Do(t.Context(), "set", "k", "v"); err != nil && !errors.Is(err, net.ErrClosed) {
				t.Error(err)
			}
			return topology.known().addr == srv.Addr
		})
		rdb := srv.Client()
		await.Until(t, "the subscription", func() bool { return rdb.PubSubNumSub(t.Context(), "news").Val()["news"] == 1 })
	}
}

// hasp leaves a master that replies that it is a replica now.
func TestSentinelLeavesAReplica(t *testing.T) {
	t.Parallel()
	set := redistest.StartSentinel(t, nil)
	s := opened(t, set.URL(), nil)
	topology := s.servers.(*sentinels)
	at := topology.known()
	replica := set.Servers[1]
	eventually(t, "a replica", func(context.Context) error {
		topology.mu.Lock()
		topology.master = newServer(topology.a, topology.d, replica.Addr) // as if it had been the master until now; a sentinel's next message corrects it
		topology.mu.Unlock()
		_, err := s.Do(t.Context(), "set", "k", "v")
		if !redis.HasErrorPrefix(err, "READONLY") || !strings.Contains(err.Error(), replica.Addr) {
			return fmt.Errorf("got %v", err)
		}
		return nil
	})
	if _, err := s.Do(t.Context(), "set", "k", "v"); err != nil {
		t.Error(err)
	}
	if now := topology.known(); now == nil || now.addr != at.addr {
		t.Errorf("went to %v", now)
	}
	at.pool.Close()
	// A new connection to a replica is refused.
	fake := topology.newMaster(replica.Addr)
	defer fake.pool.Close()
	if r := fake.Pipeline(t.Context(), []string{"get", "k"})[0]; !errors.Is(r.Err, errNotMaster) {
		t.Errorf("got %v", r)
	}
}

func TestCluster(t *testing.T) {
	t.Parallel()
	set := redistest.StartCluster(t, nil)
	s := opened(t, set.URL(), nil)
	if got := s.Cancellation(); got != backend.CancelPrompt {
		t.Errorf("ends %v", got)
	}
	replicasConfirm(t, set)
	callsEnd(t, s, set.Master("k"))
	one := opened(t, strings.Split(set.URL(), ",")[0], nil) // by one of its nodes
	one.always = true                                       // over wires, which get every redirection
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

// If the client of a server was closed, nothing was sent. So the command goes to the
// server that has the slot now, unless that is the same one, or the Store is closed.
func TestACommandLeavesAServerThatWasClosed(t *testing.T) {
	open, end := context.WithCancel(t.Context())
	old, now := &server{addr: "old"}, &server{addr: "now"}
	c := &cluster{d: &dialer{open: open}, servers: map[string]*server{"now": now}}
	c.slots[slot.Of("k")] = now
	for _, step := range []struct {
		what   string
		at, to *server
		err    error
	}{
		{"closed", old, now, redis.ErrClosed},
		{"the same", now, nil, redis.ErrClosed},
		{"another error", old, nil, io.EOF},
		{"no error", old, nil, nil},
	} {
		if to, asking := c.follow(step.at, "k", step.err); to != step.to || asking {
			t.Errorf("%s: got %v, %v, want %v", step.what, to, asking, step.to)
		}
	}
	end()
	if to, _ := c.follow(old, "k", redis.ErrClosed); to != nil {
		t.Errorf("after Close: got %v", to)
	}
}
