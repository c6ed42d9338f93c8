package redlock

import (
	"context"
	"errors"
	"time"

	"github.com/go-redsync/redsync/v4"
	"github.com/go-redsync/redsync/v4/redis"

	"github.com/hasplock/hasp/backend"
)

// pool is a node as redsync sees it, for one operation: redsync calls all nodes
// at once, counts to the quorum and checks what is left of the term. What a
// call is, when it may be sent, and what becomes of it when redsync no longer
// waits, is ours: no call here ends with redsync's context.
type pool struct {
	take func(value string, expiry time.Duration) (bool, error) // SET NX
	give func() (bool, error)                                   // a script that deletes
}

// mutex returns redsync's mutex over pools.
func mutex(c backend.Claim, value string, pools []redis.Pool) *redsync.Mutex {
	return redsync.New(pools...).NewMutex(c.Key,
		redsync.WithExpiry(c.TTL),
		redsync.WithTries(1),
		redsync.WithFailFast(true),
		redsync.WithDriftFactor(float64(backend.Drift(c.TTL))/float64(c.TTL)),
		redsync.WithGenValueFunc(func() (string, error) { return value, nil }),
		redsync.WithValue(value),
	)
}

// Get is called once for each call.
func (p *pool) Get(context.Context) (redis.Conn, error) { return conn{p}, nil }

// conn is one call.
type conn struct{ *pool }

// SetNX takes the key.
func (c conn) SetNX(_, value string, expiry time.Duration) (bool, error) {
	return c.take(value, expiry)
}

// Eval runs the only script that redsync has for a Lock or an Unlock, which
// gives the key back.
func (c conn) Eval(*redis.Script, ...any) (any, error) {
	mine, err := c.give()
	if mine {
		return int64(1), err
	}
	return int64(0), err
}

// Close has nothing to do.
func (conn) Close() error { return nil }

// The rest of redis.Conn is of no use to a Mutex that is locked and unlocked.

// Get is not called.
func (conn) Get(string) (string, error) { return "", errors.ErrUnsupported }

// Set is not called.
func (conn) Set(string, string) (bool, error) { return false, errors.ErrUnsupported }

// ScriptLoad is not called.
func (conn) ScriptLoad(*redis.Script) error { return errors.ErrUnsupported }

// PTTL is not called.
func (conn) PTTL(string) (time.Duration, error) { return 0, errors.ErrUnsupported }
