package pubsublock

import (
	"strings"
	"testing"

	"github.com/hasplock/hasp/internal/redisstore"
	"github.com/hasplock/hasp/internal/redisstore/slot"
)

func TestChannelIsRedissonsIfThatIsInTheSlotOfTheKey(t *testing.T) {
	for _, c := range []struct{ key, single, sharded string }{
		{"orders", "c:{orders}", "c:{orders}"},
		{"app:{orders}:1", "c:app:{orders}:1", "c:app:{orders}:1"},
		{"{a}", "c:{a}", "c:{a}"},
		{"a}b", "c:{a}b}", "hasp:{20658}:channel:a}b"},
		{"a{b", "c:a{b", "hasp:{a{b}:channel:a{b"},
		{"hasp:{k}:x", "c:hasp:{k}:lock:hasp:{k}:x", "c:hasp:{k}:lock:hasp:{k}:x"},
	} {
		if got := channel("c", c.key, false); got != c.single {
			t.Errorf("%q: got %q, want %q", c.key, got, c.single)
		}
		if got := channel("c", c.key, true); got != c.sharded {
			t.Errorf("%q, sharded: got %q, want %q", c.key, got, c.sharded)
		}
	}
}

// A script may publish only to channels in the slot of its keys. Two keys do not share a
// channel, because a release of one would wake the waiters of the other.
func FuzzChannelIsInTheSlotOfTheLock(f *testing.F) {
	for _, key := range []string{"k", "a{b}c", "a}b", "a{b", "{}", "}{", "{", "}", "{}x", "{{a}}", "hasp:{k}:lock:k", "\x00\xff", strings.Repeat("}", 100)} {
		f.Add(defaultChannel, key)
	}
	f.Fuzz(func(t *testing.T, prefix, key string) {
		if key == "" || strings.Contains(prefix, "{") {
			return
		}
		name := channel(prefix, key, true)
		if got, want := slot.Of(name), slot.Of(redisstore.LockKey(key)); got != want {
			t.Errorf("channel %q of key %q is in slot %d, the lock in %d", name, key, got, want)
		}
		if other := key + "x"; channel(prefix, other, true) == name || channel(prefix, other, false) == channel(prefix, key, false) {
			t.Errorf("%q and %q share a channel", key, other)
		}
	})
}
