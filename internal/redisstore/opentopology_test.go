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

	"github.com/redis/go-redis/v9"

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
	broken := redistest.Serve(t, func(c net.Conn) { io.WriteString(c, "HTTP/1.1 400 Bad Request\r\n\r\n") })
	half := plain.Proxy()
	half.Answer("sentinel", "*1\r\n$12\r\nconfig-epoch\r\n")
	parrots := redistest.Serve(t, parrot("-ERR what do you mean by "))
	for _, c := range []struct {
		name, node string
		params     map[string]string
		want       []string
	}{
		{"no sentinel", "redis-sentinel://" + ann + deadPort + ",127.0.0.1:2" + "/m", nil, []string{"redis m: none of 2 sentinels answers: sentinel 127.0.0.1:", "connection refused"}},
		{"hung sentinel", "redis-sentinel://" + ann + redistest.Serve(t, hang) + "/m", nil, []string{"redis m: sentinel 127.0.0.1:", "no answer within"}},
		{"unknown name", "redis-sentinel://" + ann + sentinels + "/theirmaster", right, []string{"theirmaster", "No such master", "check the name"}},
		{"no password for the sentinels", "redis-sentinel://" + ann + sentinels + "/mymaster", nil, []string{"sentinel 127.0.0.1:", "NOAUTH", "sentinel_password"}},
		{"wrong password for the sentinels", "redis-sentinel://" + ann + sentinels + "/mymaster", map[string]string{"sentinel_password": secret}, []string{"sentinel 127.0.0.1:", "WRONGPASS", "sentinel_password"}},
		{"wrong password for the master", "redis-sentinel://" + ann + sentinels + "/mymaster", right, []string{"master " + set.Servers[0].Addr, "WRONGPASS", "check user and password in the URL: redis-sentinel://"}},
		{"no sentinel but a Redis", "redis-sentinel://" + ann + plain.Addr + "/mymaster", nil, []string{"sentinel " + plain.Addr, "no sentinel"}},
		{"neither", "redis-sentinel://" + ann + broken + "/mymaster", nil, []string{"sentinel " + broken, "is that a Redis"}},
		{"half a word", "redis-sentinel://" + ann + half.Addr() + "/mymaster", nil, []string{"sentinel " + half.Addr(), "config-epoch"}},
		{"tells what it heard", "redis-sentinel://" + ann + parrots + "/mymaster", map[string]string{"sentinel_password": secret}, []string{"what do you mean", "***"}},
		{"too few replicas of the master", strings.Replace(set.URL(), "/0", "", 1), map[string]string{"sentinel_user": "sen", "sentinel_password": "right", "replicas": "3"}, []string{"redis " + set.Servers[0].Addr, "2 of 3 replicas"}},
		{"no node", "redis-cluster://" + ann + deadPort + ",127.0.0.1:2", nil, []string{"redis cluster: none of 2 nodes answers: 127.0.0.1:", "connection refused"}},
		{"hung node", "redis-cluster://" + ann + redistest.Serve(t, hang), nil, []string{"redis cluster: 127.0.0.1:", "no answer within"}},
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
				patience = 5 * time.Second
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

// Whoever is away is passed over: a sentinel that is dead, one that hangs.
func TestSentinelsThatAreAway(t *testing.T) {
	t.Parallel()
	set := redistest.StartSentinel(t, nil)
	set.Sentinels[0].Kill()
	set.Sentinels[1].Pause()
	s := openWithout(t, set.URL())
	expect(t, s, "set", "OK", "set", "k", "v")

	// If nobody answers, all are waited for.
	set.Sentinels[2].Pause()
	time.AfterFunc(grace*3/2, func() {
		set.Sentinels[1].Resume()
		set.Sentinels[2].Resume()
	})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	s, err := Open(ctx, set.URL(), nil)
	if err != nil {
		t.Fatal(err)
	}
	s.Close()
}

// openWithout opens a set of which somebody hangs, with all the time in the
// world.
func openWithout(t *testing.T, url string) (s *Store) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	opened := make(chan error, 1)
	go func() {
		var err error
		s, err = Open(ctx, url, nil)
		opened <- err
	}()
	select {
	case err := <-opened:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(time.Minute):
		t.Fatal("Open waits for those who hang")
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// And a node of a cluster, a whole master; but not many.
func TestNodesThatAreAway(t *testing.T) {
	t.Parallel()
	set := redistest.StartCluster(t, &redistest.Options{Bare: true})
	away := set.Master("k")
	key := "a"
	for set.Master(key) == away {
		key += "a"
	}
	away.Pause()
	s := openWithout(t, set.URL())
	expect(t, s, "set", "OK", "set", key, "v")
	for range 8 { // of which some begin with the one that hangs
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		if err := s.servers.(*cluster).searches.wait(ctx); err != nil {
			t.Error(err)
		}
		cancel()
	}
	away.Resume()
	expect(t, s, "set", "OK", "set", "k", "v")

	// One server alone, by an URL that says so, redirects: that is explained.
	one, err := open(t, away.URL(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := one.Do(t.Context(), "get", key); err == nil || !strings.Contains(err.Error(), "redis-cluster://") {
		t.Errorf("got %v", err)
	}
}

// Close ends all that a topology runs, also while it looks for servers that
// do not answer.
func TestCloseLeavesNothing(t *testing.T) {
	for _, scheme := range []string{"redis-sentinel", "redis-cluster"} {
		for _, hung := range []bool{true, false} {
			addr := deadPort
			if hung {
				addr = redistest.Serve(t, hang)
			}
			a, err := parse(scheme + "://" + addr + "/" + map[string]string{"redis-sentinel": "m"}[scheme])
			if err != nil {
				t.Fatal(err)
			}
			d, err := newDialer(a, nil)
			if err != nil {
				t.Fatal(err)
			}
			var found topology
			var end func()
			if a.kind == theSentinels {
				s := newSentinels(a, d)
				found, end = s, s.close
			} else {
				c := newCluster(a, d)
				found, end = c, c.close
			}
			waits := make(chan error)
			go func() {
				_, err := found.find(t.Context(), "k")
				waits <- err
			}()
			eventually(t, "a search", func(context.Context) error {
				if hung && !running() {
					return errors.New("none is under way")
				}
				return nil
			})
			d.close()
			ended(t, scheme, end)
			ended(t, scheme+": who waits", func() {
				if err := <-waits; err == nil {
					t.Error("a server was found")
				}
			})
			eventually(t, "the end", func(context.Context) error {
				if running() {
					return errors.New("something goes on")
				}
				return nil
			})
			if _, err := found.find(t.Context(), "k"); !errors.Is(err, redis.ErrClosed) {
				t.Errorf("%s: after it: got %v", scheme, err)
			}
		}
	}
}

// running reports whether a topology runs anything.
func running() bool {
	buf := make([]byte, 1<<20)
	stacks := string(buf[:runtime.Stack(buf, true)])
	return strings.Contains(stacks, "redisstore.(*sentinels)") || strings.Contains(stacks, "redisstore.(*cluster)") ||
		strings.Contains(stacks, "redisstore.(*searcher)")
}
