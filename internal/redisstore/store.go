// Package redisstore has the parts that the Redis strategies share: servers that a
// URL names, commands, scripts, batches, and the names of keys.
//
// This package sends each command at most once, even if the caller passed a client
// that retries by itself. If a command was executed and then sent again, the second
// reply would be "held", by the caller's own token. Only the engine repeats a
// command, because the engine knows that it does.
package redisstore

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/redisstore/pubsub"
	"github.com/hasplock/hasp/internal/redisstore/resp"
)

// Store is one Redis: a server, the master that sentinels name, or a cluster.
// It may be used by many goroutines at once.
type Store struct {
	// Subscriber has the subscriptions of the Store. Close closes it.
	*pubsub.Subscriber

	rdb      redis.UniversalClient // the client of the whole Store, whatever its topology
	name     string                // the beginning of errors that are not of one server
	servers  topology
	replicas int         // how many replicas must confirm a hold
	secrets  []string    // no error has these
	ran      sync.Map    // scripts that some server knows: *Script → nil
	wires    wires       // the shared connections
	unnamed  atomic.Bool // connections cannot identify their calls

	// always makes a caller use a wire also if it is the only one, and keeps the
	// wire. It is for tests.
	always bool

	// If the caller of hasp passed the client, these two are nil.
	calls *resp.Calls
	close func() error

	once sync.Once // calls close
}

// topology knows which server has which key.
type topology interface {
	// find returns the server that has the slot of a key.
	find(ctx context.Context, key string) (*server, error)

	// follow reports where to send a command again if err is a redirection by
	// at, and whether ASKING must precede it. If err is no redirection, to is nil.
	follow(at *server, key string, err error) (to *server, asking bool)

	// failed reports an error of a server to the topology, which may search anew.
	failed(at *server, err error)
}

// server is one Redis process that commands are sent to. If the caller passed a
// cluster client, one server stands for the whole cluster.
type server struct {
	rdb  redis.UniversalClient
	addr string
	name string // "redis host:port", for errors

	callers atomic.Int32              // how many callers wait for a reply
	lanes   lanes                     // connections for holds that replicas must confirm
	wire    atomic.Pointer[resp.Wire] // the shared connection; nil if there is none

	// making ends when a caller has made a wire, or has failed, or after a moment.
	// It is nil if no caller makes one.
	making atomic.Pointer[context.Context]
}

// single is the topology of one server.
type single struct{ *server }

func (s single) find(context.Context, string) (*server, error)           { return s.server, nil }
func (s single) follow(*server, string, error) (to *server, asking bool) { return nil, false }
func (s single) failed(*server, error)                                   {}

// New returns a Store that uses a client of the caller. The client keeps its
// settings, and Close does not close it. New panics if rdb is nil.
func New(rdb redis.UniversalClient) *Store {
	if rdb == nil {
		panic("redisstore: New: client is nil")
	}

	s := &Store{rdb: rdb, name: "redis"}

	// If sentinels name the address, go-redis reports a placeholder instead.
	if c, ok := rdb.(*redis.Client); ok && c.Options().Addr != "FailoverClient" {
		s.name += " " + c.Options().Addr
	}

	s.servers = single{&server{rdb: rdb, name: s.name}}
	s.subscribe()
	return s
}

// subscribe makes the Subscriber, once rdb and servers are set.
func (s *Store) subscribe() {
	s.Subscriber = pubsub.New(pubsub.Config{Client: s.rdb, Begin: s.begin, Reload: s.reload, Wrap: s.fail})
}

// reload makes the client of a cluster query soon which server has which slot.
func (s *Store) reload(ctx context.Context) {
	if c, ok := s.servers.(*cluster); ok {
		c.searches.request() // passes the result on to the client
		return
	}
	s.rdb.(*redis.ClusterClient).ReloadState(ctx)
}

// Name returns the beginning of the Store's errors.
func (s *Store) Name() string { return s.name }

// Close ends all subscriptions, and closes the connections of a Store that Open
// or Prepare has made.
func (s *Store) Close() error {
	// Close the Subscriber before the connections that it uses.
	s.Subscriber.Close()

	var err error
	if s.close != nil {
		s.once.Do(func() {
			err = s.close()
			// Only now: the wires end because their connections are closed.
			s.wires.close()
		})
	}
	return err
}

// Do sends one command, once, and returns its reply: nil, an int64, a string
// or a []any. The first argument is the command's name, the second is the key, if
// there is one. Errors name the server. If ctx ends, Do may read args for a moment
// after it has returned.
func (s *Store) Do(ctx context.Context, args ...any) (any, error) {
	return s.do(ctx, keyOf(args), args, false)
}

// keyOf returns the key of a command, or an empty string.
func keyOf(args []any) string {
	if len(args) < 2 {
		return ""
	}
	key, _ := args[1].(string)
	return key
}

// maxHops is how many redirections a command follows.
const maxHops = 8

// do sends a command to the server that has key. It follows redirections, because
// a server that redirects a command has not executed it. If kept is true, replicas
// must confirm the command.
func (s *Store) do(ctx context.Context, key string, args []any, kept bool) (any, error) {
	at, err := s.servers.find(ctx, key)
	if err != nil {
		return nil, s.fail(err)
	}

	asking := false
	for hops := 0; ; hops++ {
		v, short, err := s.sendOne(ctx, at, asking, kept, args)
		// The caller has left, and the outcome is unknown. Do not follow this error
		// to another server.
		if cancelled(ctx, err) {
			return nil, s.failAt(at, ctx.Err())
		}

		to, ask := s.servers.follow(at, key, err)
		// Servers that disagree about a slot may redirect to each other without
		// end.
		if to == nil || hops == maxHops {
			return s.outcome(at, v, err, short)
		}
		at, asking = to, ask
	}
}

