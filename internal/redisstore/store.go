package redisstore

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore/pubsub"
	"github.com/hasplock/hasp/internal/redisstore/resp"
)

// Store is one Redis: a server, the master that sentinels name, or a cluster. Many goroutines may
// use it at once. A call ends when its context ends, unless the caller of hasp passed the client
// (see Cancellation).
type Store struct {
	// Subscriber holds the subscriptions of the Store. Store.Close also closes the Subscriber.
	*pubsub.Subscriber

	name      string // the prefix of errors that do not name a single server
	servers   topology
	isCluster bool     // keys are in slots, and channels may be in slots
	replicas  int      // how many replicas must confirm a hold
	secrets   []string // no error may contain these
	ran       sync.Map // scripts that Run sends by their hash: *Script → nil
	dialer    *dialer  // nil if the caller of hasp passed the client

	// Only tests set the field always. If it is true, a caller uses a wire even if there is no
	// other caller, and the wire does not end by itself.
	always bool
}

// topology knows which server has which key.
type topology interface {
	// find returns the server that has the slot of a key.
	find(ctx context.Context, key string) (*server, error)

	// The method all returns the servers that have keys.
	all(ctx context.Context) ([]*server, error)

	// follow returns the server to which a command must be sent again, and whether ASKING must
	// precede it. The argument at is the server that returned err. If that server has neither
	// redirected the command nor been closed, the first result is nil.
	follow(at *server, key string, err error) (to *server, asking bool)

	// The method failed reports an error of a server. The topology may then search for the servers.
	failed(at *server, err error)
}

// server is one Redis process that commands are sent to. If the caller passed a
// cluster client, one server stands for the whole cluster.
type server struct {
	resp.Server
	pool *resp.Pool            // nil if the caller passed the client
	rdb  redis.UniversalClient // the client that the caller passed, or nil
	addr string
	name string // "redis host:port", for errors

	callers atomic.Int32              // how many callers wait for a reply
	waits   waitBatch                 // for holds that replicas must confirm
	wire    atomic.Pointer[resp.Wire] // the shared connection; nil if there is none

	// While no caller makes a wire, making is nil. Otherwise this context ends when that caller has
	// made the wire or has failed, at the latest after the duration hesitation.
	making atomic.Pointer[context.Context]

	unused time.Time // when a search first found the server without slots; zero if it has slots; guarded by the cluster's mu
}

// newServer returns a server without connections.
func newServer(a address, d *dialer, addr string) *server {
	return newServerOf(d.pool(a, addr, login(a.user, a.password, a.db)))
}

func newServerOf(p *resp.Pool) *server {
	return &server{Server: p, pool: p, addr: p.Addr, name: "redis " + p.Addr}
}

// process returns the Redis process that has the slot of key. If the server stands for a whole
// cluster, process returns one of the cluster's masters.
func (at *server) process(ctx context.Context, key string) (resp.Server, error) {
	if cluster, ok := at.rdb.(*redis.ClusterClient); ok {
		client, err := cluster.MasterForKey(ctx, key)
		return resp.Passed(client), err
	}
	return at.Server, nil
}

// NewDriver returns the driver that newDriver makes of a Store over rdb. Errors name the strategy.
func NewDriver[D backend.Driver, O any](strategy string, rdb redis.UniversalClient, o *O, newDriver func(*Store, *O) (D, error)) (backend.Driver, error) {
	if rdb == nil {
		return nil, fmt.Errorf("%s: %w: client is nil", strategy, backend.ErrInvalid)
	}
	d, err := newDriver(New(rdb), o)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", strategy, err)
	}
	return d, nil
}

// New returns a Store that uses a client of the caller. The client keeps its settings, and the
// Store's Close does not close the client.
func New(rdb redis.UniversalClient) *Store {
	s := &Store{name: "redis"}
	var reload func()
	switch c := rdb.(type) {
	case *redis.Client:
		// A client of sentinels has no address, and go-redis reports "FailoverClient" instead.
		if c.Options().Addr != "FailoverClient" {
			s.name += " " + c.Options().Addr
		}
		s.secrets = []string{c.Options().Password}
	case *redis.ClusterClient:
		s.isCluster, reload = true, func() { c.ReloadState(context.Background()) }
		s.secrets = []string{c.Options().Password}
	}

	s.servers = single{&server{Server: resp.Passed(rdb), rdb: rdb, name: s.name}}
	s.subscribe(reload)
	return s
}

// subscribe makes the Subscriber. The function reload starts a search for the servers of the
// channels. If channels cannot move to another server, reload is nil.
func (s *Store) subscribe(reload func()) {
	s.Subscriber = pubsub.New(pubsub.Config{
		Server: func(ctx context.Context, slotKey string) (resp.Server, error) {
			at, err := s.servers.find(ctx, slotKey)
			if err != nil {
				return nil, err
			}
			return at.process(ctx, slotKey)
		},
		Cluster: s.isCluster,
		Reload:  reload,
		Wrap:    s.fail,
	})
}

// Name returns the prefix of the Store's errors.
func (s *Store) Name() string { return s.name }

// Close ends all subscriptions. If Open or Prepare made the Store, Close closes all connections.
func (s *Store) Close() error {
	// Close the Subscriber before the connections that it uses.
	s.Subscriber.Close()

	if s.dialer != nil {
		s.dialer.close()
	}
	return nil
}

// Cancellation reports how soon a call ends with its context if the server does not answer. It
// assumes that the hooks of a client that the caller passed obey their contexts. A Limiter, a
// CredentialsProvider or a StreamingCredentialsProvider receives no context, so with one of them a
// call may outlast its context.
func (s *Store) Cancellation() backend.Cancellation {
	if s.dialer != nil {
		return backend.CancelPrompt
	}

	rdb, ok := s.servers.(single).rdb.(*redis.Client)
	if !ok {
		return backend.CancelNone
	}

	o := rdb.Options()
	switch {
	case !o.ContextTimeoutEnabled,
		o.ReadTimeout < 0, o.WriteTimeout < 0, // the caller set -2, so go-redis never sets a deadline
		o.Limiter != nil, o.CredentialsProvider != nil, o.StreamingCredentialsProvider != nil:
		return backend.CancelNone
	}
	return backend.CancelByDeadline
}

// fail adds the name of the Store to an error.
func (s *Store) fail(err error) error { return s.named(s.name, err) }

// The method named adds a name to an error, and hides passwords, because a server's error may
// repeat the command. If err or the reply in it contains a password, the method also drops the
// wrapped errors, which a program could print.
func (s *Store) named(name string, err error) error {
	all := err.Error()
	if reply := redis.Error(nil); errors.As(err, &reply) {
		all += reply.Error() // err may contain only a part of the reply
	}
	if resp.Hide(all, s.secrets...) != all {
		err = errors.New(resp.Hide(err.Error(), s.secrets...))
	}
	return fmt.Errorf("%s: %w", name, err)
}

// Unexpected returns the error for a reply that no version of Redis gives.
func (s *Store) Unexpected(reply any) error { return s.fail(resp.Unexpected(reply, s.secrets...)) }
