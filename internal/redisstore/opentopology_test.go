package redisstore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redistest"
)

// What a person sees who mistyped something about a set of servers.
func TestOpenSaysWhatIsWrongWithASet(t *testing.T) {
	redistest.NeedSets(t)
	const secret = "hunter2"
	ann := "ann:" + secret + "@"
	set := redistest.StartSentinel(t, &redistest.Options{User: "ann", Password: "other", SentinelUser: "sen", SentinelPassword: "right"})
	sentinels, _, _ := strings.Cut(strings.SplitN(set.URL(), "@", 2)[1], "/")
	right := map[string]string{"sentinel_user": "sen", "sentinel_password": "right"}
	plain := redistest.Start(t, &redistest.Options{Own: true})
	locked := redistest.Start(t, &redistest.Options{Password: "other"})
	empty := redistest.Start(t, &redistest.Options{Args: []string{"--cluster-enabled", "yes"}})
	partly := redistest.Start(t, &redistest.Options{Args: []string{"--cluster-enabled", "yes"}})
	if err := partly.Client().ClusterAddSlots(t.Context(), 7).Err(); err != nil {
		t.Fatal(err)
	}
	broken := listener(t, func(c net.Conn) { io.WriteString(c, "HTTP/1.1 400 Bad Request\r\n\r\n") })
	parrots := listener(t, parrot("-ERR what do you mean by "))
	for _, c := range []struct {
		name, node string
		params     map[string]string
		want       []string
	}{
		{"no sentinel", "redis-sentinel://" + ann + deadPort(t) + "," + deadPort(t) + "/m", nil, []string{"redis m: none of 2 sentinels answers: sentinel 127.0.0.1:", "connection refused"}},
		{"hung sentinel", "redis-sentinel://" + ann + listener(t, hang) + "/m", nil, []string{"redis m: sentinel 127.0.0.1:", "no answer within"}},
		{"unknown name", "redis-sentinel://" + ann + sentinels + "/theirmaster", right, []string{"theirmaster", "No such master", "check the name"}},
		{"no password for the sentinels", "redis-sentinel://" + ann + sentinels + "/mymaster", nil, []string{"sentinel 127.0.0.1:", "NOAUTH", "sentinel_password"}},
		{"wrong password for the sentinels", "redis-sentinel://" + ann + sentinels + "/mymaster", map[string]string{"sentinel_password": secret}, []string{"sentinel 127.0.0.1:", "WRONGPASS", "sentinel_password"}},
		{"wrong password for the master", "redis-sentinel://" + ann + sentinels + "/mymaster", right, []string{"master " + set.Servers[0].Addr, "WRONGPASS", "check user and password in the URL: redis-sentinel://"}},
		{"no sentinel but a Redis", "redis-sentinel://" + ann + plain.Addr + "/mymaster", nil, []string{"sentinel " + plain.Addr, "no sentinel"}},
		{"neither", "redis-sentinel://" + ann + broken + "/mymaster", nil, []string{"sentinel " + broken, "is that a Redis"}},
		{"tells what it heard", "redis-sentinel://" + ann + parrots + "/mymaster", map[string]string{"sentinel_password": secret}, []string{"what do you mean", "***"}},
		{"too few replicas of the master", strings.Replace(set.URL(), "/0", "", 1), map[string]string{"sentinel_user": "sen", "sentinel_password": "right", "replicas": "3"}, []string{"redis " + set.Servers[0].Addr, "2 of 3 replicas"}},
		{"no node", "redis-cluster://" + ann + deadPort(t) + "," + deadPort(t), nil, []string{"redis cluster: none of 2 nodes answers: 127.0.0.1:", "connection refused"}},
		{"hung node", "redis-cluster://" + ann + listener(t, hang), nil, []string{"redis cluster: 127.0.0.1:", "no answer within"}},
		{"no cluster", "redis-cluster://" + plain.Addr, nil, []string{plain.Addr, "cluster support disabled", "redis://host:port"}},
		{"no slots", "redis-cluster://" + empty.Addr, nil, []string{empty.Addr, "cluster is down"}},
		{"few slots", "redis-cluster://" + partly.Addr, nil, []string{partly.Addr, "CLUSTERDOWN", "try again later"}},
		{"wrong password", "redis-cluster://" + ann + locked.Addr, nil, []string{locked.Addr, "WRONGPASS", "check user and password in the URL: redis-cluster://"}},
		{"too few replicas", plain.URL(), map[string]string{"replicas": "1"}, []string{plain.Addr, "0 of 1 replicas"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			patience := 20 * time.Second
			if strings.Contains(c.name, "hung") {
				patience = time.Second
			}
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			s, err := Open(ctx, c.node, c.params)
			if err == nil {
				s.Close()
				t.Fatal("no error")
			}
			t.Log(err)
			for _, want := range c.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q does not say %q", err, want)
				}
			}
			for e := err; e != nil; e = errors.Unwrap(e) {
				if strings.Contains(fmt.Sprintf("%v %+v", e, e), secret) {
					t.Errorf("%q tells the password", e)
				}
			}
			if strings.Contains(err.Error(), "\n") || len(err.Error()) > 250 {
				t.Errorf("%q is not one short line", err)
			}
			if errors.Is(err, backend.ErrHeld) || errors.Is(err, backend.ErrInvalid) || errors.Is(err, backend.ErrLost) {
				t.Errorf("%q is not an outage", err)
			}
		})
	}
}

