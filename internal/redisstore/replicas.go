package redisstore

import "time"

// tookNothing reports whether a reply means that the command took no hold. For commands that
// replicas must confirm, [Store.Send] lists these replies.
func tookNothing(reply any) bool {
	if parts, ok := reply.([]any); ok && len(parts) > 0 {
		reply = parts[0]
	}
	n, ok := reply.(int64)
	return reply == nil || ok && n <= 0
}

// patience returns how long the server waits for its replicas, in milliseconds. This time is less
// than the time until the deadline, so that the server can still reply that too few have confirmed.
// It is never 0, because a WAIT with a timeout of 0 has no limit.
func patience(deadline time.Time) int64 {
	return max(1, (min(longest, time.Until(deadline)) * 4 / 5).Milliseconds())
}
