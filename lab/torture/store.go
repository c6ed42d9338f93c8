package main

import (
	"context"
	"errors"
	"fmt"
	"net"
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
	*redistest.Lab // ends the servers
	strategy       string
	what           string   // a description
	urls           []string // by seat
	servers        []*redistest.Server
	admin          []*redis.Client       // by server, without a proxy
	links          [][]*faultproxy.Proxy // by seat, then by server
	texts          map[string][]string   // by operation, how its commands begin
	names          []string              // the keys in the store
	sentinel       *redistest.Sentinel   // or nil
	cluster        *redistest.Cluster    // or nil
	service        *service              // or nil
	dir            string                // of the files, or empty
	skews          bool                  // the clocks of servers can jump
	other          *other                // or nil
}

// Operations that single commands belong to.
const (
	acquire = "acquire"
	renew   = "renew"
	release = "release"
)

// leastNodes is how many servers redlock has by default.
const leastNodes = 3

const redlock, filelock = "redlock", "filelock"

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
func (o *options) openStore(l *redistest.Lab, keys []string) *store {
	s := &store{Lab: l, strategy: o.strategy, names: keys, skews: o.place == onServer && redistest.ClocksCanJump()}
	switch open := others[o.strategy]; {
	case open.start != nil:
		s.other = open.start(l)
		s.what = s.other.what
		s.openWays()
	case o.strategy == filelock:
		s.openFiles()
	case o.strategy == redlock:
		s.openServers(o.nodes)
	case o.place == onServer:
		s.openServers(1)
	case o.place == onService:
		s.openService()
	default:
		s.openSet(o.place)
	}
	return s
}

func (s *store) openFiles() {
	dir, err := os.MkdirTemp("", "torture-")
	s.Check(err)
	s.Cleanup(func() { os.RemoveAll(dir) })
	s.what, s.dir = "files", filepath.Join(dir, "locks")
	s.urls = slices.Repeat([]string{"filelock://" + s.dir}, seats)
}

func (s *store) openServers(n int) {
	for range n {
		s.start()
	}
	s.what = "one Redis"
	if n > 1 {
		s.what = fmt.Sprint(n, " Redis servers")
	}
	s.openWays()
}

// start starts a server.
func (s *store) start(args ...string) *redistest.Server {
	o := &redistest.Options{Own: true, Real: true, Keep: true, Clock: s.skews, Args: args}
	srv := redistest.Start(s.Lab, o)
	s.servers, s.admin = append(s.servers, srv), append(s.admin, srv.Client())
	return srv
}

// openSet starts servers that form one Redis. Clients reach them without proxies.
func (s *store) openSet(place string) {
	o := &redistest.Options{Keep: true, Real: true}
	var url string
	switch place {
	case onSentinel:
		s.what = "a master with Sentinel"
		s.sentinel = redistest.StartSentinel(s.Lab, o)
		s.servers, url = s.sentinel.Servers, s.sentinel.URL()
	case onCluster:
		s.what = "a cluster"
		s.cluster = redistest.StartCluster(s.Lab, o)
		s.servers, url = s.cluster.Servers, s.cluster.URL()
	default:
		s.Fatalf("there is no store %q", place)
	}

	for _, srv := range s.servers {
		rdb := srv.Client()
		s.admin = append(s.admin, rdb)
		if s.cluster != nil {
			// Only the faults make a replica a master. Masters vote for one again only after two
			// timeouts.
			s.Check(rdb.ConfigSet(context.Background(), "cluster-replica-no-failover", "yes").Err())
			s.Check(rdb.ConfigSet(context.Background(), "cluster-node-timeout", "3000").Err())
		}
	}
	s.urls = slices.Repeat([]string{s.strategy + "+" + url}, seats)
}

// openWays makes the links of each client, and learns the commands.
func (s *store) openWays() {
	for range seats {
		url, links := s.way()
		s.urls, s.links = append(s.urls, url), append(s.links, links)
	}
	if s.other != nil {
		// The proxies do not know the commands. They spoil any.
		s.texts = map[string][]string{anyRequest: {""}}
		return
	}
	for try := 1; ; try++ {
		err := s.Do(func() error { s.learn(s.names[0]); return nil })
		if err == nil {
			return
		}
		if try == 5 { // leases of learn expire if the machine stands still
			s.Check(err)
		}
	}
}

// open opens a Client, which the caller closes.
func (s *store) open(ctx context.Context, url string, o *hasp.Options) *hasp.Client {
	c, err := persist(func() (*hasp.Client, error) { return hasp.Open(ctx, url, o) })
	s.Check(err)
	return c
}

// persist calls f again and again while it returns an outage. Nothing disturbs the connections
// of this process, but the machine may stand still for longer than f waits.
func persist[T any](f func() (T, error)) (v T, err error) {
	until(time.Minute, 20*time.Millisecond, func() bool {
		v, err = f()
		return !errors.Is(err, hasp.ErrUnavailable)
	})
	return v, err
}

// way returns a URL of the servers through new proxies.
func (s *store) way() (url string, links []*faultproxy.Proxy) {
	var addrs []string
	for i := range s.direct() {
		p, err := faultproxy.Listen(func() (net.Conn, error) { return net.Dial("tcp", s.direct()[i]) })
		s.Check(err)
		s.Cleanup(p.Close)
		links, addrs = append(links, p), append(addrs, p.Addr())
	}
	return s.urlOf(addrs), links
}

