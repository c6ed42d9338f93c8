package redlock

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/go-redsync/redsync/v4"
	"github.com/go-redsync/redsync/v4/redis"
	"github.com/hashicorp/go-multierror"

	"github.com/hasplock/hasp/backend"
)

// An attempt uses a mutex of redsync, which asks all nodes at once, counts votes up to a quorum,
// and checks the rest of the term. Only redsync decides whether an attempt wins. But redsync does
// not know that a quorum has become impossible, that a node must not vote, or that the outcome of a
// call is unknown. So the ballot counts the same votes, and ends an attempt that cannot win.

// redsyncPool stands for a node in one operation of redsync, which calls the function instead of
// sending SET NX. The driver itself sends the command, and handles the outcome even after redsync
// has returned. So the call does not end with redsync's context.
type redsyncPool func() (bool, error)

// redsyncMutex returns redsync's mutex over the nodes. If the attempt fails, the driver ignores
// redsync's releases. It releases the record on a node when the call to that node has ended.
func (a *attempt) redsyncMutex() *redsync.Mutex {
	pools := make([]redis.Pool, len(a.d.nodes))
	for i := range pools {
		if i == a.lead {
			pools[i] = redsyncPool(a.leadVote)
			continue
		}
		// Count the call as work here. redsync may return before the call's goroutine starts, so
		// that Close would not wait for that goroutine.
		a.d.work.Add(1)
		pools[i] = redsyncPool(func() (bool, error) {
			defer a.d.work.Done()
			return a.askNode(i)
		})
	}
	return redsync.New(pools...).NewMutex(a.c.Key,
		redsync.WithExpiry(a.c.TTL),
		redsync.WithTries(1),
		redsync.WithFailFast(true),
		redsync.WithDriftFactor(float64(backend.Drift(a.c.TTL))/float64(a.c.TTL)),
		redsync.WithGenValueFunc(func() (string, error) { return a.record, nil }),
		redsync.WithValue(a.record),
	)
}

// Get returns a connection for one call.
func (p redsyncPool) Get(context.Context) (redis.Conn, error) { return redsyncConn{take: p}, nil }

// redsyncConn stands for one call. It implements the methods of redis.Conn that TryLock uses.
type redsyncConn struct {
	redis.Conn // nil, because redsync calls no other methods
	take       redsyncPool
}

func (c redsyncConn) SetNX(string, string, time.Duration) (bool, error) { return c.take() }

// Eval does nothing. A Mutex that gives up calls Eval to release the key, but the driver itself
// releases the key.
func (redsyncConn) Eval(*redis.Script, ...any) (any, error) { return int64(0), errNotAsked }

func (redsyncConn) Close() error { return nil }

// outage returns the error of a call that has no quorum. It is a *multierror.Error with one error
// for each node that does not vote. Each error names its node. The argument errs contains one
// element for each node, which is nil if the node voted.
func outage(errs []error) error {
	n := len(errs)
	m := &multierror.Error{ErrorFormat: func(errs []error) string {
		lines := []string{fmt.Sprintf("no quorum: %d of %d nodes do not vote", len(errs), n)}
		for _, err := range errs {
			lines = append(lines, err.Error())
		}
		return strings.Join(lines, "\n")
	}}
	for _, err := range errs {
		if err != nil {
			m.Errors = append(m.Errors, err)
		}
	}
	return m
}
