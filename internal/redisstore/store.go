package redisstore

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore/pubsub"
	"github.com/hasplock/hasp/internal/redisstore/resp"
)

// Store is one Redis: a server, the master that sentinels name, or a cluster. Many goroutines may
// use it at once. A call ends when its context ends.
type Store struct {
	// Subscriber holds the subscriptions of the Store. Store.Close also closes the Subscriber.
	*pubsub.Subscriber

	name        string // the prefix of errors that do not name a single server
	rdb         redis.UniversalClient
	opened      *dialer // nil if the caller of hasp passed the client
	plain       bool    // the client may have hooks, which expect texts as arguments
	isCluster   bool    // keys are in slots, and channels may be in slots
	bySentinels bool
	namesRun    bool     // replies contain the run ID of the server
	mayEvict    bool     // the server may evict keys
	connections int      // how many the client may have to one server, at most maxStale
	replicas    int      // how many replicas must confirm a hold
	secrets     []string // no error may contain these
	hints       hints    // for errors of the check
	ran         sync.Map // scripts that Run sends by their hash: *Script → nil

	one     *server     // nil if the Store is a cluster
	located atomic.Bool // find has found a server of the cluster
	servers sync.Map    // of a cluster: *redis.Client → *server

	closed bool
	mu     sync.Mutex     // makes spawn and Close exclude each other, and guards closed
	wg     sync.WaitGroup // counts the goroutines of spawn
}

// server is one Redis process that commands are sent to, or the master that sentinels name.
type server struct {
	store *Store
	rdb   redis.UniversalClient // sends commands and follows redirections: the client of the Store
	node  redis.UniversalClient // the client of this process only; differs from rdb on a cluster
	addr  string
	name  string // "redis host:port", for errors
	calls gather
	holds gather // for holds that replicas must confirm

	fit      atomic.Bool   // the check has accepted the server
	checking chan struct{} // has room for one caller, who checks the server
}

func (s *Store) newServer(node redis.UniversalClient, addr string) *server {
	at := &server{store: s, rdb: s.rdb, node: node, addr: addr, name: s.name, checking: make(chan struct{}, 1)}
	if s.isCluster {
		at.name = "redis " + addr
	}
	at.calls.at, at.holds.at, at.holds.kept = at, at, true
	return at
}

// label returns the name of the server for errors.
func (at *server) label() string {
	if addr := at.store.master(); addr != "" {
		return "redis " + addr
	}
	return at.name
}

// master returns the address of the master that the sentinels of a URL have named, or "".
func (s *Store) master() string {
	if s.opened == nil || s.opened.sentinels == nil {
		return ""
	}
	return s.opened.sentinels.known()
}

// gather returns the gather for commands. The argument kept is that of Store.Send.
func (at *server) gather(kept bool) *gather {
	if kept && at.store.replicas > 0 {
		return &at.holds
	}
	return &at.calls
}