// direct returns the addresses that the links of a client lead to now.
func (s *store) direct() (addrs []string) {
	switch {
	case s.service != nil:
		return []string{s.servers[s.master()].Addr}
	case s.other != nil:
		return s.other.servers
	}
	return s.addrs()
}

// size returns the number of servers.
func (s *store) size() int {
	if s.other != nil {
		return len(s.other.servers)
	}
	return len(s.servers)
}

// addrs returns the addresses of all Redis servers.
func (s *store) addrs() (all []string) {
	for _, srv := range s.servers {
		all = append(all, srv.Addr)
	}
	return all
}

// urlOf returns the URL of servers that are reached at addrs.
func (s *store) urlOf(addrs []string) (url string) {
	if s.other != nil {
		return s.other.url(addrs)
	}
	url = s.strategy + "+redis://" + strings.Join(addrs, ",") + "/0"
	switch n := len(addrs); {
	case s.service != nil:
		url += "?replicas=1"
	case s.strategy == redlock:
		url += "?max_ttl=" + maxTerm.String()
		if n < leastNodes || n%2 == 0 {
			url += "&allow_unsafe_nodes=true"
		}
	}
	return url
}

// learn finds out how the commands of each operation begin.
func (s *store) learn(key string) {
	ctx := context.Background()
	url, links := s.way()
	holder := s.open(ctx, url, &hasp.Options{TTL: maxTerm})
	defer holder.Close()
	waiter := s.open(ctx, url, &hasp.Options{TTL: maxTerm})
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
	for _, opts := range [][]hasp.Option{nil, {hasp.WithFence()}, {hasp.WithShared()}, {hasp.WithShared(), hasp.WithFence()}} {
		lease, err := holder.Lock(ctx, key, opts...)
		if errors.Is(err, errors.ErrUnsupported) {
			continue // the driver has no shared holds
		}
		s.Check(err)
		if lease, err := waiter.Lock(ctx, key, append(opts, hasp.WithMaxWait(50*time.Millisecond))...); err == nil {
			lease.Unlock(ctx)
		}
		note(acquire)
		s.Check(lease.Extend(ctx, time.Second))
		note(renew)
		s.Check(lease.Unlock(ctx))
		time.Sleep(50 * time.Millisecond) // a quorum does not wait for the last server
		note(release)
	}
	s.texts[acquire] = slices.DeleteFunc(s.texts[acquire], func(t string) bool {
		return slices.Contains(s.texts[renew], t) || slices.Contains(s.texts[release], t)
	})
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
		return words[0] + " " + key
	}
	return ""
}

// left lists what clients have left in the store: keys on the servers, without fence counters
// and marks, and channels with subscribers.
func (s *store) left(ctx context.Context) (all []string) {
	switch {
	case s.other != nil:
		all, err := s.other.left(ctx)
		s.Check(err)
		return all
	case s.dir != "":
		return s.filesLeft(ctx)
	}
	for i, rdb := range s.admin {
		keys, err := rdb.Keys(ctx, "*").Result()
		s.Check(err)
		for _, k := range keys {
			if !strings.Contains(k, "}:fence:") && k != "hasp:{redlock}:mark" {
				all = append(all, fmt.Sprintf("key %s on server %d", k, i))
			}
		}
		channels, err := rdb.PubSubChannels(ctx, "*").Result()
		s.Check(err)
		for _, c := range channels {
			if !strings.HasPrefix(c, "__sentinel__") {
				all = append(all, fmt.Sprintf("channel %s on server %d", c, i))
			}
		}
	}
	return all
}

// filesLeft lists the files of keys. The file of a killed holder stays until a
// caller takes the key, so it first locks all keys once and unlocks them.
func (s *store) filesLeft(ctx context.Context) (all []string) {
	c := s.open(ctx, s.urls[0], nil)
	defer c.Close()
	leases, err := hasp.LockAll(ctx, c, s.names)
	s.Check(err)
	s.Check(leases.Unlock(ctx))

	names, err := filepath.Glob(filepath.Join(s.dir, "key-*.lock"))
	s.Check(err)
	for _, name := range names {
		all = append(all, "file "+filepath.Base(name))
	}
	return all
}

// others are the strategies that need neither Redis nor files.
var others = map[string]struct {
	term  time.Duration // of all leases
	start func(*redistest.Lab) *other
}{
	"pglock":   {time.Second, startPostgres},
	"etcdlock": {2 * time.Second, startEtcd}, // the shortest term that etcd grants
}

// other is the store of a strategy of others. Clients reach each of its servers through a
// proxy of their own, which has the faults of links.
type other struct {
	what    string                                  // a description
	servers []string                                // the address of each server
	url     func(addrs []string) string             // of the servers, if clients reach them at addrs
	left    func(context.Context) ([]string, error) // lists what clients have left
	faults  func(all *catalog, losing bool)         // adds the faults of servers
	ready   func() error                            // waits, after each fault, until all servers work; may be nil
}

// anyRequest is an operation: the next bytes of a client, whatever they mean.
const anyRequest = "any request"

// ready waits until all servers work, after a fault.
func (s *store) ready() {
	if s.other != nil && s.other.ready != nil {
		s.Check(s.other.ready())
	}
}
