package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
)

// store is the place of the locks, with the links of the clients to it.
type store struct {
	strategy string
	what     string   // a description
	urls     []string // by seat
	servers  []*redistest.Server
	admin    []*redis.Client       // by server, without a proxy
	links    [][]*faultproxy.Proxy // by seat, then by server
	texts    map[string][]string   // by operation, how its commands begin
	names    []string              // the keys
	sentinel *redistest.Sentinel   // or nil
	cluster  *redistest.Cluster    // or nil
	service  *service              // or nil
	ordered  *hasp.Client          // inspects the queue of a strategy that has one
	dir      string                // of the files, or empty
	small    bool                  // dir is on a small disk of its own
	jumps    bool                  // the wall clocks of clients can jump
	skews    bool                  // the clocks of servers can jump
}

// Operations that single commands belong to.
const (
	acquire = "acquire"
	renew   = "renew"
	release = "release"
)

// leastNodes is how many servers redlock has by default.
const leastNodes = 3

const fairlock, redlock, filelock = "fairlock", "redlock", "filelock"

// maxTerm is redlock's max_ttl.
const maxTerm = 2 * time.Second

// Places where strategies on one Redis keep their locks.
const (
	onServer   = "redis"
	onSentinel = "sentinel"
	onCluster  = "cluster"
	onService  = "service"
)

// openStore starts the servers of a strategy and the links of the clients.
func (o *options) openStore(l *redistest.Lab, keys []string) (*store, error) {
	s := &store{strategy: o.strategy, names: keys, jumps: o.program != "", skews: o.place == onServer && redistest.ClocksCanJump()}
	if o.place == onService {
		return s, s.openService(l)
	}
	if o.place != onServer {
		return s, s.openSet(l, o.place, seats)
	}
	if o.strategy == filelock {
		dir, err := os.MkdirTemp("", "torture-")
		if err != nil {
			return nil, err
		}
		l.Cleanup(func() { os.RemoveAll(dir) })
		if unmount, err := mountSmall(dir); err == nil {
			l.Cleanup(func() { _ = unmount() })
			s.small = true
		}
		s.what, s.dir = "files", filepath.Join(dir, "locks")
		for range seats {
			s.urls = append(s.urls, "filelock://"+s.dir)
		}
		return s, nil
	}
	n := 1
	if o.strategy == redlock {
		n = o.nodes
	}
	for range n {
		// Without fsync: what the server has written survives its process.
		srv := redistest.Start(l, &redistest.Options{Own: true, Real: true, Keep: true, Clock: s.skews, Args: []string{"--appendfsync", "no"}})
		s.servers = append(s.servers, srv)
		s.admin = append(s.admin, srv.Client())
	}
	s.what = "one Redis"
	if n > 1 {
		s.what = fmt.Sprint(n, " Redis servers")
	}
	if err := s.openWays(); err != nil {
		return nil, err
	}
	return s, s.openQueue(l, o.strategy+"+"+s.servers[0].URL())
}

// openWays makes the links of each client, and learns the commands.
func (s *store) openWays() error {
	for range seats {
		url, links := s.way()
		s.urls, s.links = append(s.urls, url), append(s.links, links)
	}
	err := s.learn(s.names[0])
	for try := 1; err != nil && try < 5; try++ { // its leases expire if the machine stands still
		err = s.learn(s.names[0])
	}
	return err
}

// openSet starts servers that form one Redis. Clients reach them without proxies.
func (s *store) openSet(l *redistest.Lab, place string, seats int) error {
	if s.strategy == redlock || s.strategy == filelock {
		return fmt.Errorf("%s does not use one Redis", s.strategy)
	}
	o := &redistest.Options{Keep: true, Args: []string{"--appendfsync", "no"}}
	var url string
	switch place {
	case onSentinel:
		s.what = "a master with Sentinel"
		s.sentinel = redistest.StartSentinel(l, o)
		s.servers, url = s.sentinel.Servers, s.sentinel.URL()
	case onCluster:
		s.what = "a cluster"
		s.cluster = redistest.StartCluster(l, o)
		s.servers, url = s.cluster.Servers, s.cluster.URL()
	default:
		return fmt.Errorf("unknown store %q", place)
	}
	url = s.strategy + "+" + url
	for _, srv := range s.servers {
		rdb := srv.Client()
		s.admin = append(s.admin, rdb)
		if s.cluster == nil {
			continue
		}
		// Replicas do not fail over by themselves. The timeout is short because
		// masters vote for another replica only after two timeouts.
		for pair := range slices.Chunk([]string{"cluster-replica-no-failover", "yes", "cluster-node-timeout", "3000"}, 2) {
			if err := rdb.ConfigSet(context.Background(), pair[0], pair[1]).Err(); err != nil {
				return err
			}
		}
	}
	for range seats {
		s.urls = append(s.urls, url)
	}
	return s.openQueue(l, url)
}

// openQueue opens a client that inspects the queue, if the strategy has one.
func (s *store) openQueue(l *redistest.Lab, url string) error {
	if s.strategy != fairlock {
		return nil
	}
	c, err := hasp.Open(context.Background(), url, nil)
	if err != nil {
		return err
	}
	l.Cleanup(func() { c.Close() })
	s.ordered = c
	return nil
}

