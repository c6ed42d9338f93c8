// Package redisstore is what the Redis strategies share: finding a server by
// URL, sending a command or a script once, batches, and the names of keys.
//
// Every command of this package is sent at most once, also through a client
// that was handed in and retries by itself: a repeat whose first try was
// carried out would hear "held" from its own token. Repeats are the engine's,
// which knows that it repeats.
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
	*pubsub.Subscriber // its channels

	rdb      redis.UniversalClient // of all of it, whatever its topology
	name     string                // in errors that are no server's
	servers  topology              // who is sent what
	replicas int                   // that must confirm
	secrets  []string              // never appear in an error
	calls    *resp.Calls           // nil for a client that was handed in
	unnamed  atomic.Bool           // connections do not learn which of calls they serve
	close    func() error          // nil for a client that was handed in
	once     sync.Once
	ran      sync.Map // scripts that some server knows: *Script → nil
	wires    wires
	always   bool // who is alone uses a wire, too, which is kept; for tests
}

// topology knows who is to be sent what.
type topology interface {
	// find returns the server that has the slot of a key.
	find(ctx context.Context, key string) (*server, error)

	// follow returns the server that has a key instead of at, if err is how
	// at said so, and whether it is to be told that we were sent.
	follow(at *server, key string, err error) (to *server, asking bool)

	// failed is told of an error of a server: who has what may have changed.
	failed(at *server, err error)
}

// server is one that is sent commands. That of a cluster whose client was
// handed in is all of it.
type server struct {
	rdb  redis.UniversalClient
	addr string
	name string // in errors: "redis host:port"

	callers atomic.Int32                    // who wait for a reply
	lanes   lanes                           // of holds that replicas must confirm
	wire    atomic.Pointer[resp.Wire]       // nil if there is none
	making  atomic.Pointer[context.Context] // ends when one is made, or not; nil if nobody makes one
}

// single is a topology of one.
type single struct{ *server }

func (s single) find(context.Context, string) (*server, error)           { return s.server, nil }
func (s single) follow(*server, string, error) (to *server, asking bool) { return nil, false }
func (s single) failed(*server, error)                                   {}

// New returns a Store over a client that stays its caller's: its settings are
// left as they are, and Close does not close it. It panics if rdb is nil.
func New(rdb redis.UniversalClient) *Store {
	if rdb == nil {
		panic("redisstore: New: client is nil")
	}
	s := &Store{rdb: rdb, name: "redis"}
	if c, ok := rdb.(*redis.Client); ok && c.Options().Addr != "FailoverClient" {
		s.name += " " + c.Options().Addr
	}
	s.servers = single{&server{rdb: rdb, name: s.name}}
	s.subscribe()
	return s
}

// subscribe makes the Subscriber of a Store that has its client.
func (s *Store) subscribe() {
	s.Subscriber = pubsub.New(pubsub.Config{Client: s.rdb, Begin: s.begin, Reload: s.reload, Wrap: s.fail})
}

// reload has the cluster asked again, soon, who has which slot.
func (s *Store) reload(ctx context.Context) {
	if c, ok := s.servers.(*cluster); ok {
		c.look.trouble() // and the client hears of what that finds
		return
	}
	s.rdb.(*redis.ClusterClient).ReloadState(ctx)
}

// Name is what the errors of the Store begin with.
func (s *Store) Name() string { return s.name }

// Close ends all listening, and closes what Open opened.
func (s *Store) Close() error {
	s.Subscriber.Close()
	var err error
	if s.close != nil {
		s.once.Do(func() {
			err = s.close()
			s.wires.close()
		})
	}
	return err
}

// Do sends one command, once, and returns its reply: nil, an int64, a string
// or a []any. Its first argument is the command's name, its second the key, if
// there is one. Errors name the server. If ctx ends, args may still be read
// for a while.
func (s *Store) Do(ctx context.Context, args ...any) (any, error) {
	return s.do(ctx, keyOf(args), args, false)
}

func keyOf(args []any) string {
	if len(args) < 2 {
		return ""
	}
	key, _ := args[1].(string)
	return key
}

// maxHops is how often a command follows the slot that it is for.
const maxHops = 8

// do sends a command, once, to the server that has key. A server that says
// that another one has it has done nothing.
func (s *Store) do(ctx context.Context, key string, args []any, kept bool) (any, error) {
	at, err := s.servers.find(ctx, key)
	if err != nil {
		return nil, s.fail(err)
	}
	asking := false
	for hops := 0; ; hops++ {
		v, short, err := s.sendOne(ctx, at, asking, kept, args)
		if cancelled(ctx, err) {
			return nil, s.failAt(at, ctx.Err())
		}
		to, ask := s.servers.follow(at, key, err)
		if to == nil || hops == maxHops {
			return s.outcome(at, v, err, short)
		}
		at, asking = to, ask
	}
}

