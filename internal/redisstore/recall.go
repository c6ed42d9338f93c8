package redisstore

import (
	"context"

	"github.com/hasplock/hasp/backend"
)

// Recalls is that of [backend.Recaller]. Each Client has a channel of its own. On a cluster the
// channel's slot follows from the Client's ID, because no script publishes on it.
func (s *Store) Recalls(ctx context.Context, id string, f func(key string)) error {
	channel := DerivedKey("recall", id)
	_, err := s.Listen(ctx, channel, channel, func(key string, again bool) {
		if !again { // messages may have been missed, but nobody knows for which keys
			f(key)
		}
	})
	return err
}

// Recall asks the Client that holds key for it, if the holder's token says that the key may linger.
// Record begins with the token. If the user may not publish, or the message is lost, the caller
// waits for the end of the linger.
func (s *Store) Recall(ctx context.Context, record, key string) {
	id, ok := backend.RecallID(record)
	if !ok || !isToken(id) {
		return
	}
	channel, command := DerivedKey("recall", id), "publish"
	if s.Sharded(ctx, channel) {
		command = "spublish"
	}
	_, _ = s.Send(ctx, channel, false, command, channel, key)
}
