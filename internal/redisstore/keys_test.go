package redisstore

import (
	"math/rand/v2"
	"path"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redisstore/slot"
	"github.com/hasplock/hasp/internal/redistest"
)

// odd are keys with braces, and keys that look like derived keys.
var odd = append(strings.Fields(`a 123456789 { } {} }{ a{b}c a{}b {}{a} a}b a}b{c}d {a}b}c {{a}}
	{a{b} a{b x}{y k hasp: hasp:{ hasp:{} hasp:{a hasp:{a}:fence:a hasp:{a}:lock:a hasp:{x}:fence:k
	hasp:{x}:lock:k`), "", "\x00\r\n", "\U0001f512", "\xff{\xfe}\xfd",
	strings.Repeat("{}", 500), strings.Repeat("}", 1000))

// The slots are compared with those that a server reports.
func TestSlotIsThatOfRedis(t *testing.T) {
	srv := redistest.Start(t, &redistest.Options{Args: []string{"--cluster-enabled", "yes"}})
	pipe := srv.Client().Pipeline()
	want := map[string]*redis.IntCmd{}
	for _, key := range slices.Concat(odd, random(300)) {
		want[key] = pipe.ClusterKeySlot(t.Context(), key)
	}
	await.Value(pipe.Exec(t.Context()))
	for key, slotOf := range want {
		if got := slot.Of(key); int64(got) != slotOf.Val() {
			t.Errorf("%q: slot %d, Redis says %d", key, got, slotOf.Val())
		}
	}
}

// The names are a protocol: programs of all versions must agree on them.
func TestNamesNeverChange(t *testing.T) {
	for key, fence := range map[string]string{
		"k": "hasp:{k}:fence:k", "a{b}c": "hasp:{b}:fence:a{b}c", "a}b": "hasp:{20658}:fence:a}b",
		"": "hasp:{3560}:fence:", "hasp:7": "hasp:{hasp:7}:fence:hasp:7",
		"{a}b": "hasp:{a}:fence:{a}b",
	} {
		if lock, got := LockKey(key), DerivedKey("fence", key); lock != key || got != fence {
			t.Errorf("%q: got %q and %q", key, lock, got)
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

// On a cluster, the channels on which scripts on a key can publish are one for each slot.
func TestChannel(t *testing.T) {
	one := New(redis.NewClient(&redis.Options{}))
	if got, want := one.Channel("grant:me", "k{1}"), "hasp:grant:me"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	cluster := New(redis.NewClusterClient(&redis.ClusterOptions{}))
	for _, key := range []string{"k", "{k}a", "a{}b", "a{b", "{}}", "hasp:{1}:x", "}", ""} {
		got, want := cluster.Channel("grant:me", key), slot.Of(LockKey(key))
		if slot.Of(got) != want || !strings.HasSuffix(got, "}:grant:me") {
			t.Errorf("key %q: %q is in slot %d, not %d", key, got, slot.Of(got), want)
		}
	}
	if a, b := cluster.Channel("n", "{x}a"), cluster.Channel("n", "{x}b"); a != b {
		t.Errorf("%q and %q for one slot", a, b)
	}
}

// If the sentinels name another master, the rest of a list would be of a server that may
// have lost keys.
func TestListOfAMasterThatIsReplaced(t *testing.T) {
	srv := redistest.Start(t, redistest.Real)
	sentinel := srv.Proxy()
	claims(sentinel, 1, srv.Addr)
	s := opened(t, "redis-sentinel://"+sentinel.Addr()+"/m", nil)
	fill := "for i = 1, 1200 do redis.call('SET', 'key ' .. i, 'v') end return 1"
	await.Must(t, srv.Client().Eval(t.Context(), fill, nil).Err())
	pages, last := 0, error(nil)
	for _, err := range s.Scan(t.Context(), "", time.Second, ByToken) {
		pages, last = pages+1, err
		s.opened.sentinels.adopt(claimed{addr: deadPort, epoch: 2}, true)
	}
	if pages != 2 {
		t.Errorf("%d pages", pages)
	}
	wantsOutage(t, last, "named a new master")
}

// So no key's lock or fence is another key's. All derived keys are in the slot of the lock.
func TestKeyOfItsName(t *testing.T) {
	for _, key := range slices.Concat(odd, random(2000)) {
		if got, kind, ok := keyOf(LockKey(key)); !ok || got != key || kind != "" {
			t.Errorf("the lock of %q: got %q, %q, %t", key, got, kind, ok)
		}
		places := DerivedKey("places", key)
		if n := slot.Of(key); slot.Of(LockKey(key)) != n || slot.Of(places) != n {
			t.Errorf("%q: the slots of %q and %q differ", key, LockKey(key), places)
		}
		got, kind, ok := keyOf(places)
		if !ok || got != key || kind != "places" {
			t.Errorf("the places of %q: got %q, %q, %t", key, got, kind, ok)
		}
	}
	for _, name := range strings.Fields(`
		hasp:{ hasp:{} hasp:{x}:lock:k hasp:{k}:lock:k hasp:{x}:places:k hasp:{redlock}:mark`) {
		if got, kind, ok := keyOf(name); ok {
			t.Errorf("%q: got %q, %q: hasp makes no such name", name, got, kind)
		}
	}
}

// A name of a key with the prefix matches the pattern. path.Match reads these patterns as
// Redis does, as long as no name has a slash.
func TestPatternFindsEveryName(t *testing.T) {
	for _, key := range []string{"k*", "k?[a]", `k\*`, "hasp:{x", "hasp:{x}:lock:k", "kk"} {
		for i := range len(key) + 1 {
			queues := map[string]string{LockKey(key): "", DerivedKey("places", key): "places"}
			for name, queue := range queues {
				p := pattern(key[:i], queue)
				if ok, err := path.Match(p, name); p != "" && (!ok || err != nil) {
					t.Errorf("pattern %q does not match %q: %v", p, name, err)
				}
			}
		}
	}
	if ok, _ := path.Match(pattern("k*", ""), "kk"); ok {
		t.Error("a prefix is taken for a pattern")
	}
}

// Owner returns a part of a record only if hasp wrote the record. Another value may be a secret.
func TestRecordsOfAnyAttempt(t *testing.T) {
	token := strings.Repeat("A", 22)
	for record, owner := range map[string]string{
		token + "#me": "me", "kept-" + token + "#me": "me", token + "~2#me": "me", token + "#": "",
		token + "#a#b": "a#b", "AZaz09-_AZaz09-_#host/1/job": "host/1/job",
		token + "#\x00\xff": "\x00\xff",
	} {
		if got := Owner(record); got != owner || !hasToken(record) {
			t.Errorf("owner of %q: got %q, want %q", record, got, owner)
		}
	}
	for _, value := range []string{
		token, "", "#", "#me", "user#7", "a b#me", "a:b#me", "é#x", "a=b#c",
		"a b" + token + "#me", "8c0b3f0e-5d0c-4f6e-9a0e-0f3f0c8d9b1a",
	} {
		if Owner(value) != "" || hasToken(value) {
			t.Errorf("%q is taken for a record", value)
		}
	}
}
