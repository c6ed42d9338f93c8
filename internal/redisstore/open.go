package redisstore

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/redisstore/resp"
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
func Prepare(node string, params map[string]string, connections int) (s *Store, probe func(context.Context) error, err error) {
	return prepare(node, params, connections, true)
}

// NamesRun reports whether the replies of DoAll contain the run ID of the server.
func (s *Store) NamesRun() bool { return s.namesRun }

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

	s = &Store{
		isCluster: a.kind == aCluster, bySentinels: a.kind == theSentinels,
		replicas: a.replicas, mayEvict: a.mayEvict, secrets: a.secrets(), opened: d, hints: lockHints(a),
	}
	if a.kind == aCluster {
		d.nodes = &nodes{d: d, a: a}
		s.rdb, s.name = d.nodes.client(), "redis cluster"
	} else {
		o := d.options(a)
		s.name = "redis " + o.Addr
		if a.kind == theSentinels {
			d.sentinels = newSentinels(d, a)
			o.Dialer, o.OnConnect = d.sentinels.dialMaster, isMaster
			s.name = "redis " + a.master
		}
		s.rdb = redis.NewClient(o)
		s.connections = o.PoolSize
		for range mostFlights {
			d.wires = append(d.wires, newWire(*o, asksRun))
		}
		s.namesRun = asksRun
	}
	s.start()
	return s, s.probe, nil
}

// probe checks that the server, or each master of a cluster, runs scripts, because every strategy
// needs them.
func (s *Store) probe(ctx context.Context) error {
	if end, ok := ctx.Deadline(); ok {
		// Let the dialer time out before ctx ends, because only the dialer's error has the cause.
		s.opened.timeout.Store(int64(time.Until(end) * 4 / 5))
		defer s.opened.timeout.Store(int64(dialTimeout))
	}
	if _, err := s.find(ctx, ""); err != nil {
		if ctx.Err() == context.Canceled {
			err = context.Cause(ctx) // the cause says why
		}
		return s.fail(err)
	}
	servers, err := s.all(ctx)
	if err != nil {
		return s.fail(err)
	}

	answers, errs := askAll(ctx, servers, 0, grace, func(ctx context.Context, at *server) (struct{}, error) {
		err := s.checked(ctx, at)
		if err != nil && ctx.Err() == context.Canceled {
			err = s.named(at.label(), context.Cause(ctx))
		}
		return struct{}{}, err
	})
	if len(errs) == 0 {
		return nil
	}
	// Masters that do not answer may be missing. But the reply of a master may be an error.
	if err := worst(errs, "masters"); len(answers) == 0 || resp.IsReply(err) {
		return err
	}
	return nil
}

// check refuses a server that must not store locks: a replica, a server that may evict keys, one that
// runs no scripts, and one of a cluster behind a client that knows only this server. Once it has
// accepted the server, it does nothing. It runs before the first command, whether the Store was
// opened by a URL or uses a client that the caller passed. As many replicas must confirm the script
// as the parameter replicas says.
func (at *server) check(ctx context.Context) error {
	if at.fit.Load() {
		return nil
	}
	select {
	case at.checking <- struct{}{}: // one caller checks, and the others wait
		defer func() { <-at.checking }()
	case <-time.After(hedgeAfter): // the check of the other one may wait on a dead connection
	case <-ctx.Done():
		return resp.NotSent(at.calls.noReply())
	}
	if at.fit.Load() {
		return nil
	}
	reason, err := at.fault(ctx)
	switch {
	case err != nil:
		return resp.NotSent(err)
	case reason != nil:
		return unfitError{resp.NotSent(at.store.named(at.label(), reason))}
	}
	at.fit.Store(true)
	return nil
}

// fault returns the reason why the server must not store locks, if there is one.
func (at *server) fault(ctx context.Context) (reason, err error) {
	s := at.store
	replies := at.ask(ctx, true, true, []string{"eval", "return 1", "0"}, []string{"info"})
	for i, r := range replies {
		if r.Err != nil && (i == 0 || !resp.IsReply(r.Err)) { // the user may have no right to INFO
			return nil, r.Err
		}
	}
	info := replies[1].Value
	if !s.isCluster && InfoField(info, "cluster_enabled") != "1" {
		return unfit(info, info, nil, s.mayEvict), nil
	}

	cluster := at.ask(ctx, true, false, []string{"cluster", "info"})[0].Value
	if reason := unfit(info, info, cluster, s.mayEvict); reason != nil {
		return reason, nil
	}
	// A client of one server can use a cluster of one master, which has all slots.
	isSingle := slices.Contains([]string{"", "0", "1"}, InfoField(cluster, "cluster_size"))
	if !s.isCluster && !isSingle {
		return resp.ReplyError("it is one server of a cluster (use redis-cluster://host:port, or pass a *redis.ClusterClient)"), nil
	}
	return nil, nil
}

// unfitError says why a server must not store locks.
type unfitError struct{ error }

func (e unfitError) Unwrap() error { return e.error }

// IsUnfit reports whether err says that a server must not store locks.
func IsUnfit(err error) bool { return errors.As(err, new(unfitError)) }

// dialTimeout is how long a dial or a search may take, except during a probe. A call that waits for
// the connection may end earlier, with its context.
const dialTimeout = 5 * time.Second
