package pubsublock

import (
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp/internal/redisstore"
	"github.com/hasplock/hasp/internal/redisstore/slot"
)

func TestTermsAreRoundedUp(t *testing.T) {
	for d, want := range map[time.Duration]int64{
		time.Second: 1000, time.Second + 1: 1001, time.Second - 1: 1000, 100 * time.Millisecond: 100, time.Nanosecond: 1,
	} {
		if got := redisstore.Millis(d); got != want {
			t.Errorf("%v: got %d ms, want %d", d, got, want)
		}
	}
}

// Only what hasp wrote is shown to people: another value may be a secret.
func TestOwnerIsOnlyThatOfARecordOfOurs(t *testing.T) {
	for field, want := range map[string]string{
		"AZaz09-_#host/1/job": "host/1/job", "t#": "", "t#a#b": "a#b", "t#\x00\xff": "\x00\xff",
		"": "", "#": "", "#owner": "", "8c0b3f0e-5d0c-4f6e-9a0e-0f3f0c8d9b1a": "", "pass word#1": "", "é#x": "", "a=b#c": "",
	} {
		if got := redisstore.Owner(field); got != want {
			t.Errorf("%q: got %q, want %q", field, got, want)
		}
	}
}

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

// A script may publish only to what is in the slot of its keys, and two keys
// must not wake each other's waiters without need.
func FuzzChannelIsInTheSlotOfTheLock(f *testing.F) {
	for _, key := range []string{"k", "a{b}c", "a}b", "a{b", "{}", "}{", "{", "}", "{}x", "{{a}}", "hasp:{k}:lock:k", "\x00\xff", strings.Repeat("}", 100)} {
		f.Add(DefaultChannel, key)
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
