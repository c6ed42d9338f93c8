package redlock

import (
	"context"
	"time"

	"github.com/go-redsync/redsync/v4"
	"github.com/go-redsync/redsync/v4/redis"

	"github.com/hasplock/hasp/backend"
)

// redsyncPool is a node as redsync sees it, for one operation: it is the SET NX. Redsync calls
// all nodes at once, counts up to the quorum, and checks the rest of the term. The
// driver decides when a call is sent, and handles its outcome after redsync has
// returned. So no call ends with redsync's context.
type redsyncPool func() (bool, error)

// redsyncMutex returns redsync's mutex over pools.
func redsyncMutex(c backend.Claim, value string, pools []redis.Pool) *redsync.Mutex {
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
func (p redsyncPool) Get(context.Context) (redis.Conn, error) { return redsyncConn{take: p}, nil }

// redsyncConn is one call. It has the methods of redis.Conn that TryLock uses.
type redsyncConn struct {
	redis.Conn // nil: nobody calls the others
	take       redsyncPool
}

func (c redsyncConn) SetNX(string, string, time.Duration) (bool, error) { return c.take() }

// Eval does nothing. A Mutex that gave up would release the key, but the driver does that
// itself.
func (redsyncConn) Eval(*redis.Script, ...any) (any, error) { return int64(0), errNotAsked }

func (redsyncConn) Close() error { return nil }