// way returns a URL of the servers through new proxies.
func (s *store) way() (url string, links []*faultproxy.Proxy) {
	if s.service != nil {
		return s.service.way(s.strategy)
	}
	var addrs []string
	for _, srv := range s.servers {
		p := srv.Proxy()
		links = append(links, p)
		addrs = append(addrs, p.Addr())
	}
	url = s.strategy + "+redis://" + strings.Join(addrs, ",") + "/0"
	if s.strategy == redlock {
		url += "?max_ttl=" + maxTerm.String()
		if n := len(addrs); n < leastNodes || n%2 == 0 {
			url += "&allow_unsafe_nodes=true"
		}
	}
	return url, links
}

// learn finds out how the commands of each operation begin.
func (s *store) learn(key string) error {
	ctx := context.Background()
	url, links := s.way()
	o := &hasp.Options{TTL: maxTerm}
	holder, err := hasp.Open(ctx, url, o)
	if err != nil {
		return err
	}
	defer holder.Close()
	waiter, err := hasp.Open(ctx, url, o)
	if err != nil {
		return err
	}
	defer waiter.Close()
	for _, p := range links {
		defer p.Close()
		p.Commands()
	}
	s.texts = map[string][]string{}
	note := func(op string) {
		for _, p := range links {
			for _, c := range p.Commands() {
				if text := opening(c, key); text != "" && !slices.Contains(s.texts[op], text) {
					s.texts[op] = append(s.texts[op], text)
				}
			}
		}
	}
	for _, o := range []hasp.Option{nil, hasp.WithFence()} {
		lease, err := holder.Lock(ctx, key, o)
		if err != nil {
			return err
		}
		note(acquire)
		if lease, err := waiter.Lock(ctx, key, hasp.WithMaxWait(50*time.Millisecond), o); err == nil {
			lease.Unlock(ctx)
		}
		note(acquire)
		if err := lease.Extend(ctx, time.Second); err != nil {
			return err
		}
		note(renew)
		if err := lease.Unlock(ctx); err != nil {
			return err
		}
		time.Sleep(50 * time.Millisecond) // a quorum does not wait for the last server
		note(release)
	}
	s.texts[acquire] = slices.DeleteFunc(s.texts[acquire], func(t string) bool {
		return slices.Contains(s.texts[renew], t) || slices.Contains(s.texts[release], t)
	})
	return nil
}

// opening returns the text by which a command about key is recognized, or "".
func opening(command, key string) string {
	words := strings.SplitN(command, " ", 3)
	switch {
	case len(words) < 3 || !strings.Contains(command, key):
		return ""
	case words[0] == "evalsha":
		return "evalsha " + words[1]
	case words[0] == "set" && words[1] == key:
		return "set " + key
	}
	return ""
}

// head returns the owner of the first waiter in a key's queue.
func (s *store) head(key string) string {
	status, err := s.ordered.Inspect(context.Background(), key)
	if err != nil || len(status.Waiters) == 0 {
		return ""
	}
	return status.Waiters[0]
}

// left lists what clients have left on the servers: records, and channels with
// subscribers.
func (s *store) left(ctx context.Context) (all []string, err error) {
	if s.dir != "" {
		// The file of a killed holder stays until a caller takes the key.
		if err := s.take(ctx); err != nil {
			return nil, err
		}
		files, err := os.ReadDir(s.dir)
		for _, f := range files {
			if n := f.Name(); strings.HasPrefix(n, "key-") && strings.HasSuffix(n, ".lock") {
				all = append(all, "file "+n)
			}
		}
		return all, err
	}
	if s.ordered != nil {
		s.ordered.Close() // it may have subscriptions
	}
	if all, err = s.records(ctx); err != nil {
		return nil, err
	}
	for i, rdb := range s.admin {
		channels, err := rdb.PubSubChannels(ctx, "*").Result()
		if err != nil {
			return nil, err
		}
		for _, c := range channels {
			if strings.HasPrefix(c, "__sentinel__") {
				continue
			}
			all = append(all, fmt.Sprintf("channel %s on server %d", c, i))
		}
	}
	return all, nil
}

// records lists the keys on the servers, without fence counters and marks.
func (s *store) records(ctx context.Context) (all []string, err error) {
	for i, rdb := range s.admin {
		keys, err := rdb.Keys(ctx, "*").Result()
		if err != nil {
			return nil, err
		}
		for _, k := range keys {
			if !strings.Contains(k, "}:fence:") && k != "hasp:{redlock}:mark" {
				all = append(all, fmt.Sprintf("key %s on server %d", k, i))
			}
		}
	}
	return all, nil
}

// take locks all keys once and unlocks them.
func (s *store) take(ctx context.Context) error {
	c, err := hasp.Open(ctx, s.urls[0], nil)
	if err != nil {
		return err
	}
	defer c.Close()
	all, err := hasp.LockAll(ctx, c, s.names)
	if err != nil {
		return err
	}
	return all.Unlock(ctx)
}
