package redisstore

import (
	"strings"

	"github.com/hasplock/hasp/internal/redisstore/slot"
)

// The constant ours is the beginning of each key that hasp derives.
const ours = "hasp:{"

// LockKey returns the Redis key of the lock on key, for all strategies. This name is key itself, so
// that the strategies exclude each other and other programs. Only if key begins like a derived key
// does LockKey return a derived name.
func LockKey(key string) string {
	if strings.HasPrefix(key, ours) {
		return DerivedKey("lock", key)
	}
	return key
}

// DerivedKey returns the name of a Redis key that belongs to the lock on key, such as its fence
// counter. The name is in the cluster slot of LockKey(key), whatever bytes key contains. Different
// keys or kinds give different names.
func DerivedKey(kind, key string) string { return ours + slot.Tag(key) + "}:" + kind + ":" + key }

// keyOf returns the key of the lock to which a Redis key belongs. For the lock's own Redis key, the
// result kind is empty. If no key of hasp has this name, ok is false.
func keyOf(name string) (key, kind string, ok bool) {
	rest, derived := strings.CutPrefix(name, ours)
	if !derived {
		return name, "", true
	}
	_, rest, _ = strings.Cut(rest, "}:")
	kind, key, ok = strings.Cut(rest, ":")
	if !ok || DerivedKey(kind, key) != name { // such as a name with a wrong tag
		return "", "", false
	}
	if kind == "lock" { // only some keys have their lock under a derived name
		return key, "", LockKey(key) == name
	}
	return key, kind, true
}

// escaped puts a backslash before each special character of a glob.
var escaped = strings.NewReplacer(`*`, `\*`, `?`, `\?`, `[`, `\[`, `]`, `\]`, `\`, `\\`)

// pattern returns a glob for the Redis keys of locks whose keys begin with prefix, or "" for all.
// The argument queue is Listing.Queue. The glob may also fit other names.
func pattern(prefix, queue string) string {
	switch {
	case prefix == "":
		return ""
	case queue != "" || strings.HasPrefix(prefix, ours):
		// Some of the names are derived, and the key is at the end of a derived name.
		return "*" + escaped.Replace(prefix) + "*"
	}
	return escaped.Replace(prefix) + "*"
}
