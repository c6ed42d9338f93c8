package redlock

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/go-redsync/redsync/v4"
	"github.com/go-redsync/redsync/v4/redis"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/hashicorp/go-multierror"
	goredis9 "github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
)

// An attempt is a mutex of redsync, which asks all nodes at once, counts votes up to a quorum, and
// checks the rest of the term. Only redsync decides whether an attempt wins. But redsync does not
// know that a quorum has become impossible, that a node must not vote, or that the outcome of a
// call is unknown. So the ballot ends an attempt that cannot win.

// redsyncClient stands for a node. In place of the SET NX of redsync, it calls a function, which
// sends the driver's own commands. The function handles the outcome even after redsync has
// returned, so the call does not end with redsync's context.
type redsyncClient struct {
	goredis9.UniversalClient // nil, because TryLock calls no other methods
	vote                     func() error
}

// SetNX returns the node's vote as the reply that redsync expects: true for yes, false for no, or
// an error.
func (c redsyncClient) SetNX(
	context.Context, string, any, time.Duration,
) *goredis9.BoolCmd {
	vote := c.vote()
	if vote == errNo {
		return goredis9.NewBoolResult(false, nil)
	}
	return goredis9.NewBoolResult(vote == nil, vote)
}

// EvalSha does nothing. A mutex that gives up calls it to release the key, but the driver itself
// releases the records, each when the call to its node has ended.
func (c redsyncClient) EvalSha(context.Context, string, []string, ...any) *goredis9.Cmd {
	return goredis9.NewCmdResult(int64(0), errNotAsked)
}

// newMutex returns redsync's mutex over nodes that vote by the given functions. It tries once,
// because the driver itself repeats attempts, and returns as soon as the votes decide.
func newMutex(key, record string, ttl time.Duration, votes []func() error) *redsync.Mutex {
	pools := make([]redis.Pool, len(votes))
	for i, vote := range votes {
		pools[i] = goredis.NewPool(redsyncClient{vote: vote})
	}
	return redsync.New(pools...).NewMutex(key,
		redsync.WithExpiry(ttl),
		redsync.WithTries(1),
		redsync.WithFailFast(true),
		redsync.WithDriftFactor(float64(backend.Drift(ttl))/float64(ttl)),
		redsync.WithGenValueFunc(func() (string, error) { return record, nil }),
	)
}

// outage returns the error of a call that has no quorum, or the warning of Open about single nodes.
// The argument errs contains one element for each node: an error that names the node, or nil if the
// node has voted. The result is a *multierror.Error with the errors of the nodes that have not
// voted. Its text has a hint that several nodes share only once.
func outage(errs []error) error {
	n := len(errs)
	m := &multierror.Error{ErrorFormat: func(failures []error) string {
		lines := []string{fmt.Sprintf("%d of %d nodes did not vote", len(failures), n)}
		if len(failures) > (n-1)/2 {
			lines[0] = "no quorum: " + lines[0]
		}
		last := ""
		for _, err := range failures {
			text, hint, _ := strings.Cut(err.Error(), " (")
			if hint != last {
				text = err.Error()
			}
			last = hint
			lines = append(lines, text)
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
