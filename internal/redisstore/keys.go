package redisstore

import (
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/redisstore/slot"
)

// ours is the beginning of each key that hasp derives.
const ours = "hasp:{"

// LockKey returns the Redis key of the lock on key, for all strategies. It is key
// itself, so that the strategies exclude each other and other programs. If key could be
// a derived key, such as a fence, LockKey returns a derived name.
func LockKey(key string) string {
	if strings.HasPrefix(key, ours) {
		return DerivedKey("lock", key)
	}
	return key
}

// DerivedKey returns the name of a Redis key that belongs to the lock on key, such as
// its fence. It is in the cluster slot of LockKey(key), whatever bytes key has. No two
// keys or kinds have the same name.
func DerivedKey(kind, key string) string {
	tag := slot.Tag(key)
	var b strings.Builder
	b.Grow(len(ours) + len(tag) + 2 + len(kind) + 1 + len(key))
	b.WriteString(ours)
	b.WriteString(tag)
	b.WriteString("}:")
	b.WriteString(kind)
	b.WriteString(":")
	b.WriteString(key)
	return b.String()
}

// Channel returns the name of a channel of hasp's on which scripts on key can publish.
// On a cluster there is one for each slot.
func (s *Store) Channel(name, key string) string {
	switch s.rdb.(type) {
	case *redis.ClusterClient:
		return ours + slot.Number(slot.Of(LockKey(key))) + "}:" + name
	case *redis.Ring:
		return ours + slot.Tag(LockKey(key)) + "}:" + name
	}
	return "hasp:" + name
}
