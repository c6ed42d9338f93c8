package redisstore

import (
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/redisstore/slot"
	"github.com/hasplock/hasp/internal/redistest"
)

// odd are keys with braces, and keys that look like derived keys.
var odd = []string{"", "a", "123456789", "{", "}", "{}", "}{", "a{b}c", "a{}b", "{}{a}", "a}b", "a}b{c}d", "{a}b}c", "{{a}}", "{a{b}",
	"a{b", "x}{y", "hasp:{", "hasp:{}", "hasp:{a}:fence:a", "hasp:{a}:lock:a", "hasp:{a", "\x00\r\n", "\U0001f512", "\xff{\xfe}\xfd",
	strings.Repeat("{}", 500), strings.Repeat("}", 1000)}

func TestDerivedKeysShareTheSlotOfTheLock(t *testing.T) {
	for _, key := range append(odd, random(2000)...) {
		lock, fence := LockKey(key), DerivedKey("fence", key)
		if slot.Of(lock) != slot.Of(key) || slot.Of(fence) != slot.Of(key) {
			t.Errorf("%q: slots of %q and %q differ from %d", key, lock, fence, slot.Of(key))
		}
	}
}

// The slots are compared with those that a server reports.
func TestSlotIsThatOfRedis(t *testing.T) {
	rdb := redistest.Start(t, &redistest.Options{Args: []string{"--cluster-enabled", "yes"}}).Client()
	var names []string
	for _, key := range append(odd, random(300)...) {
		names = append(names, key, LockKey(key), DerivedKey("fence", key))
	}
	pipe := rdb.Pipeline()
	want := make([]*redis.IntCmd, len(names))
	for i, name := range names {
		want[i] = pipe.ClusterKeySlot(t.Context(), name)
	}
	if _, err := pipe.Exec(t.Context()); err != nil {
		t.Fatal(err)
	}
	for i, name := range names {
		if got := slot.Of(name); int64(got) != want[i].Val() {
			t.Errorf("%q: slot %d, Redis says %d", name, got, want[i].Val())
		}
	}
}

// The names are a protocol: programs of all versions must agree on them.
func TestNamesNeverChange(t *testing.T) {
	for _, c := range []struct{ key, lock, fence string }{
		{"k", "k", "hasp:{k}:fence:k"}, {"a{b}c", "a{b}c", "hasp:{b}:fence:a{b}c"}, {"a}b", "a}b", "hasp:{20658}:fence:a}b"},
		{"", "", "hasp:{3560}:fence:"}, {"hasp:7", "hasp:7", "hasp:{hasp:7}:fence:hasp:7"}, {"{a}b", "{a}b", "hasp:{a}:fence:{a}b"},
	} {
		if lock, fence := LockKey(c.key), DerivedKey("fence", c.key); lock != c.lock || fence != c.fence {
			t.Errorf("%q: got %q and %q", c.key, lock, fence)
		}
	}
}

// random returns random keys with many braces.
func random(n int) []string {
	r := rand.New(rand.NewPCG(1, 2))
	keys := make([]string, n)
	for i := range keys {
		b := make([]byte, 1+r.IntN(12))
		for j := range b {
			b[j] = "{}ab:\x00\xff"[r.IntN(7)]
		}
		keys[i] = string(b)
	}
	return keys
}

// On a cluster, the channels on which scripts on a key can publish are one for each
// slot.
func TestChannel(t *testing.T) {
	one := New(redis.NewClient(&redis.Options{}))
	if got, want := one.Channel("grant:me", "k{1}"), "hasp:grant:me"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	cluster := New(redis.NewClusterClient(&redis.ClusterOptions{}))
	for _, key := range []string{"k", "{k}a", "a{}b", "a{b", "{}}", "hasp:{1}:x", "}", ""} {
		if got := cluster.Channel("grant:me", key); slot.Of(got) != slot.Of(LockKey(key)) || !strings.HasSuffix(got, "}:grant:me") {
			t.Errorf("key %q: %q is in slot %d, not %d", key, got, slot.Of(got), slot.Of(LockKey(key)))
		}
	}
	if a, b := cluster.Channel("n", "{x}a"), cluster.Channel("n", "{x}b"); a != b {
		t.Errorf("%q and %q for one slot", a, b)
	}
}
