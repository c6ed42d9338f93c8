package redisstore

import (
	"context"
	"fmt"
	"time"

	"github.com/hasplock/hasp/internal/redisstore/resp"
)

// Hold is Do for a command that takes a hold; see [NewHold].
func (s *Store) Hold(ctx context.Context, args ...any) (any, error) {
	return s.do(ctx, keyOf(args), args, true)
}

// Replicas returns how many replicas must confirm a hold; zero means none. If another
// client's command has handed a hold to a strategy, the strategy has it confirmed by a
// renewal of its own.
func (s *Store) Replicas() int { return s.replicas }

// tookNothing reports whether a script's reply means that it took nothing; see
// [NewHold].
func tookNothing(reply any) bool {
	if all, ok := reply.([]any); ok && len(all) > 0 {
		reply = all[0]
	}
	n, ok := reply.(int64)
	return reply == nil || ok && n <= 0
}

// longest is how long a call without a deadline waits for replicas.
const longest = 3 * time.Second

// patience returns how long the server waits for its replicas, in milliseconds. It is
// less than the call has left, so that the server can still reply that too few have
// confirmed. It is never zero, because WAIT 0 has no timeout.
func patience(ctx context.Context) int64 {
	left := longest
	if end, ok := ctx.Deadline(); ok {
		left = min(left, time.Until(end))
	}

	return max(1, (left * 4 / 5).Milliseconds())
}

// confirmed returns an error unless enough replicas have confirmed, by the reply to
// WAIT.
func (s *Store) confirmed(wait *resp.Command) error {
	n, err := wait.Int64()
	switch {
	// The reply to the hold may be there. Without the reply to WAIT its safety is
	// unknown.
	case err != nil:
		return fmt.Errorf("replicas did not confirm: %w", err)
	case n < int64(s.replicas):
		return shortfall{n, s.replicas}
	}
	return nil
}

// shortfall reports that too few replicas have confirmed in time.
type shortfall struct {
	got  int64
	want int
}

func (e shortfall) Error() string {
	return fmt.Sprintf("%d of %d replicas confirmed in time", e.got, e.want)
}

// RedisError marks a reply, by go-redis' convention: the server is well.
func (shortfall) RedisError() {}
