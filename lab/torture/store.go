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

// store contains the servers that store the locks, and the clients' links to these servers.
type store struct {
	*redistest.Lab                       // ends the servers
	what           string                // a description
	urls           []string              // the URL for the client of each seat
	names          []string              // the names of the keys in the store
	addrs          []string              // the addresses of the servers
	links          [][]*faultproxy.Proxy // for each seat, the links of its client to the servers; nil without links

	left   func(context.Context) []string  // lists what clients have not removed; its context ends after the time patience
	faults func(all *catalog, losing bool) // adds the faults that take locks away if losing is true, and otherwise the other faults
	ready  func() error                    // waits, after each fault, until all servers work; may be nil

	// For Redis:
	servers  []*redistest.Server
	admin    []*redis.Client     // for each server, a client without a proxy
	sentinel *redistest.Sentinel // or nil
	cluster  *redistest.Cluster  // or nil
}

// leastNodes is how many servers redlock has by default.
const leastNodes = 3

const redlock, filelock = "redlock", "filelock"

// maxTerm is redlock's max_ttl.
const maxTerm = 2 * time.Second

// A strategy on one Redis stores its locks in one of these places.
const (
	onServer   = "redis"
	onSentinel = "sentinel"
	onCluster  = "cluster"
)

// terms contains the terms of strategies that need longer terms than the other strategies.
var terms = map[string]time.Duration{
	"pglock":   time.Second,
	"etcdlock": 2 * time.Second, // the shortest term that etcd grants
}

// openStore starts the servers of a strategy and the links of the clients.
func (o *options) openStore(l *redistest.Lab, keys []string) *store {
	s := &store{Lab: l, names: keys}
	switch {
	case o.strategy == "pglock":
		s.openPostgres()
	case o.strategy == "etcdlock":
		s.openEtcd()
	case o.strategy == filelock:
		s.openFiles()
	case o.strategy == redlock:
		s.openServers(redlock, o.nodes)
	case o.place == onServer:
		s.openServers(o.strategy, 1)
	default:
		s.openSet(o.strategy, o.place)
	}
	return s
}

func (s *store) openFiles() {
	dir, err := os.MkdirTemp("", "torture-")
	s.Check(err)
	s.Cleanup(func() { os.RemoveAll(dir) })
	dir = filepath.Join(dir, "locks")
	s.what, s.urls = "files", slices.Repeat([]string{"filelock://" + dir}, seats)
	s.left = func(ctx context.Context) []string { return s.filesLeft(ctx, dir) }
	s.faults = func(all *catalog, losing bool) {
		if !losing {
			all.processes()
		}
	}
}

func (s *store) openServers(strategy string, n int) {
	s.what = "one Redis"
	if n > 1 {
		s.what = fmt.Sprint(n, " Redis servers")
	}
	for range n {
		s.add(redistest.Start(s.Lab, &redistest.Options{Own: true, Real: true, Keep: true}))
	}
	s.left, s.faults = s.keysLeft, func(all *catalog, losing bool) { all.servers(n, losing) }
	s.openWays(func(addrs []string) string {
		url := strategy + "+redis://" + strings.Join(addrs, ",") + "/0"
		if strategy == redlock {
			url += "?max_ttl=" + maxTerm.String()
			if n < leastNodes || n%2 == 0 {
				url += "&allow_unsafe_nodes=true"
			}
		}
		return url
	})
}

// add adds a Redis to the servers.
func (s *store) add(srv *redistest.Server) {
	s.servers, s.admin, s.addrs = append(s.servers, srv), append(s.admin, srv.Client()), append(s.addrs, srv.Addr)
}

// openSet starts servers that form one Redis. Clients reach these servers without proxies.
func (s *store) openSet(strategy, place string) {
	o := &redistest.Options{Keep: true, Real: true}
	var set []*redistest.Server
	var url string
	switch place {
	case onSentinel:
		s.what = "a master with Sentinel"
		s.sentinel = redistest.StartSentinel(s.Lab, o)
		set, url = s.sentinel.Servers, s.sentinel.URL()
	case onCluster:
		s.what = "a cluster"
		s.cluster = redistest.StartCluster(s.Lab, o)
		set, url = s.cluster.Servers, s.cluster.URL()
	default:
		s.Fatalf("there is no store %q", place)
	}

	for i, srv := range set {
		s.add(srv)
		if s.cluster != nil {
			// Only the faults may promote a replica. The timeout is short, because masters vote
			// again only after two timeouts.
			s.Check(s.admin[i].ConfigSet(context.Background(), "cluster-replica-no-failover", "yes").Err())
			s.Check(s.admin[i].ConfigSet(context.Background(), "cluster-node-timeout", "3000").Err())
		}
	}
	s.urls = slices.Repeat([]string{strategy + "+" + url}, seats)
	s.left, s.faults = s.keysLeft, func(all *catalog, losing bool) { all.set(s, losing) }
}

// openWays opens the links of the clients. Each client has its own proxy for each server. The
// function url returns the URL for a client that reaches the servers at the addresses addrs.
func (s *store) openWays(url func(addrs []string) string) {
	for range seats {
		var links []*faultproxy.Proxy
		var addrs []string
		for _, addr := range s.addrs {
			p, err := faultproxy.Listen(func() (net.Conn, error) { return net.Dial("tcp", addr) })
			s.Check(err)
			s.Cleanup(p.Close)
			links, addrs = append(links, p), append(addrs, p.Addr())
		}
		s.urls, s.links = append(s.urls, url(addrs)), append(s.links, links)
	}
}

// keysLeft lists the channels with subscribers on the Redis servers, and the keys except fence
// counters and marks.
func (s *store) keysLeft(ctx context.Context) (all []string) {
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

// filesLeft lists the files of keys. The file of a killed holder stays until a caller locks the
// key. So filesLeft first locks and unlocks all keys once.
func (s *store) filesLeft(ctx context.Context, dir string) (all []string) {
	c, err := hasp.Open(ctx, s.urls[0], nil)
	s.Check(err)
	defer c.Close()
	leases, err := hasp.LockAll(ctx, c, s.names)
	s.Check(err)
	s.Check(leases.Unlock(ctx))

	names, err := filepath.Glob(filepath.Join(dir, "key-*.lock"))
	s.Check(err)
	for _, name := range names {
		all = append(all, "file "+filepath.Base(name))
	}
	return all
}