// sendOne sends a command together with those of others, if there are any, and
// returns its outcome, and what replicas failed to do.
func (s *Store) sendOne(ctx context.Context, at *server, asking, kept bool, args []any) (v any, short, err error) {
	others := at.callers.Add(1) > 1
	defer at.callers.Add(-1)
	if s.calls != nil && !asking && !isLarge(args) {
		if kept && s.replicas > 0 {
			return s.hold(ctx, at, args)
		}
		if others || s.always {
			if v, err := s.share(ctx, at, args); err != resp.ErrUnsent {
				return v, nil, err
			}
		}
	}
	return s.sendAlone(ctx, at, asking, kept, args)
}

// sendAlone sends a command over a connection of its own.
func (s *Store) sendAlone(ctx context.Context, at *server, asking, kept bool, args []any) (v any, short, err error) {
	within, end := s.begin(ctx)
	defer end()
	cmd := resp.NewCommand(within, args)
	short = s.send(within, at, asking, kept, cmd)
	v, err = cmd.Result()
	return v, short, err
}

// send sends commands to a server, in one piece, and waits for its replicas if
// what the commands do is to be kept by them. The outcomes are in the commands,
// and in the error what the replicas failed to do.
func (s *Store) send(ctx context.Context, at *server, asking, kept bool, cmds ...*resp.Command) error {
	kept = kept && s.replicas > 0
	if len(cmds) == 1 && !asking && !kept {
		resp.Process(ctx, at.rdb, cmds[0])
		return nil
	}
	pipe := at.rdb.Pipeline()
	for _, cmd := range cmds {
		if asking {
			_ = pipe.Process(ctx, resp.NewCommand(ctx, []any{"asking"}))
		}
		_ = pipe.Process(ctx, cmd)
	}
	var wait *resp.Command
	if kept {
		wait = resp.NewCommand(ctx, []any{"wait", s.replicas, patience(ctx)})
		_ = pipe.Process(ctx, wait)
	}
	err := resp.Survive(func() error {
		_, err := pipe.Exec(ctx)
		return err
	})
	for _, cmd := range cmds {
		if err != nil && cmd.Err() == nil && cmd.Val() == nil {
			cmd.SetErr(err) // a hook of the client stopped the batch
		}
	}
	if wait == nil {
		return nil
	}
	return s.confirmed(wait)
}

// result is the outcome of a command that has ended.
func (s *Store) result(at *server, cmd *resp.Command, short error) (any, error) {
	v, err := cmd.Result()
	return s.outcome(at, v, err, short)
}

// outcome is the reply to a command, or its error, or what the replicas failed
// to confirm of what it wrote.
func (s *Store) outcome(at *server, v any, err, short error) (any, error) {
	if errors.Is(err, redis.Nil) {
		v, err = nil, nil
	}
	if err == nil && short != nil && !tookNothing(v) {
		err = short
	}
	if err != nil {
		s.servers.failed(at, err)
		if resp.IsReply(err) && strings.Contains(err.Error(), "READONLY") { // a script's error has it inside
			// The address leads to another master now, or soon will. Its
			// messages do not arrive on the connection to the old one.
			s.Demoted(at.rdb)
		}
		if _, ok := redis.IsMovedError(err); ok && s.servers == (single{at}) {
			err = fmt.Errorf("%w (this is one server of a cluster: redis-cluster://host:port)", err)
		}
		return nil, s.failAt(at, err)
	}
	return v, nil
}

// fail has err name the store, and no password: some servers repeat what they
// were sent and did not understand. Then the cause is not kept either, since
// whoever unwraps it may print it.
func (s *Store) fail(err error) error { return s.named(s.name, err) }

// failAt is fail for an error of one server.
func (s *Store) failAt(at *server, err error) error { return s.named(at.name, err) }

func (s *Store) named(name string, err error) error {
	for _, secret := range s.secrets {
		if tells(err, secret) {
			err = errors.New(strings.ReplaceAll(err.Error(), secret, "***"))
		}
	}
	if name == "" {
		return err // which names somebody itself
	}
	return fmt.Errorf("%s: %w", name, err)
}

// tells reports whether err, or an error that it wraps, says secret.
func tells(err error, secret string) bool {
	if err == nil {
		return false
	}
	if strings.Contains(err.Error(), secret) {
		return true
	}
	switch e := err.(type) {
	case interface{ Unwrap() error }:
		return tells(e.Unwrap(), secret)
	case interface{ Unwrap() []error }:
		return slices.ContainsFunc(e.Unwrap(), func(err error) bool { return tells(err, secret) })
	}
	return false
}

// Unexpected is the error of a reply that no version of Redis gives.
func (s *Store) Unexpected(reply any) error {
	return s.fail(resp.Unexpected(reply, s.secrets...))
}