// find returns the server that has the slot of a key.
func (s *Store) find(ctx context.Context, key string) (*server, error) {
	if s.one != nil {
		return s.one, nil
	}
	cluster := s.rdb.(*redis.ClusterClient)
	if s.located.Load() {
		return s.locate(ctx, cluster, key)
	}
	// The first call of MasterForKey asks servers for the slots, and may last longer than ctx. So let
	// another goroutine call it.
	type found struct {
		at  *server
		err error
	}
	result := make(chan found, 1)
	if !s.spawn(func() {
		within, cancel := context.WithTimeout(context.WithoutCancel(ctx), dialTimeout)
		defer cancel()
		at, err := s.locate(within, cluster, key)
		s.located.Store(s.located.Load() || err == nil)
		result <- found{at, err}
	}) {
		return nil, redis.ErrClosed
	}
	select {
	case r := <-result:
		return r.at, r.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (s *Store) locate(ctx context.Context, cluster *redis.ClusterClient, key string) (*server, error) {
	began := time.Now()
	node, err := cluster.MasterForKey(ctx, key)
	if err != nil {
		return nil, s.explain(ctx, began, err)
	}
	return s.at(node), nil
}

// explain says why no server was found, and what to do, unless ctx was cancelled.
func (s *Store) explain(ctx context.Context, began time.Time, err error) error {
	if ctx.Err() == context.Canceled {
		return err
	}
	return diagnose(err, s.hints, time.Since(began))
}

// at returns the server of a node of the cluster.
func (s *Store) at(node *redis.Client) *server {
	if at, ok := s.servers.Load(node); ok {
		return at.(*server)
	}
	at, _ := s.servers.LoadOrStore(node, s.newServer(node, whole(node.Options().Addr)))
	return at.(*server)
}

// all returns the servers that have keys.
func (s *Store) all(ctx context.Context) ([]*server, error) {
	if s.one != nil {
		return []*server{s.one}, nil
	}
	var mu sync.Mutex
	var all []*server
	began := time.Now()
	err := s.rdb.(*redis.ClusterClient).ForEachMaster(ctx, func(_ context.Context, node *redis.Client) error {
		mu.Lock()
		defer mu.Unlock()
		all = append(all, s.at(node))
		return nil
	})
	switch {
	case err != nil:
		return nil, s.explain(ctx, began, err)
	case len(all) == 0:
		return nil, errors.New("no server has a slot")
	}
	return all, nil
}

// follow returns the server to which a command must be sent again, or nil, and whether ASKING must
// precede the command. The argument at is the server that refused it with err.
func (s *Store) follow(ctx context.Context, at *server, key string, err error) (to *server, asking bool) {
	addr, asking := redis.IsAskError(err)
	if !asking {
		addr, _ = redis.IsMovedError(err)
		s.reload()
	}
	if node, ok := s.opened.nodes.known.Load(marked(redirected(addr, at.addr))); ok {
		return s.at(node.(*redis.Client)), asking
	}
	for range 20 { // until the map of slots is loaded, which has a new node
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return nil, false
		}
		if to, err := s.find(ctx, key); err == nil && to != at {
			return to, false
		}
	}
	return nil, false
}

// reload starts a search for the servers of a cluster, and does not wait.
func (s *Store) reload() {
	if cluster, ok := s.rdb.(*redis.ClusterClient); ok {
		cluster.ReloadState(context.Background())
	}
}

// failed starts a search for the servers if err says that another server may have replaced one.
// go-redis starts one only when a server of a cluster redirects, and once a minute.
func (s *Store) failed(err error) {
	switch {
	case !mayHaveMoved(err):
	case s.isCluster:
		s.reload()
	case s.bySentinels && s.opened != nil:
		s.opened.sentinels.start(pause)
	}
}

// suspect starts a search for the master if a reply is late. If the search began only when the first
// call has failed, many calls that wait could fail before the new master is known.
func (s *Store) suspect() {
	if s.bySentinels && s.opened != nil {
		s.opened.sentinels.start(suspectAfter)
	}
}

// pause is the shortest time between two searches that failures start.
const pause = 100 * time.Millisecond

// mayHaveMoved reports whether another server may have replaced the one that was asked. This is so
// if the reply says it, or if there was no reply and the call was not cancelled.
func mayHaveMoved(err error) bool {
	switch {
	case errors.Is(err, context.Canceled):
		return false
	case resp.IsReadOnly(err):
		return true
	case resp.IsReply(err):
		return slices.ContainsFunc([]string{"MASTERDOWN", "CLUSTERDOWN", "MOVED"}, func(word string) bool {
			return redis.HasErrorPrefix(err, word)
		})
	}
	return true
}

// spawn runs f on a goroutine of its own. Once the Store is being closed, it returns false instead.
func (s *Store) spawn(f func()) bool {
	if !s.begin() {
		return false
	}
	go func() {
		defer s.wg.Done()
		f()
	}()
	return true
}

// begin counts a goroutine in wg. Once the Store is being closed, it returns false instead.
func (s *Store) begin() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	s.wg.Add(1)
	return true
}

// CheckClient refuses a client with which hasp cannot work.
func CheckClient(rdb redis.UniversalClient) error {
	v := reflect.ValueOf(rdb)
	if rdb == nil || v.Kind() == reflect.Pointer && v.IsNil() {
		return fmt.Errorf("%w: client is nil", backend.ErrInvalid)
	}
	if _, ok := rdb.(*redis.Ring); ok {
		return fmt.Errorf("%w: a Ring moves keys to other servers while one is down", backend.ErrInvalid)
	}
	return nil
}

// NewDriver returns the driver that newDriver makes of a Store over rdb. Errors name the strategy.
func NewDriver[D backend.Driver, O any](strategy string, rdb redis.UniversalClient, o *O, newDriver func(*Store, *O) (D, error)) (backend.Driver, error) {
	if err := CheckClient(rdb); err != nil {
		return nil, fmt.Errorf("%s: %w", strategy, err)
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
	s := &Store{name: "redis", rdb: rdb, plain: true, connections: maxHops, hints: clientHints}
	switch c := rdb.(type) {
	case *redis.Client:
		// A client of sentinels has no address, and go-redis reports "FailoverClient" instead.
		if s.bySentinels = c.Options().Addr == "FailoverClient"; !s.bySentinels {
			s.name += " " + c.Options().Addr
		}
		s.secrets = []string{c.Options().Password}
		s.connections = min(max(c.Options().PoolSize, c.Options().PipelinePoolSize), maxStale)
	case *redis.ClusterClient:
		s.isCluster = true
		s.secrets = []string{c.Options().Password}
	}
	s.start()
	return s
}

// start completes a Store whose client is set.
func (s *Store) start() {
	config := pubsub.Config{
		Server: func(ctx context.Context, slotKey string) (redis.UniversalClient, error) {
			at, err := s.find(ctx, slotKey)
			if err != nil {
				return nil, err
			}
			return at.node, nil
		},
		Cluster: s.isCluster,
		Wrap:    s.fail,
	}
	if s.isCluster {
		config.Reload = s.reload
	} else {
		s.one = s.newServer(s.rdb, "")
		if s.opened != nil {
			for _, l := range s.opened.wires {
				s.one.calls.idle = append(s.one.calls.idle, &flight{wire: l})
			}
		}
	}
	s.Subscriber = pubsub.New(config)
}

// Name returns the prefix of the Store's errors.
func (s *Store) Name() string { return s.name }

// Close ends all subscriptions. If Open or Prepare made the Store, Close closes all connections, and
// waits for the calls in progress.
func (s *Store) Close() error {
	// Close the Subscriber before the connections that it uses.
	s.Subscriber.Close()

	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	if s.opened != nil {
		s.opened.close()
		s.rdb.Close()
		s.wg.Wait()
	}
	return nil
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
