package redisstore

import (
	"context"
	_ "embed"
	"time"

	"github.com/hasplock/hasp/backend"
)

// This file has the shared holds of spinlock and pubsublock. fairlock writes the same
// record, so readers of the three hold a key together. redlock writes it to each node.

// IntentTTL is how long an intent keeps new shared holds away, unless the caller that waits repeats
// the intent. It is three times as long as that caller sleeps between attempts.
const IntentTTL = 3 * backend.SharedRetryEvery

// SharedSrc is the beginning of a script that may find a shared record.
//
//go:embed shared.lua
var SharedSrc string

// LookSrc is the beginning of a script that reports on a key: it defines look.
//
//go:embed look.lua
var LookSrc string

// InspectSrc is a script that reports on a key whose record is a string; see [Found].
//
//go:embed inspect.lua
var InspectSrc string

var (
	//go:embed sharedacquire.lua
	sharedAcquireSrc string
	//go:embed sharedrenew.lua
	sharedRenewSrc string
	//go:embed sharedrelease.lua
	sharedReleaseSrc string

	sharedAcquireScript = NewHold(SharedSrc + FenceSrc + sharedAcquireSrc)
	sharedRenewScript   = NewHold(SharedSrc + sharedRenewSrc)
	sharedReleaseScript = NewScript(SharedSrc + sharedReleaseSrc)
)

// IntentKey returns the Redis key of the intent on key: the record of a caller that waits until key
// has no shared hold. Its value is the caller's token.
func IntentKey(key string) string { return DerivedKey("intent", key) }

// AcquireShared makes one attempt to take c.Key shared.
func (s *Store) AcquireShared(ctx context.Context, c backend.Claim, fenceTTL time.Duration) (backend.Grant, error) {
	call := Call{
		Keys: []string{LockKey(c.Key), IntentKey(c.Key)},
		Args: []any{c.Token + Mark + c.Owner, Millis(c.TTL)},
	}
	if c.Fenced {
		// The script makes a fence only if it receives the counter's key.
		call.Keys = append(call.Keys, DerivedKey("fence", c.Key))
		call.Args = append(call.Args, Millis(fenceTTL))
	}
	reply, err := s.Run(ctx, sharedAcquireScript, call)
	if err != nil {
		return backend.Grant{}, err
	}
	return s.Granted(ctx, reply, c)
}

// ReleaseShared releases a shared hold. If the release is to be published, publish is the message,
// the channel, and the command that publishes. Otherwise it is empty.
func (s *Store) ReleaseShared(ctx context.Context, c backend.Claim, publish ...any) error {
	return s.Owned(s.Run(ctx, sharedReleaseScript, Call{
		Keys: []string{LockKey(c.Key)},
		Args: append([]any{c.Token + Mark, c.Owner}, publish...),
	}))
}