// sendOne sends a command over the right connection: a lane, the wire if there are
// other callers, or one of the pool. short is an error if too few replicas have
// confirmed the command.
func (s *Store) sendOne(ctx context.Context, at *server, asking, kept bool, args []any) (v any, short, err error) {
	others := at.callers.Add(1) > 1
	defer at.callers.Add(-1)

	// ASKING counts for the next command on its connection only. So a command after it
	// needs a connection of its own.
	if s.calls != nil && !asking && !isLarge(args) {
		if kept && s.replicas > 0 {
			return s.hold(ctx, at, args)
		}
		if others || s.always {
			// ErrUnsent means that nothing was sent, so the command may travel over
			// the pool.
			if v, err := s.share(ctx, at, args); err != resp.ErrUnsent {
				return v, nil, err
			}
		}
	}
	return s.sendAlone(ctx, at, asking, kept, args)
}

// sendAlone sends a command over a connection of the pool.
func (s *Store) sendAlone(ctx context.Context, at *server, asking, kept bool, args []any) (v any, short, err error) {
	within, end := s.begin(ctx)
	defer end()
	cmd := resp.NewCommand(within, args)

	short = s.send(within, at, asking, kept, cmd)
	v, err = cmd.Result()
	return v, short, err
}

// send sends commands to a server in one pipeline. If kept is true, it also waits
// for the replicas, and returns an error if too few have confirmed. The commands
// have their own replies and errors.
func (s *Store) send(ctx context.Context, at *server, asking, kept bool, cmds ...*resp.Command) error {
	kept = kept && s.replicas > 0
	if len(cmds) == 1 && !asking && !kept {
		resp.Process(ctx, at.rdb, cmds[0])
		return nil
	}

	pipe := at.rdb.Pipeline()
	// Process only queues a command here, so its error does not matter. Exec sets the
	// errors.
	for _, cmd := range cmds {
		if asking {
			_ = pipe.Process(ctx, resp.NewCommand(ctx, []any{"asking"}))
		}
		_ = pipe.Process(ctx, cmd)
	}

	var wait *resp.Command
	if kept {
		// WAIT must travel in the same pipeline, because it covers only writes of
		// its own connection.
		wait = resp.NewCommand(ctx, []any{"wait", s.replicas, patience(ctx)})
		_ = pipe.Process(ctx, wait)
	}

	err := resp.Survive(func() error {
		_, err := pipe.Exec(ctx)
		return err
	})
	for _, cmd := range cmds {
		if err != nil && cmd.Err() == nil && cmd.Val() == nil {
			cmd.SetErr(err) // a hook of the client has stopped the pipeline
		}
	}

	if wait == nil {
		return nil
	}
	return s.confirmed(wait)
}

// result returns the reply to a command that has ended, or its error; see outcome.
func (s *Store) result(at *server, cmd *resp.Command, short error) (any, error) {
	v, err := cmd.Result()
	return s.outcome(at, v, err, short)
}

// outcome returns the reply v to a command, or its error err. If the command took a
// hold and too few replicas confirmed it, outcome returns short. The topology and
// the Subscriber learn of the error.
func (s *Store) outcome(at *server, v any, err, short error) (any, error) {
	if errors.Is(err, redis.Nil) {
		v, err = nil, nil
	}
	if err == nil && short != nil && !tookNothing(v) {
		// The master has the hold, but a failover could lose it.
		err = short
	}

	if err != nil {
		s.servers.failed(at, err)
		if resp.IsReply(err) && strings.Contains(err.Error(), "READONLY") { // in the middle of a script's error
			// The address leads to another master now, or soon will. The new
			// master's messages do not arrive on the connection to the old one.
			s.Demoted(at.rdb)
		}

		if _, ok := redis.IsMovedError(err); ok && s.servers == (single{at}) {
			err = fmt.Errorf("%w (this is one server of a cluster: redis-cluster://host:port)", err)
		}
		return nil, s.failAt(at, err)
	}
	return v, nil
}

// fail adds the name of the Store to an error.
func (s *Store) fail(err error) error { return s.named(s.name, err) }

// failAt adds the name of a server to an error.
func (s *Store) failAt(at *server, err error) error { return s.named(at.name, err) }

// named adds a name to an error, and removes passwords: some servers repeat a
// command that they do not understand. If the error has a password, its cause is
// dropped, because a program may unwrap and print it.
func (s *Store) named(name string, err error) error {
	for _, secret := range s.secrets {
		if reveals(err, secret) {
			err = errors.New(strings.ReplaceAll(err.Error(), secret, "***"))
		}
	}

	if name == "" {
		return err // has a name already
	}
	return fmt.Errorf("%s: %w", name, err)
}

// reveals reports whether err, or an error that it wraps, has secret in its text.
func reveals(err error, secret string) bool {
	if err == nil {
		return false
	}
	if strings.Contains(err.Error(), secret) {
		return true
	}
	switch e := err.(type) {
	case interface{ Unwrap() error }:
		return reveals(e.Unwrap(), secret)
	case interface{ Unwrap() []error }:
		return slices.ContainsFunc(e.Unwrap(), func(err error) bool { return reveals(err, secret) })
	}
	return false
}

// Unexpected returns the error for a reply that no version of Redis gives.
func (s *Store) Unexpected(reply any) error {
	return s.fail(resp.Unexpected(reply, s.secrets...))
}
