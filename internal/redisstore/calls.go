package redisstore

import (
	"context"
	"errors"
	"os"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
)

// begin returns the context for one call of the client, which ends with ctx. The
// caller calls end when the call has returned. If the caller of hasp passed the
// client, its connections are not ours, and the context is ctx itself.
func (s *Store) begin(ctx context.Context) (within context.Context, end func()) {
	if s.calls == nil {
		return ctx, func() {}
	}
	return s.calls.Begin(ctx)
}

// cancelled reports whether err is the error of a call that was interrupted
// because ctx was cancelled.
func cancelled(ctx context.Context, err error) bool {
	return err != nil && ctx.Err() == context.Canceled && errors.Is(err, os.ErrDeadlineExceeded)
}

// Ends reports when a call returns at the latest if the server does not answer. It
// assumes that the hooks of a client that the caller passed obey their context. It
// does not assume that of functions that go-redis calls without a context.
func (s *Store) Ends() backend.Ends {
	switch {
	case s.calls != nil && s.unnamed.Load():
		return backend.EndsByDeadline
	case s.calls != nil:
		return backend.EndsPromptly
	}

	rdb, ok := s.rdb.(*redis.Client)
	if !ok {
		return backend.EndsSometime
	}

	o := rdb.Options()
	switch {
	case !o.ContextTimeoutEnabled,
		o.ReadTimeout < 0, o.WriteTimeout < 0, // -2 in the caller's options: go-redis never sets a deadline
		o.Limiter != nil, o.CredentialsProvider != nil, o.StreamingCredentialsProvider != nil:
		return backend.EndsSometime
	}
	return backend.EndsByDeadline
}
