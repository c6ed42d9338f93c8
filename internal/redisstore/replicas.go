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

// Replicas returns how many replicas must confirm a hold: zero means that
// nobody is asked. A strategy that was handed a hold by another client's
// command has it confirmed by a renewal of its own.
func (s *Store) Replicas() int { return s.replicas }

// tookNothing reports whether a reply says that nothing was taken.
func tookNothing(reply any) bool {
	if all, ok := reply.([]any); ok && len(all) > 0 {
		reply = all[0]
	}
	n, ok := reply.(int64)
	return reply == nil || ok && n <= 0
}

// longest is how long replicas are waited for by a call without a deadline.
const longest = 3 * time.Second

// patience is how long, in milliseconds, the server waits for its replicas: it
// must still be able to say that they failed. Nought would be for ever.
func patience(ctx context.Context) int64 {
	left := longest
	if end, ok := ctx.Deadline(); ok {
		left = min(left, time.Until(end))
	}
	return max(1, (left * 4 / 5).Milliseconds())
}

// confirmed is nil if enough replicas have what the connection wrote.
func (s *Store) confirmed(wait *resp.Command) error {
	n, err := wait.Int64()
	switch {
	case err != nil:
		return fmt.Errorf("replicas did not confirm: %w", err)
	case n < int64(s.replicas):
		return shortfall{n, s.replicas}
	}
	return nil
}

// shortfall is a server's word that fewer replicas than wanted have confirmed.
type shortfall struct {
	got  int64
	want int
}

func (e shortfall) Error() string {
	return fmt.Sprintf("%d of %d replicas confirmed in time", e.got, e.want)
}

// RedisError says, in go-redis' way, that the server is well.
func (shortfall) RedisError() {}
