package redisstore

import (
	"context"
	"time"
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
// the servers and runs the script. Prepare is for servers that may be down now and up later. For
// commands, the Store uses at most the given number of connections to each server. Subscriptions
// use one more. Each connection first asks for the run ID of its server.
func Prepare(node string, params map[string]string, connections int) (s *Store, probe func(context.Context) error, err error) {
	return prepare(node, params, connections, true)
}

// NamesRun reports whether the replies of DoAll contain the run ID of the server.
func (s *Store) NamesRun() bool { return s.dialer != nil && s.dialer.asksRun }

func prepare(node string, params map[string]string, connections int, asksRun bool) (s *Store, probe func(context.Context) error, err error) {
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

	d.asksRun = asksRun
	s = &Store{isCluster: a.kind == aCluster, replicas: a.replicas, secrets: a.secrets(), dialer: d}
	var reload func()
	switch a.kind {
	case theSentinels:
		t := newSentinels(a, d)
		s.servers, s.name, reload = t, "redis "+a.master, t.searches.request
	case aCluster:
		t := newCluster(a, d)
		s.servers, s.name, reload = t, "redis cluster", t.searches.request
	default:
		srv := newServer(a, d, a.addrs[0])
		s.servers, s.name = single{srv}, srv.name
	}
	s.subscribe(reload)
	return s, func(ctx context.Context) error { return s.probe(ctx, a) }, nil
}

// probe checks that the server, or each master of a cluster, runs scripts, because every strategy
// needs them.
func (s *Store) probe(ctx context.Context, a address) error {
	if end, ok := ctx.Deadline(); ok {
		// Let the dialer time out before ctx ends, because only the dialer's error has the cause.
		s.dialer.timeout.Store(int64(time.Until(end) * 4 / 5))
		defer s.dialer.timeout.Store(int64(dialTimeout))
	}

	at, err := s.servers.find(ctx, "")
	switch {
	// ctx was cancelled, and its cause says why.
	case ctx.Err() == context.Canceled:
		return s.fail(context.Cause(ctx))
	case err != nil:
		return s.fail(err)
	}

	if c, ok := s.servers.(*cluster); ok {
		return c.probe(ctx, func(ctx context.Context, at *server) error { return s.probeServer(ctx, a, at) })
	}
	return s.probeServer(ctx, a, at)
}

// probeServer runs a script on a server. As many replicas must confirm the script as the parameter
// replicas says. probeServer refuses a replica, a server that may evict keys, and a server whose
// cluster is down.
func (s *Store) probeServer(ctx context.Context, a address, at *server) error {
	began := time.Now()
	commands := [][]string{{"eval", "return 1", "0"}, {"info", "replication"}, {"info", "memory"}}
	if s.isCluster {
		commands = append(commands, []string{"cluster", "info"})
	}
	replies := append(s.pipeline(ctx, at, true, commands...), Reply{})
	err := replies[0].Err
	switch {
	case err == nil:
		if reason := unfit(replies[1].Value, replies[2].Value, replies[3].Value, a.mayEvict); reason != nil {
			return s.named(at.name, reason)
		}
		return nil
	case ctx.Err() == context.Canceled:
		return s.named(at.name, context.Cause(ctx))
	}

	return s.named(at.name, diagnose(err, lockHints(a), time.Since(began)))
}

// dialTimeout is how long a dial or a search may take, except during a probe. A call that waits for
// the connection may end earlier, with its context.
const dialTimeout = 5 * time.Second
