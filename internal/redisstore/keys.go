package redisstore

import (
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/redisstore/slot"
)

// ours is how every key begins that hasp makes up.
const ours = "hasp:{"

// LockKey returns the Redis key of the lock on key, for all strategies: key
// itself, so that strategies exclude each other, and other programs too. Only
// a key that looks like one of ours is kept under a derived name, lest a lock
// be taken for a fence.
func LockKey(key string) string {
	if strings.HasPrefix(key, ours) {
		return DerivedKey("lock", key)
	}
	return key
}

// DerivedKey returns the name of what hasp keeps beside the lock on key, such
// as its fence. It is in the cluster slot of LockKey(key), whatever bytes key
// is of. No two keys or kinds have the same name.
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

// Channel is the name of a channel of hasp's own on which scripts that run on
// key can publish. On a cluster there is one for each slot.
func (s *Store) Channel(name, key string) string {
	switch s.rdb.(type) {
	case *redis.ClusterClient:
		return ours + slot.Number(slot.Of(LockKey(key))) + "}:" + name
	case *redis.Ring:
		return ours + slot.Tag(LockKey(key)) + "}:" + name
	}
	return "hasp:" + name
}