// Whoever is away is passed over: a sentinel that is dead, one that hangs, a
// node, a whole master.
func TestOpenDoesWithoutSome(t *testing.T) {
	t.Parallel()
	set := redistest.StartSentinel(t, nil)
	set.Sentinels[0].Kill()
	set.Sentinels[1].Pause()
	s, err := open(t, set.URL(), nil)
	if err != nil {
		t.Fatal(err)
	}
	expect(t, s, "set", "OK", "set", "k", "v")
	set.Sentinels[1].Resume()

	nodes := redistest.StartCluster(t, &redistest.Options{Bare: true})
	away := nodes.Master("k")
	away.Pause()
	if s, err = open(t, nodes.URL(), nil); err != nil {
		t.Fatal(err)
	}
	key := "a"
	for nodes.Master(key) == away {
		key += "a"
	}
	expect(t, s, "set", "OK", "set", key, "v")
	away.Resume()
	expect(t, s, "set", "OK", "set", "k", "v")
}

// A redirection is no answer to give to people: it is followed, or explained.
func TestOneServerOfAClusterIsNotEnough(t *testing.T) {
	t.Parallel()
	nodes := redistest.StartCluster(t, &redistest.Options{Bare: true})
	key := "a"
	for nodes.Master(key) == nodes.Servers[0] {
		key += "a"
	}
	s, err := open(t, nodes.Servers[0].URL(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Do(t.Context(), "get", key); err == nil || !strings.Contains(err.Error(), "redis-cluster://") {
		t.Errorf("got %v", err)
	}
}

// Close ends all that a Store runs, also while it looks for servers.
func TestCloseLeavesNothing(t *testing.T) {
	redistest.NeedSets(t)
	set := redistest.StartSentinel(t, nil)
	nodes := redistest.StartCluster(t, &redistest.Options{Bare: true})
	leak := func() error {
		buf := make([]byte, 1<<20)
		for stack := range strings.SplitSeq(string(buf[:runtime.Stack(buf, true)]), "\n\n") {
			if strings.Contains(stack, "redisstore.(*sentinels)") || strings.Contains(stack, "redisstore.(*cluster)") || strings.Contains(stack, "redisstore.(*looker)") {
				return errors.New(stack)
			}
		}
		return nil
	}
	for _, url := range []string{set.URL(), nodes.URL()} {
		for _, hung := range []bool{false, true} {
			s, err := open(t, url, nil)
			if err != nil {
				t.Fatal(err)
			}
			if hung {
				set.Servers[0].Pause()
				nodes.Servers[0].Pause()
				for _, sentinel := range set.Sentinels {
					sentinel.Pause()
				}
				switch t := s.servers.(type) {
				case *sentinels:
					t.forget(t.known())
					t.look.news()
				case *cluster:
					t.look.news()
				}
				go s.Do(context.Background(), "get", "k")
			}
			ended(t, "Close", func() { s.Close() })
			eventually(t, "leak", func(context.Context) error { return leak() })
			if hung {
				set.Servers[0].Resume()
				nodes.Servers[0].Resume()
				for _, sentinel := range set.Sentinels {
					sentinel.Resume()
				}
			}
		}
	}
}
