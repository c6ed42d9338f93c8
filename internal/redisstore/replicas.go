package redisstore

import (
	"context"
	"fmt"
	"time"

	"github.com/hasplock/hasp/internal/redisstore/resp"
)

// Replicas returns how many replicas must confirm a hold. If another client hands a key over, the
// strategy of the new holder must send a renewal, so that the replicas confirm the hold.
func (s *Store) Replicas() int { return s.replicas }

// tookNothing reports whether a reply means that the command took no hold. For commands with kept
// set, [Store.Send] lists these replies.
func tookNothing(reply any) bool {
	if all, ok := reply.([]any); ok && len(all) > 0 {
		reply = all[0]
	}
	n, ok := reply.(int64)
	return reply == nil || ok && n <= 0
}

// ask sends commands to a server, each once, in one pipeline. If here is true, they go to this process,
// whatever their keys are. If kept is true, the replicas must confirm the commands that took a hold.
// Such a pipeline has a connection of its own, so that it does not wait for others. The method leaves
// other replies and errors unchanged, for Store.outcome.
func (at *server) ask(ctx context.Context, here, kept bool, commands ...[]string) []Reply {
	replies := make([]Reply, len(commands))
	if g := at.gather(kept); g.kept || here && at.store.isCluster {
		g.doApart(ctx, here, replies, commands...)
	} else {
		g.do(ctx, replies, commands...)
	}
	return replies
}

// patience returns how long the server waits for its replicas, in milliseconds. This time is less
// than the time until the deadline, so that the server can still reply that too few have confirmed.
// It is never 0, because a WAIT with a timeout of 0 has no limit.
func patience(deadline time.Time) int64 {
	return max(1, (min(longest, time.Until(deadline)) * 4 / 5).Milliseconds())
}

// unconfirmed checks the reply to WAIT. It returns an error if too few replicas have confirmed. The
// master has the holds, but a failover could lose them.
func (s *Store) unconfirmed(wait Reply) error {
	n, ok := wait.Value.(int64)
	switch {
	case wait.Err != nil:
		return fmt.Errorf("replicas did not confirm: %w", wait.Err)
	case !ok:
		return resp.Unexpected(wait.Value, s.secrets...)
	case n < int64(s.replicas):
		return resp.ReplyError(fmt.Sprintf("%d of %d replicas confirmed in time", n, s.replicas))
	}
	return nil
}
