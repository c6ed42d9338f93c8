package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
)

// store contains the servers that store the locks, and the clients' links to these servers.
type store struct {
	*redistest.Lab          // ends the servers
	what           string   // a description
	urls           []string // the URL for the client of each seat
	addrs          []string // the addresses of the servers
	// for each seat, the links of its client to the servers; nil without links
	links [][]*faultproxy.Proxy

	left   func(context.Context) []string // lists what clients have not removed
	faults catalog

	// For Redis:
	servers  []*redistest.Server
	admin    []*redis.Client     // for each server, a client without a proxy
	sentinel *redistest.Sentinel // or nil
	cluster  *redistest.Cluster  // or nil
}

const redlock = "redlock"

// A strategy on one Redis stores its locks in one of these places.
const (
	onServer   = "redis"
	onSentinel = "sentinel"
	onCluster  = "cluster"
)

// shortTerm is the term of all leases. It is short, so that a run has many holds.
const shortTerm = 300 * time.Millisecond

// terms contains the terms of strategies that need longer terms than the other strategies.
var terms = map[string]time.Duration{
	"pglock":   time.Second,
	"etcdlock": 2 * time.Second, // the shortest term that etcd grants
	"nats":     time.Second,
	"s3":       time.Second,
	"mysql":    time.Second,
	"sqlite":   time.Second,
	"kube":     2 * time.Second,
}

// openStore starts the servers of a strategy and the links of the clients.
func (o *options) openStore(l *redistest.Lab) *store {
	s := &store{Lab: l}
	open := caslocks[o.strategy]
	switch {
	case open != nil:
		open(s)
	case o.strategy == "pglock":
		s.openPostgres()
	case o.strategy == "etcdlock":
		s.openEtcd()
	case o.strategy == "filelock":
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

// tempDir returns a directory that is removed at the end of the run.
func tempDir(l *redistest.Lab) string {
	dir, err := os.MkdirTemp("", "torture-")
	l.Check(err)
	l.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func (s *store) openFiles() {
	dir := tempDir(s.Lab)
	s.what = "files"
	s.urls = slices.Repeat([]string{"filelock://" + dir}, seats)
	// a killed holder's file stays until a caller locks the key
	s.left = func(context.Context) []string { return nil }
	s.faults.processes()
}

func (s *store) openServers(strategy string, n int) {
	s.what = fmt.Sprint(n, " Redis")
	for range n {
		s.add(redistest.Start(s.Lab, &redistest.Options{Real: true, Keep: true}))
	}
	s.left = s.keysLeft
	s.faults.redis(n)
	s.openWays(func(addrs []string) string {
		url := strategy + "+redis://" + strings.Join(addrs, ",") + "/0"
		if strategy == redlock {
			url += "?max_ttl=2s&allow_unsafe_nodes=true"
		}
		return url
	})
}

// add adds a Redis to the servers.
func (s *store) add(srv *redistest.Server) {
	s.servers = append(s.servers, srv)
	s.admin = append(s.admin, srv.Client())
	s.addrs = append(s.addrs, srv.Addr)
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
		set = s.sentinel.Servers
		url = s.sentinel.URL()
	case onCluster:
		s.what = "a cluster"
		s.cluster = redistest.StartCluster(s.Lab, o)
		set = s.cluster.Servers
		url = s.cluster.URL()
	default:
		s.Fatalf("there is no store %q", place)
	}

	for i, srv := range set {
		s.add(srv)
		if s.cluster == nil {
			continue
		}
		// Only the faults may promote a replica. The timeout is short, because masters vote again
		// only after two timeouts.
		ctx := context.Background()
		s.Check(s.admin[i].ConfigSet(ctx, "cluster-replica-no-failover", "yes").Err())
		s.Check(s.admin[i].ConfigSet(ctx, "cluster-node-timeout", "3000").Err())
	}

	s.urls = slices.Repeat([]string{strategy + "+" + url}, seats)
	s.left = s.keysLeft
	s.faults.set(s)
}

// openWays opens the links of the clients. Each client has its own proxy for each server. The
// function url returns the URL for a client that reaches the servers at the addresses addrs.
func (s *store) openWays(url func(addrs []string) string) {
	for range seats {
		var links []*faultproxy.Proxy
		var way []string
		for _, addr := range s.addrs {
			p, err := faultproxy.Listen(func() (net.Conn, error) { return net.Dial("tcp", addr) })
			s.Check(err)
			s.Cleanup(p.Close)
			links = append(links, p)
			way = append(way, p.Addr())
		}
		s.links = append(s.links, links)
		s.urls = append(s.urls, url(way))
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
