package redisstore

import (
	"context"

	"github.com/hasplock/hasp/backend"
)

// This file has the shared holds of spinlock and pubsublock. fairlock writes the same record, so
// readers with these three strategies hold a key together.

// IntentTTL is how long an intent keeps out new readers, unless the writer repeats the intent. It
// is three times as long as the sleep between two attempts of the writer.
const IntentTTL = 3 * backend.SharedRetryEvery

var (
	sharedAcquireScript = NewHold(Source(parts, "sharedacquire"))
	sharedReleaseScript = NewScript(Source(parts, "sharedrelease"))
)

// IntentKey returns the Redis key of the intent on key. A writer that waits for readers stores its
// token under this key.
func IntentKey(key string) string { return DerivedKey("intent", key) }

// AcquireShared makes one attempt to take c.Key shared. fenceTTL is the term of a fence counter in ms.
func (s *Store) AcquireShared(ctx context.Context, c backend.Claim, fenceTTL string) (backend.Grant, error) {
	call := Call{
		Keys: []string{LockKey(c.Key), IntentKey(c.Key)},
		Args: []string{c.Token + Mark + c.Owner, Millis(c.TTL)},
	}
	if c.Fenced {
		// The script makes a fence only if it receives the counter's key.
		call.Keys = append(call.Keys, DerivedKey("fence", c.Key))
		call.Args = append(call.Args, fenceTTL)
	}
	reply, err := s.Run(ctx, sharedAcquireScript, call)
	if err != nil {
		return backend.Grant{}, err
	}
	return s.Granted(reply, c)
}

// ReleaseShared releases a shared hold. If the release is to be published, the last arguments are
// the message, the channel, and the command that publishes.
func (s *Store) ReleaseShared(ctx context.Context, c backend.Claim, publish ...string) error {
	return s.Owned(s.Run(ctx, sharedReleaseScript, Call{
		Keys: []string{LockKey(c.Key)},
		Args: append([]string{c.Token + Mark, c.Owner}, publish...),
	}))
}
