package redisstore

import (
	"context"
	"errors"
	"os"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
)

// begin is calls.begin where the connections are ours.
func (s *Store) begin(ctx context.Context) (context.Context, func()) {
	if s.calls == nil {
		return ctx, func() {}
	}
	return s.calls.Begin(ctx)
}

// cancelled reports whether err is how a call ended that was interrupted since
// its caller went away.
func cancelled(ctx context.Context, err error) bool {
	return err != nil && ctx.Err() == context.Canceled && errors.Is(err, os.ErrDeadlineExceeded)
}

// Ends says when a call returns at the latest if the server does not answer.
// That a hook of a client that was handed in heeds its context is taken for
// granted; what go-redis calls without a context is not.
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
		o.ReadTimeout < 0, o.WriteTimeout < 0, // -2 in the user's options: no deadline is ever set
		o.Limiter != nil, o.CredentialsProvider != nil, o.StreamingCredentialsProvider != nil:
		return backend.EndsSometime
	}
	return backend.EndsByDeadline
}
