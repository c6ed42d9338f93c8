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
		replicas: a.replicas, mayEvict: a.mayEvict, secrets: a.secrets(), opened: d,
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
		for range mostFlights {
			d.wires = append(d.wires, newWire(*o, asksRun))
		}
		s.namesRun = asksRun
	}
	s.start()
	return s, func(ctx context.Context) error { return s.probe(ctx, a) }, nil
}

// probe checks that the server, or each master of a cluster, runs scripts, because every strategy
// needs them.
func (s *Store) probe(ctx context.Context, a address) error {
	if end, ok := ctx.Deadline(); ok {
		// Let the dialer time out before ctx ends, because only the dialer's error has the cause.
		s.opened.timeout.Store(int64(time.Until(end) * 4 / 5))
		defer s.opened.timeout.Store(int64(dialTimeout))
	}
	began := time.Now()
	if _, err := s.find(ctx, ""); err != nil {
		if ctx.Err() == context.Canceled {
			return s.fail(context.Cause(ctx)) // the cause says why
		}
		return s.fail(diagnose(err, lockHints(a), time.Since(began)))
	}
	servers, err := s.all(ctx)
	if err != nil {
		return s.fail(err)
	}

	answers, errs := askAll(ctx, servers, 0, grace, func(ctx context.Context, at *server) (struct{}, error) {
		began := time.Now()
		err := at.check(ctx)
		switch {
		case err == nil, errors.As(err, new(unfitError)):
		case ctx.Err() == context.Canceled:
			err = s.named(at.label(), context.Cause(ctx))
		default:
			err = s.named(at.label(), diagnose(err, lockHints(a), time.Since(began)))
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
	case <-ctx.Done():
		return resp.NotSent(ctx.Err())
	}
	if at.fit.Load() {
		return nil
	}
	s := at.store
	replies := at.ask(ctx, true, true, []string{"eval", "return 1", "0"}, []string{"info"})
	for i, r := range replies {
		if r.Err != nil && (i == 0 || !resp.IsReply(r.Err)) { // the user may have no right to INFO
			return resp.NotSent(r.Err)
		}
	}
	info, inCluster := replies[1].Value, s.isCluster || InfoField(replies[1].Value, "cluster_enabled") == "1"
	var cluster any
	if inCluster {
		cluster = at.ask(ctx, true, false, []string{"cluster", "info"})[0].Value
	}
	reason := unfit(info, info, cluster, s.mayEvict)
	// A client of one server can use a cluster of one master, which has all slots.
	single := slices.Contains([]string{"", "0", "1"}, InfoField(cluster, "cluster_size"))
	_, knowsOne := s.rdb.(*redis.Client) // a client of the program's own type may know the cluster
	if reason == nil && inCluster && knowsOne && !single {
		reason = resp.ReplyError("it is one server of a cluster (use redis-cluster://host:port, or pass a ClusterClient)")
	}
	if reason != nil {
		return unfitError{resp.NotSent(s.named(at.label(), reason))}
	}
	at.fit.Store(true)
	return nil
}

// unfitError says why a server must not store locks.
type unfitError struct{ error }

func (e unfitError) Unwrap() error { return e.error }

// IsUnfit reports whether err says that a server must not store locks.
func IsUnfit(err error) bool { return errors.As(err, new(unfitError)) }

// dialTimeout is how long a dial or a search may take, except during a probe. A call that waits for
// the connection may end earlier, with its context.
const dialTimeout = 5 * time.Second
