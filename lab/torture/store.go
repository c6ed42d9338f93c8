package main

import (
	"context"
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

// store is where the locks are, with the links of the clients to it.
type store struct {
	*redistest.Lab // ends the servers
	strategy       string
	what           string   // a description
	urls           []string // the clients' URLs, by seat
	servers        []*redistest.Server
	admin          []*redis.Client       // clients without a proxy, by server
	links          [][]*faultproxy.Proxy // a client's link to a server, by seat and server
	names          []string              // the keys in the store
	sentinel       *redistest.Sentinel   // or nil
	cluster        *redistest.Cluster    // or nil
	dir            string                // the directory of the files, or empty
	other          *other                // or nil
}

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
)

// openStore starts the servers of a strategy and the links of the clients.
func (o *options) openStore(l *redistest.Lab, keys []string) *store {
	s := &store{Lab: l, strategy: o.strategy, names: keys}
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
		srv := redistest.Start(s.Lab, &redistest.Options{Own: true, Real: true, Keep: true})
		s.servers, s.admin = append(s.servers, srv), append(s.admin, srv.Client())
	}
	s.what = "one Redis"
	if n > 1 {
		s.what = fmt.Sprint(n, " Redis servers")
	}
	s.openWays()
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
			// Only the faults make a replica a master. The timeout is short, because masters vote
			// again only after two timeouts.
			s.Check(rdb.ConfigSet(context.Background(), "cluster-replica-no-failover", "yes").Err())
			s.Check(rdb.ConfigSet(context.Background(), "cluster-node-timeout", "3000").Err())
		}
	}
	s.urls = slices.Repeat([]string{s.strategy + "+" + url}, seats)
}

// openWays makes the links of each client: a proxy of its own before each server.
func (s *store) openWays() {
	for range seats {
		var links []*faultproxy.Proxy
		var addrs []string
		for _, addr := range s.direct() {
			p, err := faultproxy.Listen(func() (net.Conn, error) { return net.Dial("tcp", addr) })
			s.Check(err)
			s.Cleanup(p.Close)
			links, addrs = append(links, p), append(addrs, p.Addr())
		}
		s.urls, s.links = append(s.urls, s.urlOf(addrs)), append(s.links, links)
	}
}

// direct returns the addresses that the links of a client lead to.
func (s *store) direct() (addrs []string) {
	if s.other != nil {
		return s.other.servers
	}
	for _, srv := range s.servers {
		addrs = append(addrs, srv.Addr)
	}
	return addrs
}

func (s *store) size() int {
	if s.other != nil {
		return len(s.other.servers)
	}
	return len(s.servers)
}

// urlOf returns the URL for clients that reach the servers at addrs.
func (s *store) urlOf(addrs []string) (url string) {
	if s.other != nil {
		return s.other.url(addrs)
	}
	url = s.strategy + "+redis://" + strings.Join(addrs, ",") + "/0"
	if s.strategy == redlock {
		url += "?max_ttl=" + maxTerm.String()
		if n := len(addrs); n < leastNodes || n%2 == 0 {
			url += "&allow_unsafe_nodes=true"
		}
	}
	return url
}

// left lists what clients have left in the store: keys on the servers, except fence counters and
// marks, and channels with subscribers.
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

// filesLeft lists the files of keys. The file of a killed holder stays until a caller takes the
// key. So filesLeft first locks and unlocks all keys once.
func (s *store) filesLeft(ctx context.Context) (all []string) {
	c, err := hasp.Open(ctx, s.urls[0], nil)
	s.Check(err)
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
	term  time.Duration // the term of all leases
	start func(*redistest.Lab) *other
}{
	"pglock":   {time.Second, startPostgres},
	"etcdlock": {2 * time.Second, startEtcd}, // the shortest term that etcd grants
}

// other is a store that is not a Redis: see others. Each client reaches each server through a proxy
// of its own, which makes the faults of links.
type other struct {
	what    string                                  // a description
	servers []string                                // the address of each server
	url     func(addrs []string) string             // the URL for clients that reach the servers at addrs
	left    func(context.Context) ([]string, error) // lists what clients have left
	faults  func(all *catalog, losing bool)         // adds the faults of servers
	ready   func() error                            // waits, after each fault, until all servers work; may be nil
}

// ready waits until all servers work, after a fault.
func (s *store) ready() {
	if s.other != nil && s.other.ready != nil {
		s.Check(s.other.ready())
	}
}
