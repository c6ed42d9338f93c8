package redisstore

import (
	"context"
	_ "embed"
	"fmt"
	"strconv"
	"time"

	"github.com/hasplock/hasp/backend"
)

// This file has the parts of a driver that strategies on one Redis share.

// FenceSrc is the beginning of a script that draws a fence: it defines nextFence.
//
//go:embed fence.lua
var FenceSrc string

// OpenOne opens the Store of a strategy that has one node.
func OpenOne(ctx context.Context, strategy string, nodes []string, params map[string]string) (*Store, error) {
	if len(nodes) != 1 {
		return nil, fmt.Errorf("%w: %d nodes: want one, as in %s+redis://localhost:6379", backend.ErrInvalid, len(nodes), strategy)
	}
	return Open(ctx, nodes[0], params)
}

// Renew runs sc once for each claim, and passes the results to done, as
// backend.Driver's Renew does. The script extends the hold on its key. Its arguments
// are the claim's token with mark after it, and the term in milliseconds. It returns
// 1, or 0 if the token does not hold the key.
func (s *Store) Renew(ctx context.Context, sc *Script, cs []backend.Claim, mark string, done func(i int, g backend.Grant, err error)) {
	calls := make([]Call, len(cs))
	for i, c := range cs {
		calls[i] = Call{
			Keys: []string{LockKey(c.Key)},
			Args: []any{c.Token + mark, Millis(c.TTL)},
		}
	}

	s.RunEach(ctx, sc, calls, func(i int, reply any, err error) {
		done(i, backend.Grant{}, s.Owned(reply, err))
	})
}

// Inspect runs a script that reports on a key; see [Found]. Its keys are the lock and
// the fence counter.
func (s *Store) Inspect(ctx context.Context, sc *Script, key string) (backend.Status, error) {
	reply, err := s.Run(ctx, sc, Call{Keys: []string{LockKey(key), DerivedKey("fence", key)}})
	if err != nil {
		return backend.Status{}, err
	}
	f, ok := Decode(reply)
	if !ok {
		return backend.Status{}, s.Unexpected(reply)
	}
	return f.Status(), nil
}

// Granted decodes the reply of a script that takes a hold. The reply is one of these:
//
//   - {1, fence} is a grant. The fence is empty if the claim wants none.
//   - {0, PTTL, start of the record} means that the key is held.
//   - {-1} means that the value of the fence counter is not a number that hasp wrote.
func (s *Store) Granted(reply any, c backend.Claim) (backend.Grant, error) {
	switch parts, _ := reply.([]any); {
	case len(parts) == 2 && parts[0] == int64(1):
		fence, ok := parts[1].(string)
		if ok && fence == "" && !c.Fenced {
			return backend.Grant{}, nil
		}
		if n, err := strconv.ParseUint(fence, 10, 64); err == nil && n > 0 && c.Fenced {
			return backend.Grant{Fence: n}, nil
		}
	case len(parts) == 3 && parts[0] == int64(0):
		if found, ok := Decode(append(parts[1:], "")); ok {
			return backend.Grant{}, found.Held()
		}
	case c.Fenced && len(parts) == 1 && parts[0] == int64(-1):
		return backend.Grant{}, NoFence(DerivedKey("fence", c.Key))
	}
	return backend.Grant{}, s.Unexpected(reply)
}

// Owned decodes the reply of a script that returns 1 if its token held the key, and
// 0 if not. Then the error is backend.ErrLost.
func (s *Store) Owned(reply any, err error) error {
	switch {
	case err != nil:
		return err
	case reply == int64(1):
		return nil
	case reply == int64(0):
		return backend.ErrLost
	}
	return s.Unexpected(reply)
}

// NoFence is the error of a fenced Acquire if the value of the fence counter is
// not a number that hasp wrote. hasp never overwrites it.
func NoFence(counter string) error {
	return fmt.Errorf("%w: the value of %q is no fence counter; remove it, so that hasp can begin a new one", backend.ErrInvalid, counter)
}

// FenceTTL parses the parameter fence_ttl. It returns zero if there is none.
func FenceTTL(params map[string]string) (time.Duration, error) {
	text, ok := params["fence_ttl"]
	if !ok {
		return 0, nil
	}
	ttl, err := time.ParseDuration(text)
	if err != nil || ttl < time.Millisecond {
		return 0, fmt.Errorf("%w: parameter fence_ttl=%q: want a positive duration such as 720h", backend.ErrInvalid, text)
	}
	return ttl, nil
}

// DefaultFenceTTL is the default of each strategy's Options.FenceTTL.
const DefaultFenceTTL = 30 * 24 * time.Hour

// CheckFenceTTL returns the value of Options.FenceTTL: the default for zero, and an
// error for less than a millisecond.
func CheckFenceTTL(ttl time.Duration) (time.Duration, error) {
	switch {
	case ttl == 0:
		return DefaultFenceTTL, nil
	case ttl < time.Millisecond:
		return 0, fmt.Errorf("%w: fence_ttl %v is below 1ms", backend.ErrInvalid, ttl)
	}
	return ttl, nil
}
