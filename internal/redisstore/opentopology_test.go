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

	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
)

// The errors for a wrong URL of several servers say what to do.
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
	await.Must(t, partly.Client().ClusterAddSlots(t.Context(), 7).Err())
	broken := redistest.Serve(t, func(c net.Conn) { io.WriteString(c, "HTTP/1.1 400 Bad Request\r\n\r\n") })
	parrots := redistest.Serve(t, parrot("-ERR what do you mean by "))
	evicts := redistest.Start(t, &redistest.Options{Own: true, Args: []string{"--maxmemory", "100mb", "--maxmemory-policy", "volatile-lru"}})
	opened(t, evicts.URL(), map[string]string{"allow_eviction": "true"})
	full := redistest.Start(t, &redistest.Options{Own: true, Args: []string{"--maxmemory", "100mb"}})
	opened(t, full.URL(), nil)
	for _, c := range []struct {
		name, node string
		params     map[string]string
		want       []string
	}{
		{"may evict", evicts.URL(), nil, []string{evicts.Addr, "volatile-lru", "set noeviction"}},
		{"a replica", "redis://ann:other@" + set.Servers[1].Addr, nil, []string{set.Servers[1].Addr, "replica of " + set.Servers[0].Addr, "redis-sentinel://"}},
		{"no sentinel", "redis-sentinel://" + ann + deadPort + ",127.0.0.1:2" + "/m", nil, []string{"redis m: none of 2 sentinels can be used: sentinel 127.0.0.1:", "connection refused"}},
		{"hung sentinel", "redis-sentinel://" + ann + redistest.Serve(t, hang) + "/m", nil, []string{"redis m: sentinel 127.0.0.1:", "no answer within"}},
		{"unknown name", "redis-sentinel://" + ann + sentinels + "/theirmaster", right, []string{"theirmaster", "No such master", "check the name"}},
		{"no password for the sentinels", "redis-sentinel://" + ann + sentinels + "/mymaster", nil, []string{"sentinel 127.0.0.1:", "NOAUTH", "sentinel_password"}},
		{"wrong password for the sentinels", "redis-sentinel://" + ann + sentinels + "/mymaster", map[string]string{"sentinel_password": secret}, []string{"sentinel 127.0.0.1:", "WRONGPASS", "sentinel_password"}},
		{"wrong password for the master", "redis-sentinel://" + ann + sentinels + "/mymaster", right, []string{"redis " + set.Servers[0].Addr, "WRONGPASS", "check user and password in the URL: redis-sentinel://"}},
		{"no sentinel but a Redis", "redis-sentinel://" + ann + plain.Addr + "/mymaster", nil, []string{"sentinel " + plain.Addr, "not a sentinel"}},
		{"neither", "redis-sentinel://" + ann + broken + "/mymaster", nil, []string{"sentinel " + broken, "is that a Redis"}},
		{"repeats what it got", "redis-sentinel://" + ann + parrots + "/mymaster", map[string]string{"sentinel_password": secret}, []string{"what do you mean", "***"}},
		{"too few replicas of the master", strings.Replace(set.URL(), "/0", "", 1), map[string]string{"sentinel_user": "sen", "sentinel_password": "right", "replicas": "3"}, []string{"redis " + set.Servers[0].Addr, "2 of 3 replicas"}},
		{"no node", "redis-cluster://" + ann + deadPort + ",127.0.0.1:2", nil, []string{"redis cluster: none of 2 nodes can be used: 127.0.0.1:", "connection refused"}},
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
			wantsOutage(t, err, secret, c.want...)
		})
	}
}

// A replica is refused at the first call. A server that becomes a replica later refuses writes, with a
// hint.
func TestReadOnlyHasAHint(t *testing.T) {
	redistest.NeedSets(t)
	set := redistest.StartSentinel(t, nil)
	s := New(set.Servers[1].Client())
	_, err := s.Do(t.Context(), "set", "k", "v")
	wantsOutage(t, err, "hunter2", set.Servers[1].Addr, "it is a replica of", "name the master")

	s.one.fit.Store(true)
	_, err = s.Do(t.Context(), "set", "k", "v")
	wantsOutage(t, err, "hunter2", set.Servers[1].Addr, "READONLY", "name the master")
}

// Open passes over a sentinel that is dead and one that hangs.
func TestSentinelsThatDoNotAnswer(t *testing.T) {
	t.Parallel()
	set := redistest.StartSentinel(t, nil)
	set.Sentinels[0].Kill()
	set.Sentinels[1].Pause()
	s := openWithout(t, set.URL())
	expect(t, s, "set", "OK", "set", "k", "v")

	// If no sentinel answers, Open waits for all of them.
	set.Sentinels[2].Pause()
	time.AfterFunc(1500*time.Millisecond, func() { set.Sentinels[1].Resume(); set.Sentinels[2].Resume() })
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	s = await.Value(Open(ctx, set.URL(), nil))
	s.Close()
}

// openWithout opens a set in which a server hangs, by a context that does not end soon.
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
		await.Must(t, err)
	case <-time.After(time.Minute):
		t.Fatal("Open waits for a server that hangs")
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// Open passes over one master of a cluster that hangs.
func TestNodesThatDoNotAnswer(t *testing.T) {
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
	away.Resume()
	expect(t, s, "set", "OK", "set", "k", "v")

	// Open refuses a cluster of which one master may evict keys.
	rdb := away.Client()
	rdb.ConfigSet(t.Context(), "maxmemory-policy", "allkeys-lru")
	rdb.ConfigSet(t.Context(), "maxmemory", "100mb")
	if _, err := open(t, set.URL(), nil); err == nil || !strings.Contains(err.Error(), away.Addr+": it may evict") {
		t.Errorf("a master that may evict: %v", err)
	}

	// If the URL or a client names the server alone, the error names the URL of the cluster.
	_, byURL := open(t, away.URL(), map[string]string{"allow_eviction": "true"})
	one := New(rdb)
	one.mayEvict = true
	_, byClient := one.Do(t.Context(), "get", key)
	for _, err := range []error{byURL, byClient} {
		if err == nil || !strings.Contains(err.Error(), "redis-cluster://") {
			t.Errorf("got %v", err)
		}
	}
}

// Close ends all goroutines of a topology, also while it searches for servers that do not answer.
func TestCloseLeavesNothing(t *testing.T) {
	for _, url := range []string{"redis-sentinel://%s/m", "redis-cluster://%s"} {
		for _, hung := range []bool{true, false} {
			addr := deadPort
			if hung {
				addr = redistest.Serve(t, hang)
			}
			s, _ := prepared(t, fmt.Sprintf(url, addr), nil, 0)
			waits := make(chan error)
			go func() { _, err := s.Do(t.Context(), "get", "k"); waits <- err }()
			until(t, "a search", func() bool { return !hung || running() })
			returns(t, url, func() { s.Close() })
			returns(t, url+": a caller that waits", func() {
				if err := <-waits; err == nil {
					t.Error("a server was found")
				}
			})
			until(t, "the end", func() bool { return !running() })
			if _, err := s.Do(t.Context(), "get", "k"); !errors.Is(err, redis.ErrClosed) {
				t.Errorf("%s: after it: got %v", url, err)
			}
		}
	}
}

// running reports whether a goroutine of a topology exists.
func running() bool {
	buf := make([]byte, 1<<20)
	stacks := string(buf[:runtime.Stack(buf, true)])
	return strings.Contains(stacks, "redisstore.(*sentinels)") || strings.Contains(stacks, "redisstore.(*Store).find") ||
		strings.Contains(stacks, "redisstore.(*gather)")
}
