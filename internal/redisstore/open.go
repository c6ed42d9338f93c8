package redisstore

import (
	"context"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
)

// Open connects to the Redis that a URL names, in one of the forms
//
//	redis://user:password@host:port/db
//	redis-sentinel://user:password@host:port,host:port/master/db
//	redis-cluster://user:password@host:port,host:port
//	unix://user:password@/path/to/socket
//
// or with rediss in place of redis for TLS. The map params contains the strategy's parameters. Open
// uses those in Params. It finds the servers, and runs a script on the server or on each master of
// a cluster. If the URL or a parameter is wrong, the error wraps backend.ErrInvalid. Any other
// error contains the cause, and a hint if there is one. No error contains a password.
func Open(ctx context.Context, node string, params map[string]string) (*Store, error) {
	s, probe, err := prepare(node, params, 0, false)
	if err != nil {
		return nil, err
	}
	if err := probe(ctx); err != nil {
		s.Close()
		return nil, err
	}

	return s, nil
}

// Prepare is Open without a call to a server. The caller must run the function probe, which finds
// the servers and runs the script. Prepare is for servers that may be down now and up later. Each
// reply of DoAll contains the run ID of the server.
func Prepare(node string, params map[string]string,
	connections int) (s *Store, probe func(context.Context) error, err error) {
	return prepare(node, params, connections, true)
}

// prepare makes a Store without a call to a server, and returns its method probe. For connections,
// see newDialer. If asksRun is true, each reply of DoAll contains the run ID of the server, except
// on a cluster.
func prepare(node string, params map[string]string, connections int,
	asksRun bool) (s *Store, probe func(context.Context) error, err error) {
	a, err := parse(node)
	if err == nil {
		err = a.setParams(params)
	}
	if err != nil {
		return nil, nil, err
	}

	d, err := newDialer(a, params, connections)
	if err != nil {
		return nil, nil, err
	}

	o := &settings{
		isCluster: a.kind == aCluster, bySentinels: a.kind == theSentinels,
		replicas: a.replicas, mayEvict: a.mayEvict, secrets: a.secrets(), hints: lockHints(a),
	}

	var rdb redis.UniversalClient
	if a.kind == aCluster {
		d.nodes = &nodes{d: d, a: a}
		rdb = d.nodes.client()
		o.name = "redis cluster"
	} else {
		options := d.options(a, a.addrs...).Simple()
		o.name = "redis " + options.Addr
		if a.kind == theSentinels {
			d.sentinels = newSentinels(d, a)
			options.Dialer = d.sentinels.dialMaster
			options.OnConnect = isMaster
			o.name = "redis " + a.master
		}
		rdb = redis.NewClient(options)
		o.connections = options.PoolSize
		for range mostFlights {
			d.wires = append(d.wires, newWire(*options, asksRun))
		}
		o.namesRun = asksRun
	}

	s = newStore(o, rdb, d)
	return s, s.probe, nil
}

// OpenOne opens the Store of a strategy that has one node.
func OpenOne(ctx context.Context, strategy string, nodes []string,
	params map[string]string) (*Store, error) {
	if len(nodes) != 1 {
		return nil, fmt.Errorf("%w: %d nodes: want one, as in %s+redis://localhost:6379",
			backend.ErrInvalid, len(nodes), strategy)
	}
	return Open(ctx, nodes[0], params)
}

// dialTimeout is how long a dial or a search may take, except during a probe. A call that waits for
// the connection may end earlier, with its context.
const dialTimeout = 5 * time.Second
