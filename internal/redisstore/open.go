package redisstore

import (
	"context"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/hasplock/hasp/internal/redisstore/resp"
)

// Open connects to the Redis that a URL names, in one of the forms
//
//	redis://user:password@host:port/db
//	redis-sentinel://user:password@host:port,host:port/master/db
//	redis-cluster://user:password@host:port,host:port
//	unix://user:password@/path/to/socket
//
// or with rediss for TLS, and with Params. It sends one command before it returns.
// If the URL or a parameter is wrong, the error wraps backend.ErrInvalid. Any other
// error has the cause and a hint. No error has a password.
//
// Calls of the Store end with their contexts.
func Open(ctx context.Context, node string, params map[string]string) (*Store, error) {
	s, probe, err := Prepare(node, params, 0)
	if err != nil {
		return nil, err
	}
	if err := probe(ctx); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// Prepare is Open without the command, which probe sends. It is for servers that may
// be down now and up later. The Store makes at most this many connections to each
// server; if connections is zero, go-redis decides.
func Prepare(node string, params map[string]string, connections int) (s *Store, probe func(context.Context) error, err error) {
	a, err := parse(node)
	if err == nil {
		err = a.setParams(params)
	}
	if err != nil {
		return nil, nil, err
	}

	d, err := newDialer(a, params)
	if err != nil {
		return nil, nil, err
	}
	d.pool = connections

	s = &Store{replicas: a.replicas, calls: &d.calls, secrets: a.secrets()}
	var closeTopology func()
	switch a.kind {
	case theSentinels:
		t := newSentinels(a, d)
		s.rdb, s.servers, s.name, closeTopology = t.rdb, t, "redis "+a.master, t.close
	case aCluster:
		t := newCluster(a, d)
		s.rdb, s.servers, s.name, closeTopology = t.rdb, t, "redis cluster", t.close
	default:
		srv := newServer(options(a, d, a.addrs[0]))
		s.rdb, s.servers, s.name, closeTopology = srv.rdb, single{srv}, srv.name, func() {}
	}
	s.subscribe()
	s.close = func() error {
		// In this order: the searches end because the dialer is closed, and
		// closeTopology waits for them.
		d.close()
		closeTopology()
		return s.rdb.Close()
	}
	return s, func(ctx context.Context) error { return s.probe(ctx, a, d) }, nil
}

// newServer returns a server without connections.
func newServer(o *redis.Options) *server {
	return &server{rdb: redis.NewClient(o), addr: o.Addr, name: "redis " + o.Addr}
}

// probe runs a script on the server, or on all masters of a cluster: every strategy
// needs scripts.
func (s *Store) probe(ctx context.Context, a address, d *dialer) error {
	if end, ok := ctx.Deadline(); ok {
		// The dialer ends before ctx does: its error has the cause, and the error
		// of ctx has none.
		d.timeout.Store(int64(time.Until(end) * 4 / 5))
		defer d.timeout.Store(int64(dialTimeout))
	}

	at, err := s.servers.find(ctx, "")
	switch {
	// The cause of ctx says more than the error that ctx made the call return.
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

// probeServer runs a script on a server, and has as many replicas confirm it as the
// parameter replicas wants.
func (s *Store) probeServer(ctx context.Context, a address, at *server) error {
	began := time.Now()
	within, end := s.begin(ctx)
	defer end()

	cmd := resp.NewCommand(within, []any{"eval", "return 1", 0})
	short := s.send(within, at, false, true, cmd)
	err := cmd.Err()
	if err == nil {
		err = short
	}

	switch {
	case err == nil:
		if s.calls.Conn(within) == nil {
			s.unnamed.Store(true) // before the first call of Ends
		}
		return nil
	case ctx.Err() == context.Canceled:
		return s.failAt(at, context.Cause(ctx))
	}
	return s.failAt(at, diagnose(err, lockHints(a), time.Since(began)))
}

// dialTimeout is the most that it takes to connect. A call that waits for the
// connection still ends with its context.
const dialTimeout = 5 * time.Second

// bufferSize is the size of each of the two buffers of a connection. go-redis' default
// is 32 KiB, but only batches of renewals are that long. It matters, because a pool
// keeps the connections of its largest burst, and refers to them even when they have
// been closed.
const bufferSize = 4 << 10

// options returns the options for a server. go-redis does nothing by itself: it does
// not retry, it sets up a connection with the fewest commands, and it has no timeouts
// except the contexts. Pipelines use the same pool: a pool of their own would take
// 256 KiB for each connection, and hasp's pipelines are small.
func options(a address, d *dialer, addr string) *redis.Options {
	return &redis.Options{
		Network:               a.network(),
		Addr:                  addr,
		Username:              a.user,
		Password:              a.password,
		DB:                    a.db,
		PoolSize:              d.pool,
		PipelinePoolSize:      -1,
		ReadBufferSize:        bufferSize,
		WriteBufferSize:       bufferSize,
		Dialer:                d.dial,
		DialTimeout:           time.Minute, // the dialer has its own
		DialerRetries:         1,
		MaxRetries:            -1,
		ContextTimeoutEnabled: true,
		ReadTimeout:           -1,
		WriteTimeout:          -1,
		DisableIdentity:       true,
		MaintNotificationsConfig: &maintnotifications.Config{
			Mode: maintnotifications.ModeDisabled,
		},
	}
}
