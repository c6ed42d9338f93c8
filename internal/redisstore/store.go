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

	"github.com/redis/go-redis/v9"
)

// Store is one Redis: a server, or a cluster through a client that was handed
// in. It may be used by many goroutines at once.
type Store struct {
	rdb    redis.UniversalClient
	node   string       // names the server in errors: "redis host:port"
	secret string       // never appears in an error
	calls  *calls       // nil for a client that was handed in
	close  func() error // nil for a client that was handed in
	once   sync.Once
}

// New returns a Store over a client that stays its caller's: its settings are
// left as they are, and Close does not close it. It panics if rdb is nil.
func New(rdb redis.UniversalClient) *Store {
	if rdb == nil {
		panic("redisstore: New: client is nil")
	}
	s := &Store{rdb: rdb, node: "redis"}
	if c, ok := rdb.(*redis.Client); ok && c.Options().Addr != "FailoverClient" {
		s.node += " " + c.Options().Addr
	}
	return s
}

// Close closes what Open opened.
func (s *Store) Close() error {
	var err error
	if s.close != nil {
		s.once.Do(func() { err = s.close() })
	}
	return err
}

// Do sends one command, once, and returns its reply: nil, an int64, a string
// or a []any. Its first argument is the command's name. Errors name the
// server.
func (s *Store) Do(ctx context.Context, args ...any) (any, error) {
	within, end := s.begin(ctx)
	defer end()
	cmd := newOnce(within, args)
	_ = s.rdb.Process(within, cmd) // the same error as the command's, if it got that far
	if cancelled(ctx, cmd.Err()) {
		return nil, s.fail(ctx.Err())
	}
	return s.result(cmd)
}

// result is the reply of a command that has ended.
func (s *Store) result(cmd *once) (any, error) {
	v, err := cmd.Result()
	switch {
	case err == nil:
		return v, nil
	case errors.Is(err, redis.Nil):
		return nil, nil
	}
	return nil, s.fail(err)
}

// fail has err name the server, and not the password: some servers repeat
// what they were sent and did not understand. Then the cause is not kept
// either, since whoever unwraps it may print it.
func (s *Store) fail(err error) error {
	if s.secret != "" && tells(err, s.secret) {
		err = errors.New(strings.ReplaceAll(err.Error(), s.secret, "***"))
	}
	return fmt.Errorf("%s: %w", s.node, err)
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
	return s.fail(fmt.Errorf("unexpected reply %.100v", reply))
}

// once is a command that go-redis does not repeat, whatever the settings of
// the client: not after a time-out, not in a pipeline, not on a cluster.
type once struct{ *redis.Cmd }

func newOnce(ctx context.Context, args []any) *once {
	return &once{redis.NewCmd(ctx, args...)}
}

// NoRetry is asked by go-redis.
func (*once) NoRetry() bool { return true }

// Clone keeps NoRetry.
func (c *once) Clone() redis.Cmder { return &once{c.Cmd.Clone().(*redis.Cmd)} }
