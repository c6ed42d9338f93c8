package redisstore

import (
	"context"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// Open connects to the server that a URL names, in one of the forms
//
//	redis://user:password@host:port/db
//	rediss://user:password@host:port/db
//	unix://user:password@/path/to/socket
//
// with Params, asks it once, and returns it. What is wrong with the URL or the
// parameters is backend.ErrInvalid; any other error says what the server or
// the network did, and what may be done about it. No error holds a password.
//
// Calls of the Store are bounded by their contexts.
func Open(ctx context.Context, node string, params map[string]string) (*Store, error) {
	a, err := parse(node)
	if err == nil {
		err = a.setParams(params)
	}
	if err != nil {
		return nil, err
	}
	d, err := newDialer(a, params)
	if err != nil {
		return nil, err
	}
	rdb := redis.NewClient(options(a, d))
	s := &Store{rdb: rdb, node: "redis " + a.addr, secret: a.password, calls: &d.calls, close: func() error {
		d.close()
		return rdb.Close()
	}}
	if err := s.probe(ctx, a, d); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// probe asks the server for what every strategy needs, a script.
func (s *Store) probe(ctx context.Context, a address, d *dialer) error {
	began := time.Now()
	if end, ok := ctx.Deadline(); ok {
		// Part of the time is kept, so that what the dialer has to say comes
		// before the end of ctx, which says nothing.
		d.timeout.Store(int64(time.Until(end) * 4 / 5))
		defer d.timeout.Store(int64(dialTimeout))
	}
	// go-redis does not break off a read when ctx is cancelled.
	defer context.AfterFunc(ctx, func() {
		if context.Cause(ctx) != context.DeadlineExceeded {
			s.Close()
		}
	})()
	cmd := newOnce(ctx, []any{"eval", "return 1", 0})
	_ = s.rdb.Process(ctx, cmd)
	err := cmd.Err()
	switch {
	case err == nil:
		return nil
	case ctx.Err() == context.Canceled:
		return s.fail(context.Cause(ctx))
	}
	return s.fail(explain(err, a, time.Since(began)))
}

// dialTimeout bounds the making of a connection. Whoever waits for it waits
// no longer than the context of the call.
const dialTimeout = 5 * time.Second

// options has go-redis do nothing by itself: no retries, no handshake beyond
// what is needed, no time-outs but those of the contexts.
func options(a address, d *dialer) *redis.Options {
	return &redis.Options{
		Network:               a.network(),
		Addr:                  a.addr,
		Username:              a.user,
		Password:              a.password,
		DB:                    a.db,
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
